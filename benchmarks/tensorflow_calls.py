"""Costs of a collective in TensorFlow above the core: CPU time of a call and wall time of a step, on two ranks.

::

    python -m hvdlab run -np 2 python benchmarks/tensorflow_calls.py [--json FILE]

Each figure is a median. Forms alternate within one run, so that the machine's other load falls on all of them. In a
function a collective is asynchronous, so its cost above the core is its CPU time of the process less that of ``core,
called back``; of that ``a function without a collective`` is TensorFlow's part.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import hvdlab.numpy as core
import hvdlab.tensorflow as hvd
from hvdlab.tensorflow.installed import tf

SIZES = {"4 KiB": 1 << 10, "1 MiB": 1 << 18, "16 MiB": 1 << 22, "64 MiB": 1 << 24}
"""Elements of float32."""

IN_A_ROW = 20
"""Small calls of one form that are measured together, so that what they leave to other threads counts as theirs."""

GRADIENTS = 161  # of a ResNet-50
STEP_BYTES = 72 << 20  # bytes of all gradients of a step


def measured(
    calls: dict[str, Callable[[], Any]], repeats: int, in_a_row: int = 1
) -> dict[str, dict[str, float]]:
    """Return median times in microseconds of each call; they take turns: wall time, CPU time of the calling thread and
    of the process."""
    clocks = {
        "wall_us": time.perf_counter,
        "thread_cpu_us": time.thread_time,
        "process_cpu_us": time.process_time,
    }
    taken: dict[str, dict[str, list[float]]] = {name: {clock: [] for clock in clocks} for name in calls}
    for number in range(repeats + 3):
        for name, call in calls.items():
            before = [clock() for clock in clocks.values()]
            for _ in range(in_a_row):
                call()
            passed = [
                (clock() - begin) * 1e6 / in_a_row
                for clock, begin in zip(clocks.values(), before, strict=True)
            ]
            if number >= 3:
                for label, each in zip(clocks, passed, strict=True):
                    taken[name][label].append(each)
    return {
        name: {label: round(statistics.median(each), 1) for label, each in found.items()}
        for name, found in taken.items()
    }


def called_back(array: Any) -> None:
    """Run the core's collective as a kernel uses it: another thread waits, and a callback reports its end."""
    ended = threading.Event()
    core.allreduce_async(array, op=core.Sum, name="called back").add_done_callback(lambda _: ended.set())
    ended.wait()


def step(repeats: int) -> dict[str, dict[str, float]]:
    """Return the gradients of a step, as one group."""
    gradients = [tf.ones(STEP_BYTES // 4 // GRADIENTS) for _ in range(GRADIENTS)]
    arrays = [np.ones(STEP_BYTES // 4 // GRADIENTS, np.float32) for _ in range(GRADIENTS)]
    grouped = tf.function(lambda t: hvd.grouped_allreduce(t, op=hvd.Sum, name="step"), autograph=False)
    return measured(
        {
            "core": lambda: core.grouped_allreduce(arrays, op=core.Sum),
            "eager": lambda: hvd.grouped_allreduce(gradients, op=hvd.Sum),
            "function": lambda: grouped(gradients),
        },
        repeats,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--size", choices=SIZES, help="only this one, and no step")
    options = parser.parse_args()
    hvd.init()
    figures: dict[str, Any] = {}
    empty = tf.function(lambda t: t + 0.0, autograph=False)
    for label, count in SIZES.items():
        if options.size not in (None, label):
            continue
        tensor, array = tf.ones(count), np.ones(count, np.float32)
        function = tf.function(lambda t: hvd.allreduce(t, op=hvd.Sum, name="figure"), autograph=False)
        figures[label] = measured(
            {
                "core": lambda array=array: core.allreduce(array, op=core.Sum),
                "core, called back": lambda array=array: called_back(array),
                "a function without a collective": lambda tensor=tensor: empty(tensor),
                "eager": lambda tensor=tensor: hvd.allreduce(tensor, op=hvd.Sum),
                "function": lambda function=function, tensor=tensor: function(tensor),
            },
            options.repeats if count < 1 << 22 else max(5, options.repeats // 3),
            IN_A_ROW if count < 1 << 22 else 1,
        )
    if options.size is None:
        figures[f"{GRADIENTS} gradients"] = step(max(5, options.repeats // 3))
    if hvd.rank() == 0:
        print(json.dumps(figures, indent=2))
        if options.json:
            options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
