"""Scripts of MXNet's own: its arrays, optimizers and trainer, on stores of MXNet's and on hvdlab's in their place.

As in ``store_scripts`` all workers run a script on one store; its results are equal to the bit.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx  # pyright: ignore[reportMissingImports]
import numpy as np
from store_scripts import (  # type: ignore[import-not-found]  # mypy knows it as engines.mxnet.store_scripts
    SHAPES,
    Results,
    generator,
    random,
)

FACTOR = {"step": 2, "factor": 0.5, "base_lr": 0.3}

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"momentum": 0.9, "wd": 0.01, "lr_scheduler": mx.lr_scheduler.FactorScheduler(**FACTOR)}),
    ("nag", {"momentum": 0.9, "wd": 0.01, "rescale_grad": 1 / 3}),
    ("adam", {"lr_scheduler": mx.lr_scheduler.MultiFactorScheduler([1, 3], 0.1, base_lr=0.1)}),
    ("adagrad", {"learning_rate": 0.1, "wd": 0.01}),
    ("rmsprop", {"learning_rate": 0.01, "clip_gradient": 0.5}),
    ("rmsprop", {"learning_rate": 0.01, "centered": True, "wd": 0.1}),
    ("ftrl", {"learning_rate": 0.1, "lamda1": 0.02}),
    ("signum", {"learning_rate": 0.01, "momentum": 0.9, "wd_lh": 1e-4}),
    ("adadelta", {"wd": 0.01}),
    ("adamax", {"learning_rate": 0.01}),
    ("nadam", {}),
    ("ftml", {"learning_rate": 0.01}),
    ("lamb", {"learning_rate": 0.01, "wd": 0.01}),
    ("dcasgd", {"learning_rate": 0.01}),
    ("adamax", {"lr_scheduler": mx.lr_scheduler.PolyScheduler(6, base_lr=0.1)}),
    ("sgd", {"lr_scheduler": mx.lr_scheduler.CosineScheduler(5, base_lr=0.1, warmup_steps=2)}),
]


def mxnets_optimizers(kv: Any, side: Any) -> Any:
    """All of MXNet's that are not random, with schedulers and factors by key; several gradients of one worker, as several devices give."""
    results = Results(kv, side)
    for number, (name, arguments) in enumerate(OPTIMIZERS):
        optimizer = side.optimizer(name, **arguments)
        first = 50_000 + 100 * number
        optimizer.set_lr_mult({first: 0.5})
        optimizer.set_wd_mult({first + 1: 3.0})
        kv.set_optimizer(optimizer)
        kv._barrier()
        common, own = generator(kv, first)
        for key, shape in enumerate(SHAPES[:4], start=first):
            kv.init(key, side.array((random(common, shape) / 100).astype("f4")))
        for _ in range(5):
            for key, shape in enumerate(SHAPES[:4], start=first):
                kv.push(key, [side.array(random(own, shape) / 50) for _ in range(1 + key % 3)])
                results.pull(key, shape, what=name)
    return results.seen


def _net(contexts: list[Any]) -> Any:
    made = mx.gluon.nn.HybridSequential(prefix="net_")
    with made.name_scope():
        made.add(
            mx.gluon.nn.Dense(8, activation="relu", in_units=5),
            mx.gluon.nn.BatchNorm(in_channels=8),
            mx.gluon.nn.Dense(4, in_units=8),
        )
    made.initialize(ctx=contexts)
    rng = np.random.default_rng(7)
    for _, parameter in sorted(made.collect_params().items()):
        if parameter.grad_req != "null":
            parameter.set_data(mx.nd.array(rng.standard_normal(parameter.shape) / 3))
    return made


def _trained(kv: Any, side: Any, **options: Any) -> Any:
    results, contexts = Results(kv, side), [mx.cpu(0), mx.cpu(1)]
    net = _net(contexts)
    settings = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", settings, kvstore=kv, **options)
    _, own = generator(kv, 3)
    for step in range(5):
        parts = [
            (mx.nd.array(own.standard_normal((6, 5)), ctx=c), mx.nd.array(own.standard_normal((6, 4)), ctx=c))
            for c in contexts
        ]
        with mx.autograd.record():
            losses = [mx.gluon.loss.L2Loss()(net(x), y) for x, y in parts]
        mx.autograd.backward(losses)
        if step == 3 and not trainer._update_on_kvstore:
            trainer.set_learning_rate(0.05)
        trainer.step(6 * len(contexts) * kv.num_workers)
        for place, loss in enumerate(losses):
            results.array(f"loss {place}", loss)
        for key, parameter in sorted(net.collect_params().items()):
            for place, data in enumerate(parameter.list_data()):
                results.array(f"{key} {place}", data)
        kv._barrier()  # or MXNet's own servers, on a busy machine, now and then give workers another sum
    results.value("on the store", trainer._update_on_kvstore)
    return results.seen


def trainer_on_the_store(kv: Any, side: Any) -> Any:
    """``gluon.Trainer`` with two contexts, which updates on the store."""
    return _trained(kv, side)


def trainer_itself(kv: Any, side: Any) -> Any:
    """``gluon.Trainer`` with two contexts, which takes sums from the store and updates itself."""
    return _trained(kv, side, update_on_kvstore=False)
