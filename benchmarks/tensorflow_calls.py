"""What a collective costs in TensorFlow above the core: CPU time of a call and wall time of a step, on two ranks.

::

    python -m hvdlab run -np 2 python benchmarks/tensorflow_calls.py [--json FILE]

Each figure is a median. Forms alternate within one run, so that what else the machine does falls on all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
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

GRADIENTS = 161
STEP_BYTES = 72 << 20


def measured(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, float]]:
    """Median wall and CPU time in microseconds of each call; they take turns."""
    wall: dict[str, list[float]] = {name: [] for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(repeats + 3):
        for name, call in calls.items():
            before, used = time.perf_counter(), time.thread_time()
            call()
            if number >= 3:
                wall[name].append((time.perf_counter() - before) * 1e6)
                cpu[name].append((time.thread_time() - used) * 1e6)
    return {
        name: {
            "wall_us": round(statistics.median(wall[name]), 1),
            "thread_cpu_us": round(statistics.median(cpu[name]), 1),
        }
        for name in calls
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    hvd.init()
    figures: dict[str, Any] = {}
    for label, count in SIZES.items():
        tensor, array = tf.ones(count), np.ones(count, np.float32)
        function = tf.function(lambda t: hvd.allreduce(t, op=hvd.Sum, name="figure"), autograph=False)
        figures[label] = measured(
            {
                "core": lambda array=array: core.allreduce(array, op=core.Sum),
                "eager": lambda tensor=tensor: hvd.allreduce(tensor, op=hvd.Sum),
                "function": lambda function=function, tensor=tensor: function(tensor),
            },
            options.repeats if count < 1 << 22 else max(5, options.repeats // 3),
        )
    gradients = [tf.ones(STEP_BYTES // 4 // GRADIENTS) for _ in range(GRADIENTS)]
    arrays = [np.ones(STEP_BYTES // 4 // GRADIENTS, np.float32) for _ in range(GRADIENTS)]
    grouped = tf.function(lambda t: hvd.grouped_allreduce(t, op=hvd.Sum, name="step"), autograph=False)
    figures[f"{GRADIENTS} gradients"] = measured(
        {
            "core": lambda: core.grouped_allreduce(arrays, op=core.Sum),
            "eager": lambda: hvd.grouped_allreduce(gradients, op=hvd.Sum),
            "function": lambda: grouped(gradients),
        },
        max(5, options.repeats // 3),
    )
    if hvd.rank() == 0:
        print(json.dumps(figures, indent=2))
        if options.json:
            options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
