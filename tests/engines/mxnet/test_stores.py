"""The same calls on MXNet's stores and on ours, with the same numbers: results are equal to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import mxnet as mx
import numpy as np
import pytest

from hvdlab import kvstore

TYPES = ["float16", "float32", "float64", "int32", "int64", "int8", "uint8"]
SHAPES = [(1,), (7,), (3, 5), (2, 3, 4), (70_001,)]


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    if dtype.startswith("f"):
        return (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(dtype)
    return rng.integers(-100, 100, shape).astype(dtype)


def to_mx(value: Any) -> Any:
    if isinstance(value, list):
        return [to_mx(item) for item in value]
    if isinstance(value, kvstore.RowSparse):
        return mx.nd.sparse.row_sparse_array(
            (value.data, value.indices), shape=value.shape, dtype=value.dtype
        )
    return mx.nd.array(value, dtype=value.dtype)


class Both:
    """Pair of stores of both kinds, which get the same calls."""

    def __init__(self, name: str) -> None:
        self.theirs, self.ours = mx.kv.create(name), kvstore.create(name)

    def call(self, method: str, *arguments: Any, **named: Any) -> None:
        getattr(self.theirs, method)(*map(to_mx_argument, arguments), **named)
        getattr(self.ours, method)(*arguments, **named)

    def compare(self, key: Any, shape: tuple[int, ...], dtype: str = "float32") -> None:
        theirs, ours = mx.nd.empty(shape, dtype=dtype), np.empty(shape, dtype)
        self.theirs.pull(key, out=theirs)
        self.ours.pull(key, out=ours)
        same_bits(theirs.asnumpy(), ours, f"key {key}")


def to_mx_argument(value: Any) -> Any:
    return (
        to_mx(value)
        if isinstance(value, np.ndarray | list | kvstore.RowSparse) and not is_keys(value)
        else value
    )


def is_keys(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], int | str)


def same_bits(theirs: Any, ours: Any, what: str) -> None:
    assert (theirs.dtype, theirs.shape) == (ours.dtype, ours.shape), what
    different = theirs.view(np.uint8) != ours.view(np.uint8)
    wrong = np.flatnonzero(different.reshape(theirs.size, -1).any(axis=1))
    assert not len(wrong), (
        f"{what}: {len(wrong)} of {theirs.size}, first at {wrong[0]}: {theirs.flat[wrong[0]]!r} {ours.flat[wrong[0]]!r}"
    )


@pytest.mark.parametrize("name", ["local", "device"])
def test_sums_are_added_in_the_same_order(name: str) -> None:
    rng = np.random.default_rng(1)
    for dtype in TYPES:
        both = Both(name)
        # A key for each length: MXNet crashes where a key is pushed a longer list than before.
        for key, (shape, count) in enumerate(itertools.product(SHAPES, range(1, 11))):
            both.call("init", key, random_array(rng, shape, dtype))
            both.compare(key, shape, dtype)
            both.call("push", key, [random_array(rng, shape, dtype) for _ in range(count)])
            both.compare(key, shape, dtype)


def test_values_are_cast_as_c_does() -> None:
    rng = np.random.default_rng(2)
    for stored in TYPES:
        for wanted in TYPES:
            if stored.startswith("f") and wanted == "uint8":
                continue  # undefined in C for negative values
            both = Both("local")
            both.call("init", "a", np.abs(random_array(rng, (50,), stored)) % 100)
            both.compare("a", (50,), wanted)


@pytest.mark.parametrize("name", ["local", "device"])
def test_an_updater_gets_the_same_keys_and_sums(name: str) -> None:
    rng = np.random.default_rng(3)
    for keys in ([5, 2, 9], ["z", "a", "m"]):
        both = Both(name)
        calls: list[list[Any]] = [[], []]
        for store, seen in zip((both.theirs, both.ours), calls, strict=True):
            store._set_updater(recording(seen))
        both.call("init", keys, [random_array(rng, (4, 3), "float32") for _ in keys])
        for _ in range(5):
            chosen = rng.permutation([keys[0], keys[0], *keys[1:]]).tolist()
            both.call("push", chosen, [random_array(rng, (4, 3), "float32") for _ in chosen])
            for key in keys:
                both.compare(key, (4, 3))
        assert calls[0] == calls[1]


def recording(seen: list[Any]) -> Callable[[Any, Any, Any], None]:
    def update(key: Any, received: Any, stored: Any) -> None:
        seen.append(key.decode() if isinstance(key, bytes) else key)
        stored *= 0.5
        stored += 2 * received

    return update


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("test", {"rescale_grad": 0.5}),
    ("sgd", {}),
    ("sgd", {"learning_rate": 0.1, "wd": 0.01, "rescale_grad": 1 / 3}),
    ("sgd", {"learning_rate": 0.1, "wd": 0.01, "rescale_grad": 1 / 3, "clip_gradient": 0.7}),
    ("sgd", {"learning_rate": 0.3, "momentum": 0.9, "wd": 1e-4, "rescale_grad": 1 / 7}),
    ("sgd", {"learning_rate": 0.3, "momentum": 0.9, "wd": 1e-4, "rescale_grad": 1 / 7, "clip_gradient": 0.5}),
    ("adam", {}),
    ("adam", {"learning_rate": 0.05, "wd": 0.01, "rescale_grad": 1 / 3, "clip_gradient": 0.5, "beta1": 0.8}),
    ("nag", {"learning_rate": 0.1, "wd": 0.01, "rescale_grad": 1 / 3}),
    ("nag", {"learning_rate": 0.1, "wd": 0.01, "rescale_grad": 1 / 3, "clip_gradient": 0.5}),
    ("adagrad", {"learning_rate": 0.1, "rescale_grad": 1 / 3, "eps": 1e-5}),
    ("adagrad", {"learning_rate": 0.1, "clip_gradient": 0.5}),
    ("rmsprop", {"learning_rate": 0.05, "wd": 0.01, "rescale_grad": 1 / 3, "gamma1": 0.8}),
    ("rmsprop", {"learning_rate": 0.05, "wd": 0.01, "clip_gradient": 0.5, "clip_weights": 1.5}),
    ("rmsprop", {"learning_rate": 0.05, "wd": 0.01, "rescale_grad": 1 / 3, "centered": True, "gamma2": 0.7}),
]

DENSE: list[tuple[str, dict[str, Any]]] = [
    ("nag", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01, "rescale_grad": 1 / 3}),
    ("nag", {"learning_rate": 0.1, "momentum": 0.7, "wd": 0.01, "clip_gradient": 0.5}),
    ("adagrad", {"learning_rate": 0.1, "wd": 0.01, "rescale_grad": 1 / 3, "clip_gradient": 0.5}),
]
"""With settings that one of the two does not have for row-sparse gradients."""

FLOAT32_STATES = ("test", "adagrad", "rmsprop")
"""MXNet's have these for weights of all types, and fail with other types, or round otherwise."""


