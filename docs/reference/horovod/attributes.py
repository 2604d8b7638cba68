"""Reads and sets the attributes of Horovod's objects, and writes ``docs/reference/horovod-attributes.md``.

::

    python docs/reference/horovod/attributes.py            # write the page
    python docs/reference/horovod/attributes.py --check    # fail if it is not what would be written

Each object is a real one, made in a world of one rank. ``attributes.toml`` has Horovod's attributes, and the reason for each that is not
there or can't be set: a reason that is missing, and one for what works, are errors.
"""

from __future__ import annotations

import copy
import os
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generated_page import Stale, write_or_check

HERE = Path(__file__).parent
PAGE = HERE.parent / "horovod-attributes.md"
PROPERTY = "property"
"""In ``attributes.toml``: Horovod's own objects let programs only read this attribute."""

INTRODUCTION = """\
# Attributes of Horovod's objects, one by one

What programs read from Horovod's objects and set on them, beside their methods, and whether it works here. Each line was found by a machine:
`make tables` makes each object in a world of one rank, reads the attribute, sets it to another value and reads that back; a test compares
this page with what it finds. The [names of Horovod](horovod.md) have a page of their own.

What is set takes effect where the attribute is used next: on a distributed optimizer of torch for the next step, on one of TensorFlow when
a `tf.function` is traced next. An optimizer of torch refuses a change between a backward pass and its `step()`.

The estimators of Spark are not here, nor the executors of Ray and what needs MXNet, since these are not installed where the page is made. Estimators
have a parameter for each of Horovod's names, with its `get…` and `set…`: [Spark](../how-to/spark-estimators.md).
"""


@dataclass(frozen=True)
class Attribute:
    """Result of reading an attribute of an object, and of setting it.

    Attributes:
        kind: The name of its value's type; empty if it is not there.
        is_set: Whether another value was read back after it had been set.
    """

    kind: str
    is_set: bool


# -- the objects ------------------------------------------------------------------------------------------------------


def _sgd() -> Any:
    import torch

    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)


def _keras_model(units: int = 1) -> Any:
    import keras

    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(units)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def _batch_normalization() -> Any:
    import horovod.tensorflow as hvd

    layer = hvd.SyncBatchNormalization()
    layer.build((None, 3))
    return layer


