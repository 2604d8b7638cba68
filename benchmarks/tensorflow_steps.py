"""hvdlab.tensorflow beside ``tf.distribute.MultiWorkerMirroredStrategy``: reductions in functions, and steps of ``model.fit``.

::

    python -m hvdlab run -np 2 python benchmarks/tensorflow_steps.py [--json FILE] [--only reductions|step|fit]

Both work in the same two processes, one after the other in each round, so that the machine's other load falls on both.
The strategy uses its rings, its means for CPUs. Each figure is a median; a ratio is hvdlab's time over the strategy's,
of steps per second the other way round. A step of gradients is compared with ``hvdlab.torch``, too, where PyTorch is
installed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import hvdlab.numpy as core

SIZES = {"4 KiB": 1 << 10, "1 MiB": 1 << 18, "16 MiB": 1 << 22, "64 MiB": 1 << 24}
"""Elements of float32."""

GRADIENTS = 161  # of a ResNet-50
STEP_BYTES = 72 << 20  # bytes of all gradients of a step
BATCH = 16
STEPS = 8
"""Of a round of ``fit``."""


def strategy() -> Any:
    """Return a strategy over the ranks; TensorFlow must not have computed anything before."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        places = core.allgather_object(f"127.0.0.1:{own.getsockname()[1]}")
    task = {"type": "worker", "index": core.rank()}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": places}, "task": task})
    import tensorflow as tf

    ring = tf.distribute.experimental.CollectiveCommunication.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median time of each call in milliseconds; two rounds come first that do not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            core.barrier()
            before = time.perf_counter()
            call()
            if number >= 2:
                times[name].append((time.perf_counter() - before) * 1e3)
    return {name: round(statistics.median(each), 3) for name, each in times.items()}


def _strategys(theirs: Any, tensors: list[Any]) -> Callable[[], Any]:
    import tensorflow as tf

    @tf.function(autograph=False)
    def reduce() -> Any:
        def replica() -> Any:
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tensors)

        return theirs.run(replica)

    return reduce


def reductions(theirs: Any, rounds: int) -> dict[str, Any]:
    import tensorflow as tf

    import hvdlab.tensorflow as hvd

    found = {}
    for label, count in SIZES.items():
        tensor = tf.ones(count)
        ours = tf.function(lambda t=tensor: hvd.allreduce(t, op=hvd.Sum), autograph=False)
        calls = {"hvdlab": ours, "strategy": _strategys(theirs, [tensor])}
        found[label] = in_turns(calls, rounds if count < 1 << 22 else max(5, rounds // 3))
    return found


def step(theirs: Any, rounds: int) -> dict[str, Any]:
    import tensorflow as tf

    import hvdlab.tensorflow as hvd

    count = STEP_BYTES // 4 // GRADIENTS
    tensors = [tf.ones(count) for _ in range(GRADIENTS)]
    ours = tf.function(lambda: hvd.grouped_allreduce(tensors, op=hvd.Sum), autograph=False)
    calls: dict[str, Callable[[], Any]] = {"hvdlab": ours, "strategy": _strategys(theirs, tensors)}
    if find_spec("torch") is not None:
        import torch

        import hvdlab.torch as hvd_torch

        ones = [torch.ones(count) for _ in range(GRADIENTS)]
        calls["hvdlab.torch"] = lambda: hvd_torch.grouped_allreduce(ones, op=hvd_torch.Sum)
    return {f"{GRADIENTS} gradients": in_turns(calls, max(5, rounds // 3))}


def _resnet(keras: Any) -> Any:
    layers = keras.layers

    def block(x: Any, filters: int, stride: int) -> Any:
        y = layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)(x)
        y = layers.ReLU()(layers.BatchNormalization()(y))
        y = layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same", use_bias=False)(y))
        if stride > 1 or x.shape[-1] != filters:
            x = layers.Conv2D(filters, 1, stride, use_bias=False)(x)
        return layers.ReLU()(layers.Add()([x, y]))

    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(16, 3, padding="same", use_bias=False)(inputs)
    for filters, stride in ((16, 1), (32, 2), (64, 2)):
        x = block(x, filters, stride)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def fit(theirs: Any, rounds: int) -> dict[str, Any]:
    import tensorflow as tf
    import tf_keras

    import hvdlab.tensorflow as hvd

    random = np.random.default_rng(core.rank())
    x = random.normal(size=(BATCH, 32, 32, 3)).astype(np.float32)
    y = random.integers(0, 10, BATCH)
    data = tf.data.Dataset.from_tensors((x, y)).repeat(STEPS)
    off = tf.data.Options()
    off.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF

    def compiled(wrap: Callable[[Any], Any]) -> Any:
        model = _resnet(tf_keras)
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(wrap(tf_keras.optimizers.SGD(0.01, momentum=0.9)), loss)
        return model

    with theirs.scope():
        mirrored = compiled(lambda optimizer: optimizer)
    ours = compiled(hvd.DistributedOptimizer)
    whole = data.with_options(off)
    taken = in_turns(
        {
            "hvdlab": lambda: ours.fit(data, verbose=0),
            "strategy": lambda: mirrored.fit(whole, verbose=0),
        },
        max(5, rounds // 3),
    )
    return {"fit, steps/s": {name: round(STEPS * 1e3 / each, 2) for name, each in taken.items()}}


PARTS = {"reductions": reductions, "step": step, "fit": fit}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    core.init()
    theirs = strategy()
    figures: dict[str, Any] = {}
    for name, part in PARTS.items():
        if options.only in (None, name):
            figures.update(part(theirs, options.rounds))
    for label, each in figures.items():
        for peer in ("strategy", "hvdlab.torch"):
            if peer in each:
                each[f"over {peer}"] = round(each["hvdlab"] / each[peer], 3)
        if core.rank() == 0:
            print(label, each, flush=True)
    if core.rank() == 0 and options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