@pytest.mark.parametrize(
    ("name", "arguments"), [*OPTIMIZERS, *DENSE], ids=lambda v: v if isinstance(v, str) else ""
)
def test_optimizers_compute_the_same_bits(name: str, arguments: dict[str, Any]) -> None:
    rng = np.random.default_rng(4)
    for dtype, multi_precision in [
        ("float32", False),
        ("float64", False),
        ("float16", False),
        ("float16", True),
    ]:
        computed = "float32" if multi_precision and name != "test" else dtype
        if name in FLOAT32_STATES and computed != "float32":
            continue
        both = Both("local")
        settings = {**arguments, "multi_precision": multi_precision}
        both.theirs.set_optimizer(mx.optimizer.create(name, **settings))
        both.ours.set_optimizer(kvstore.optimizer.create(name, **settings))
        for key, shape in enumerate(SHAPES):
            both.call("init", key, (random_array(rng, shape, dtype) / 100).astype(dtype))
        if dtype == "float16" and not multi_precision:
            with pytest.warns(UserWarning, match="multi_precision"):
                train(both, rng, dtype)
        else:
            train(both, rng, dtype)


def train(both: Both, rng: np.random.Generator, dtype: str) -> None:
    for _ in range(6):
        for key, shape in enumerate(SHAPES):
            gradients = [(random_array(rng, shape, dtype) / 50).astype(dtype) for _ in range(1 + key % 3)]
            both.call("push", key, gradients)
            both.compare(key, shape, dtype)


def random_rows(rng: np.random.Generator, shape: tuple[int, int], count: int) -> kvstore.RowSparse:
    rows = np.sort(rng.choice(shape[0], count, replace=False))
    return kvstore.RowSparse(random_array(rng, (count, shape[1]), "float32"), rows, shape)