def makers() -> dict[str, Callable[[], Any]]:
    """How each object of ``attributes.toml`` is made."""
    import horovod.tensorflow
    import horovod.tensorflow.keras
    import horovod.torch as hvd
    import keras
    import tensorflow as tf
    import torch
    from horovod.common.basics import HorovodBasics
    from horovod.common.elastic import ObjectState
    from horovod.common.exceptions import HorovodVersionMismatchError, HostsUpdatedInterrupt
    from horovod.data import AsyncDataLoaderMixin
    from horovod.runner.elastic import discovery

    tf_hvd, callbacks = horovod.tensorflow, horovod.tensorflow.keras.callbacks
    elastic, sampler, states = horovod.tensorflow.keras.elastic, hvd.elastic.ElasticSampler, hvd.elastic.state
    of_torch: dict[str, Callable[[], Any]] = {
        "DistributedOptimizer": lambda: hvd.DistributedOptimizer(_sgd()),
        "DistributedOptimizer(op=hvd.Adasum)": lambda: hvd.DistributedOptimizer(_sgd(), op=hvd.Adasum),
        "Compression": lambda: hvd.Compression,
        "ProcessSet": lambda: hvd.ProcessSet([0]),
        "global_process_set": lambda: hvd.global_process_set,
        "SyncBatchNorm": lambda: hvd.SyncBatchNorm(3),
        "elastic.ElasticSampler": lambda: sampler([1, 2]),
        "elastic.TorchState": lambda: hvd.elastic.TorchState(torch.nn.Linear(1, 1), _sgd(), epoch=1),
        "elastic.state.ModelStateHandler": lambda: states.ModelStateHandler(torch.nn.Linear(1, 1)),
        "elastic.state.OptimizerStateHandler": lambda: states.OptimizerStateHandler(_sgd()),
        "elastic.state.SamplerStateHandler": lambda: states.SamplerStateHandler(sampler([1])),
    }
    of_tensorflow: dict[str, Callable[[], Any]] = {
        "DistributedOptimizer": lambda: tf_hvd.DistributedOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(0.1)
        ),
        "DistributedGradientTape": lambda: tf_hvd.DistributedGradientTape(tf.GradientTape()),
        "LocalGradientAggregationHelper": lambda: tf_hvd.LocalGradientAggregationHelper(
            2, lambda grads, vars: grads, False, False, 0, "keras", name="sums"
        ),
        "BroadcastGlobalVariablesHook": lambda: tf_hvd.BroadcastGlobalVariablesHook(0),
        "Compression": lambda: tf_hvd.Compression,
        "SyncBatchNormalization": _batch_normalization,
        "elastic.TensorFlowKerasState": lambda: tf_hvd.elastic.TensorFlowKerasState(_keras_model(), epoch=1),
        "elastic.TensorFlowState": lambda: tf_hvd.elastic.TensorFlowState([tf.Variable(1.0)], epoch=1),
    }
    of_keras: dict[str, Callable[[], Any]] = {
        "DistributedOptimizer": lambda: horovod.tensorflow.keras.DistributedOptimizer(
            keras.optimizers.SGD(0.1)
        ),
        "callbacks.BestModelCheckpoint": callbacks.BestModelCheckpoint,
        "callbacks.BroadcastGlobalVariablesCallback": lambda: callbacks.BroadcastGlobalVariablesCallback(0),
        "callbacks.LearningRateScheduleCallback": lambda: callbacks.LearningRateScheduleCallback(0.1, 0.5),
        "callbacks.LearningRateWarmupCallback": lambda: callbacks.LearningRateWarmupCallback(0.1),
        "callbacks.MetricAverageCallback": callbacks.MetricAverageCallback,
        "elastic.CommitStateCallback": lambda: elastic.CommitStateCallback(_state()),
        "elastic.KerasState": lambda: elastic.KerasState(_keras_model(), epoch=1),
        "elastic.UpdateBatchStateCallback": lambda: elastic.UpdateBatchStateCallback(_state()),
        "elastic.UpdateEpochStateCallback": lambda: elastic.UpdateEpochStateCallback(_state()),
    }

    def _state() -> Any:
        return ObjectState(lambda value: value, lambda: 0, epoch=1, batch=0)

    return {
        **{f"horovod.torch.{name}": make for name, make in of_torch.items()},
        **{f"horovod.tensorflow.{name}": make for name, make in of_tensorflow.items()},
        **{f"horovod.tensorflow.keras.{name}": make for name, make in of_keras.items()},
        "horovod.common.basics.HorovodBasics": lambda: HorovodBasics(__file__),
        "horovod.common.elastic.ObjectState": _state,
        "horovod.common.exceptions.HorovodVersionMismatchError": lambda: HorovodVersionMismatchError(
            "torch", "2", "1"
        ),
        "horovod.common.exceptions.HostsUpdatedInterrupt": lambda: HostsUpdatedInterrupt(True),
        "horovod.data.AsyncDataLoaderMixin": AsyncDataLoaderMixin,
        "horovod.runner.elastic.discovery.DiscoveredHosts": lambda: discovery.DiscoveredHosts(
            {"a": 1}, ["a"]
        ),
        "horovod.runner.elastic.discovery.HostManager": lambda: discovery.HostManager(
            discovery.FixedHosts({"a": 1})
        ),
    }


# -- reading and setting ----------------------------------------------------------------------------------------------