@pytest.mark.parametrize(
    ("name", "arguments"), [(None, {}), *OPTIMIZERS[1:]], ids=lambda v: v if isinstance(v, str) else ""
)
def test_row_sparse_values(name: str | None, arguments: dict[str, Any]) -> None:
    rng = np.random.default_rng(5)
    shape = (30, 4)
    both = Both("local")
    if name is not None:
        both.theirs.set_optimizer(mx.optimizer.create(name, **arguments))
        both.ours.set_optimizer(kvstore.optimizer.create(name, **arguments))
    both.call("init", "w", kvstore.RowSparse(random_array(rng, shape, "float32"), np.arange(30), shape))
    for _ in range(8):
        both.call("push", "w", [random_rows(rng, shape, int(n)) for n in rng.integers(1, 12, 3)])
        ids = rng.integers(0, 30, (2, 5))
        theirs = mx.nd.sparse.zeros("row_sparse", shape)
        ours = kvstore.RowSparse(np.zeros((0, 4), np.float32), [], shape)
        both.theirs.row_sparse_pull("w", out=theirs, row_ids=mx.nd.array(ids))
        both.ours.row_sparse_pull("w", out=ours, row_ids=ids)
        same_bits(theirs.indices.asnumpy().astype(np.int64), ours.indices, "indices")
        same_bits(theirs.data.asnumpy(), ours.data, "rows")


@pytest.mark.parametrize("threshold", [0.5, 0.1, 3])
def test_compressed_pushes(threshold: float) -> None:
    rng = np.random.default_rng(6)
    both = Both("device")
    both.call("set_gradient_compression", {"type": "2bit", "threshold": threshold})
    for key, shape in enumerate(SHAPES):
        both.call("init", key, random_array(rng, shape, "float32"))
        both.compare(key, shape)
    for _ in range(5):
        for key, shape in enumerate(SHAPES):
            pushed = [(rng.standard_normal(shape) * threshold).astype("f4") for _ in range(1 + key % 3)]
            both.call("push", key, pushed)
            both.compare(key, shape)


REFUSED: list[Callable[[Any, Callable[[Any], Any]], Any]] = [
    lambda kv, a: kv.init(3, a(1)),
    lambda kv, a: kv.init([8, 8], [a(1), a(1)]),
    lambda kv, a: kv.init("a", a(1)),
    lambda kv, a: kv.init(1.5, a(1)),
    lambda kv, a: kv.init(None, a(1)),
    lambda kv, a: kv.init(np.int64(9), a(1)),
    lambda kv, a: kv.init(9, 1.0),
    lambda kv, a: kv.init(9, [1.0]),
    lambda kv, a: kv.init([9, "b"], [a(1), a(1)]),
    lambda kv, a: kv.init([9, 10], [a(1)]),
    lambda kv, a: kv.push("zz", a(1)),
    lambda kv, a: kv.pull(7, out=a(1)),
    lambda kv, a: kv.pull(3),
    lambda kv, a: kv.broadcast(3, a(1), out=a(1)),
    lambda kv, a: kv.broadcast(11, a(1), out=None),
    lambda kv, a: kv.set_gradient_compression({"type": "2bit"}),
    lambda kv, a: kv.is_capable("unknown"),
    lambda kv, a: kv.row_sparse_pull(3, out=a(1), row_ids=a(1)),
    lambda kv, a: kv.row_sparse_pull(3, out=None, row_ids=a(1)),
    lambda kv, a: kv.save_optimizer_states("nowhere"),
    lambda kv, a: kv.load_optimizer_states("nowhere"),
]


def test_what_is_refused_is_refused_by_both_with_the_same_kind_of_error() -> None:
    both = Both("local")
    both.call("init", 3, np.ones(1, np.float32))
    for number, call in enumerate(REFUSED):
        kinds = [refusal(call, both.theirs, to_mx), refusal(call, both.ours, lambda value: value)]
        assert kinds[0] == kinds[1], number
    both.compare(3, (1,))


def refusal(call: Callable[..., Any], store: Any, array: Callable[[Any], Any]) -> type[BaseException]:
    try:
        call(store, lambda size: array(np.ones(size, np.float32)))
    except (mx.MXNetError, kvstore.KVStoreError):
        return RuntimeError
    except Exception as error:  # noqa: BLE001  (its type is the result)
        return RuntimeError if type(error) is Exception else type(error)
    raise AssertionError(f"{type(store).__module__} refused nothing")


def test_the_stores_take_arrays_of_mxnet_without_mxnets_help() -> None:
    kv = kvstore.create("device")
    weight = mx.nd.ones((2, 3)) * 4
    kv.init("w", weight)
    received: list[type] = []

    def update(key: str, gradient: Any, stored: Any) -> None:
        received.append(type(stored))
        stored += gradient * 2

    kv._set_updater(update)
    kv.push("w", [mx.nd.ones((2, 3))] * 3)
    outs = [mx.nd.zeros((2, 3)), mx.nd.zeros((2, 3), dtype="float64")]
    kv.pull("w", out=outs)
    assert [out.asnumpy().tolist() for out in outs] == [[[10.0] * 3] * 2] * 2
    assert received == [mx.nd.NDArray]