def other_than(value: Any, name: str) -> Any:
    """Return another value that an attribute with this value can have.

    A value of a type that this function does not know is returned itself.
    """
    import torch

    import hvdlab.torch as hvd

    if name == "op":
        return hvd.Sum
    if name == "processed_num":
        return value + 1
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, int | float):
        return type(value)(value + 1) if type(value) in (int, float) else int(value) + 1
    if value is None:
        return 3
    if isinstance(value, list | dict | set | tuple):
        return copy.copy(value)
    if isinstance(value, type):  # of a compressor
        return type(value.__name__, (value,), {})
    if isinstance(value, hvd.ProcessSet):
        made = hvd.ProcessSet([0])
        made.process_set_id = 0
        return made
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(value.detach().clone())
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, torch.nn.Module):
        return torch.nn.Linear(2, 2)
    if isinstance(value, torch.optim.Optimizer):
        return _sgd()
    if callable(value) and not hasattr(value, "fit"):
        return lambda *arguments: value(*arguments)
    if hasattr(value, "fit"):
        return _keras_model(2)
    if hasattr(value, "apply_gradients"):
        return type(value)(0.5)
    if isinstance(value, hvd.elastic.ElasticSampler):
        return hvd.elastic.ElasticSampler([1, 2, 3])
    return value


def found(owner: Any, name: str) -> Attribute:
    """Read an attribute, set it to another value, read that back, and set the former one again."""
    try:
        before = getattr(owner, name)
    except AttributeError:
        return Attribute("", False)
    kind = "None" if before is None else type(before).__name__
    other = other_than(before, name)
    try:
        setattr(owner, name, other)
    except (AttributeError, TypeError, ValueError):
        return Attribute(kind, False)
    is_set = _alike(getattr(owner, name), other)
    setattr(owner, name, before)
    return Attribute(kind, is_set and _alike(getattr(owner, name), before))


def _alike(value: Any, other: Any) -> bool:
    if value is other:
        return True
    try:
        return bool(value == other) or float(value) == float(other)
    except (TypeError, ValueError):
        return False


# -- the page ---------------------------------------------------------------------------------------------------------


def judged(name: str, attribute: Attribute, reason: str) -> str:
    """Return the note of an attribute.

    Raises:
        Stale: It needs a reason and has none, or has one that it does not need.
    """
    if reason == PROPERTY:
        if not attribute.kind or attribute.is_set:
            raise Stale(f"{name} is no attribute that can only be read: correct attributes.toml")
        return "as in Horovod"
    if (attribute.kind != "" and attribute.is_set) != (reason == ""):
        what = "works" if reason else "can't be set" if attribute.kind else "is not there"
        raise Stale(f"{name} {what}: correct attributes.toml, or the code")
    return reason


def sections() -> Iterator[tuple[str, list[str]]]:
    """Return each object's name and its rows."""
    listed: dict[str, dict[str, str]] = tomllib.loads((HERE / "attributes.toml").read_text())
    made = makers()
    problems = [
        f"{name} is in one of attributes.toml and makers() only" for name in listed.keys() ^ made.keys()
    ]
    for name in (name for name in listed if name in made):
        rows = []
        for attribute, reason in listed[name].items():
            seen = found(made[name](), attribute)
            try:
                note = judged(f"{name}.{attribute}", seen, reason)
            except Stale as problem:
                problems.append(str(problem))
                continue
            kind = f"`{seen.kind}`" if seen.kind else ""
            rows.append(
                f"| `{attribute}` | {kind} | {_shown(bool(seen.kind))} | {_shown(seen.is_set)} | {note} |"
            )
        yield name, rows
    if problems:
        raise Stale("\n".join(problems))


def _shown(works: bool) -> str:
    return "yes" if works else "no"


def page() -> str:
    """Return the whole page.

    Raises:
        Stale: Attributes lack a reason, or have one that is not true; the text lists all of them.
    """
    import hvdlab

    hvdlab.install_as_horovod(force=True)
    import horovod.torch as hvd

    hvd.init()
    try:
        lines = [INTRODUCTION.rstrip("\n")]
        for name, rows in sections():
            lines += [
                "",
                f"## `{name}`",
                "",
                "| attribute | type here | read | set | |",
                "|---|---|---|---|---|",
                *rows,
            ]
    finally:
        hvd.shutdown()
    return "\n".join(lines) + "\n"


def main() -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    return write_or_check(PAGE, page, __doc__)


if __name__ == "__main__":
    sys.exit(main())
