"""Scripts that run on stores of MXNet's and of hvdlab's; their results are equal to the bit.

A script takes a store and a :class:`Mxnet` or :class:`Hvdlab`, which makes the arrays that go with it. All workers run it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np


class Mxnet:
    """MXNet's stores, arrays and optimizers."""

    def module(self) -> Any:
        import mxnet as mx

        return mx.kvstore

    def create(self, name: Any) -> Any:
        return self.module().create(name)

    def array(self, value: Any) -> Any:
        import mxnet as mx

        value = np.asarray(value)
        return mx.nd.array(value, dtype=value.dtype)

    def empty(self, shape: tuple[int, ...], dtype: str = "float32") -> Any:
        import mxnet as mx

        return mx.nd.zeros(shape, dtype=dtype)

    def rows(self, data: Any, indices: Any, shape: tuple[int, ...]) -> Any:
        import mxnet as mx

        return mx.nd.sparse.row_sparse_array((data, indices), shape=shape, dtype=data.dtype)

    def no_rows(self, shape: tuple[int, ...], dtype: str = "float32") -> Any:
        import mxnet as mx

        return mx.nd.sparse.zeros("row_sparse", shape, dtype=dtype)

    def numpy(self, array: Any) -> Any:
        return array.asnumpy()

    def parts(self, array: Any) -> tuple[Any, Any]:
        return array.indices.asnumpy().astype(np.int64), array.data.asnumpy()

    def optimizer(self, name: str, **arguments: Any) -> Any:
        import mxnet as mx

        return mx.optimizer.create(name, **arguments)

    def scheduler(self, name: str, **arguments: Any) -> Any:
        import mxnet as mx

        return getattr(mx.lr_scheduler, name)(**arguments)


class Hvdlab:
    """hvdlab's stores and optimizers, and numpy's arrays."""

    def module(self) -> Any:
        from hvdlab import kvstore

        return kvstore

    def create(self, name: Any) -> Any:
        return self.module().create(name)

    def array(self, value: Any) -> Any:
        return np.array(value)

    def empty(self, shape: tuple[int, ...], dtype: str = "float32") -> Any:
        return np.zeros(shape, dtype)

    def rows(self, data: Any, indices: Any, shape: tuple[int, ...]) -> Any:
        from hvdlab import kvstore

        return kvstore.RowSparse(data, indices, shape)

    def no_rows(self, shape: tuple[int, ...], dtype: str = "float32") -> Any:
        return self.rows(np.zeros((0, *shape[1:]), dtype), [], shape)

    def numpy(self, array: Any) -> Any:
        return array

    def parts(self, array: Any) -> tuple[Any, Any]:
        return array.indices, array.data

    def optimizer(self, name: str, **arguments: Any) -> Any:
        from hvdlab import kvstore

        return kvstore.optimizer.create(name, **arguments)

    def scheduler(self, name: str, **arguments: Any) -> Any:
        from hvdlab import kvstore

        return getattr(kvstore.lr_scheduler, name)(**arguments)


class Results:
    """Results of a script, in order: arrays as type, shape and bytes."""

    def __init__(self, kv: Any, side: Any) -> None:
        self.kv, self.side = kv, side
        self.seen: list[tuple[Any, ...]] = []

    def pull(self, key: Any, shape: tuple[int, ...], dtype: str = "float32", what: str = "") -> None:
        self.pull_from(self.kv, key, shape, what, dtype)

    def pull_from(self, kv: Any, key: Any, shape: tuple[int, ...], what: str, dtype: str = "float32") -> None:
        out = self.side.empty(shape, dtype)
        kv.pull(key, out=out)
        self.array(f"{what} {key}", out)

    def array(self, what: str, array: Any) -> None:
        found = self.side.numpy(array)
        self.seen.append((what, str(found.dtype), found.shape, found.tobytes()))

    def rows(self, what: str, array: Any) -> None:
        for part in self.side.parts(array):
            self.seen.append((what, str(part.dtype), part.shape, part.tobytes()))

    def value(self, what: str, value: Any) -> None:
        self.seen.append((what, value))

    def refusal(self, what: str, call: Callable[[], Any]) -> None:
        """The kind of error that a call raises: MXNetError and KVStoreError are both RuntimeErrors."""
        try:
            result = call()
        except RuntimeError:
            self.value(what, "RuntimeError")
        except Exception as error:  # noqa: BLE001  (its type is the result)
            self.value(what, "RuntimeError" if type(error) is Exception else type(error).__name__)
        else:
            self.value(what, repr(result))


def generator(kv: Any, seed: int) -> tuple[np.random.Generator, np.random.Generator]:
    """Random numbers that all workers have in common, and this worker's own."""
    return np.random.default_rng(seed), np.random.default_rng((seed, kv.rank + 1))


def random(rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "float32") -> Any:
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(dtype)


def integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    return rng.integers(-1000, 1000, shape).astype(dtype)


SHAPES = [(1,), (7,), (3, 5), (2, 3, 4), (70_001,)]


def sums(kv: Any, side: Any) -> Any:
    """Lists of one to seven arrays on each worker, without an updater: the sum replaces the value.

    float64 has numbers that float32 can add exactly: MXNet's servers keep values of other types as float32, with any
    ``multi_precision``.
    """
    results = Results(kv, side)
    results.value("type", (kv.type, kv.rank, kv.num_workers))
    common, own = generator(kv, 1)
    key = 1000
    for dtype in ("float32", "float64", "float16"):
        for shape in SHAPES:
            for count in range(1, 8):
                key += 1
                numbers = integers if dtype == "float64" else random
                kv.init(key, side.array(numbers(common, shape, dtype) + kv.rank))  # rank 0's counts
                results.pull(key, shape, dtype, "first")
                kv._barrier()
                kv.push(key, [side.array(numbers(own, shape, dtype)) for _ in range(count)])
                results.pull(key, shape, dtype, "sum")
    return results.seen


def ways_to_push(kv: Any, side: Any) -> Any:
    """Lists of keys, a key twice, pushpull with and without out, priorities.

    Workers wait for each other after each round: MXNet's servers count pushes, not workers, and two pushes of one worker
    make a round.
    """
    results = Results(kv, side)
    common, own = generator(kv, 2)
    shape = (4, 3)
    keys = [5, 2, 9]

    def pulled(what: str) -> None:
        for priority, key in enumerate(keys):
            outs = [side.empty(shape), side.empty(shape)]
            kv.pull(key, out=outs, priority=priority)
            for out in outs:
                results.array(f"{what} {key}", out)
        kv._barrier()

    def arrays(count: int) -> list[Any]:
        return [side.array(random(own, shape)) for _ in range(count)]

    kv.init(keys, [side.array(random(common, shape)) for _ in keys])
    kv.push(keys, [arrays(3) for _ in keys])  # MXNet crashes where a key is pushed a longer list than before
    pulled("longest")
    for step in range(3):
        kv.push(keys, arrays(3), priority=-step)
        pulled("one each")
        kv.push(keys, [arrays(2) for _ in keys])
        pulled("two each")
        kv.push([5, 9, 5], arrays(3))
        pulled("one of them twice")
        out = side.empty(shape)
        kv.pushpull(5, arrays(2), out=out)
        results.array("out", out)
        values = arrays(3)
        kv.pushpull(2, values)
        for value in values:
            results.array("in place", value)
        outs = [side.empty(shape) for _ in keys]
        kv.pushpull(keys, arrays(3), out=outs)
        for out in outs:
            results.array("outs", out)
        kv._barrier()
    value, outs = side.array(random(own, shape)), [side.empty(shape), side.empty(shape)]
    kv.broadcast(77, value, out=outs)
    for one in (value, *outs):
        results.array("broadcast", one)
    kv.broadcast([78, 79], arrays(2), out=outs)
    for one in outs:
        results.array("broadcast", one)
    return results.seen


def large_values(kv: Any, side: Any) -> Any:
    """Values in parts on several servers, and others; flat and not."""
    results = Results(kv, side)
    common, own = generator(kv, 3)
    for key, shape in enumerate([(99,), (100,), (101,), (1001,), (10, 11), (7, 13, 3)], start=3000):
        kv.init(key, side.array(random(common, shape)))
        for _ in range(2):
            kv.push(key, side.array(random(own, shape)))
            results.pull(key, shape)
    return results.seen


def _row_sparse(kv: Any, side: Any, key: int) -> Any:
    results = Results(kv, side)
    common, own = generator(kv, key)
    shape = (30, 4)
    kv.init(key, side.rows(random(common, shape), np.arange(30), shape))
    for count in (3, 1, 2, 3, 1):  # the longest list comes first, otherwise MXNet crashes
        pushed = []
        for _ in range(count):
            rows = np.sort(own.choice(30, int(own.integers(1, 12)), replace=False))
            pushed.append(side.rows(random(own, (len(rows), 4)), rows, shape))
        kv.push(key, pushed)
        for ids in (own.integers(0, 30, (2, 5)), np.arange(30), np.array([3])):
            out = side.no_rows(shape)
            kv.row_sparse_pull(key, out=out, row_ids=side.array(ids.astype(np.int64)))
            results.rows("rows", out)
    return results.seen


def refused(kv: Any, side: Any) -> Any:
    """Record the calls that each worker's store refuses by itself, with the same kind of error."""
    results = Results(kv, side)
    one = np.ones(1, np.float32)
    kv.init(6000, side.array(one))
    calls: list[Callable[[], Any]] = [
        lambda: kv.init(1.5, side.array(one)),
        lambda: kv.init(None, side.array(one)),
        lambda: kv.init(np.int64(9), side.array(one)),
        lambda: kv.init(6009, 1.0),
        lambda: kv.init(6009, [1.0]),
        lambda: kv.init([6009, "b"], [side.array(one), side.array(one)]),
        lambda: kv.init([6009, 6010], [side.array(one)]),
        lambda: kv.push("zz", side.array(one)),
        lambda: kv.pull(6000),
        lambda: kv.pull(6000, out=side.array(one), ignore_sparse=False),
        lambda: kv.broadcast(6011, side.array(one), out=None),
        lambda: kv.is_capable("unknown"),
        lambda: kv.is_capable("Optimizer"),
        lambda: kv.row_sparse_pull(6000, out=side.array(one), row_ids=side.array(one)),
        lambda: kv.row_sparse_pull(6000, out=None, row_ids=side.array(one)),
        lambda: kv.set_gradient_compression([("type", "2bit")]),
        lambda: kv.set_gradient_compression({"threshold": 1}),
        lambda: kv.set_gradient_compression({"type": "3bit"}),
        lambda: kv.set_gradient_compression({"type": "2bit", "threshold": 0}),
    ]
    for number, call in enumerate(calls):
        results.refusal(f"call {number}", call)
    kv._barrier()
    kv.push(6000, side.array(one * 3))
    results.pull(6000, (1,))
    return results.seen


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("test", {"rescale_grad": 0.5}),
    ("sgd", {}),
    ("sgd", {"learning_rate": 0.1, "wd": 0.01, "rescale_grad": 1 / 3, "clip_gradient": 0.7}),
    ("sgd", {"learning_rate": 0.3, "momentum": 0.9, "wd": 1e-4, "rescale_grad": 1 / 7}),
    ("sgd", {"learning_rate": 0.3, "momentum": 0.9, "wd": 1e-4, "clip_gradient": 0.5, "lazy_update": False}),
    ("adam", {"learning_rate": 0.05, "wd": 0.01, "rescale_grad": 1 / 3, "clip_gradient": 0.5, "beta1": 0.8}),
    ("nag", {"learning_rate": 0.1, "wd": 0.01, "rescale_grad": 1 / 3}),
    ("nag", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}),
    ("adagrad", {"learning_rate": 0.1, "rescale_grad": 1 / 3}),
    ("rmsprop", {"learning_rate": 0.05, "wd": 0.01, "clip_gradient": 0.5, "centered": True}),
]


def optimizers(kv: Any, side: Any) -> Any:
    """Every optimizer, dense and row-sparse."""
    results = Results(kv, side)
    for number, (name, arguments) in enumerate(OPTIMIZERS):
        optimizer = side.optimizer(name, **arguments)
        first = 10_000 + 100 * number
        optimizer.set_lr_mult({first: 0.5})
        optimizer.set_wd_mult({first + 1: 3.0})
        kv.set_optimizer(optimizer)
        kv._barrier()
        common, own = generator(kv, first)
        for key, shape in enumerate(SHAPES, start=first):
            kv.init(key, side.array((random(common, shape) / 100).astype("f4")))
        for _ in range(4):
            for key, shape in enumerate(SHAPES, start=first):
                kv.push(key, [side.array(random(own, shape) / 50) for _ in range(1 + key % 3)])
                results.pull(key, shape, what=name)
            out = side.empty(SHAPES[0])
            kv.pushpull(first, side.array(random(own, SHAPES[0])), out=out)
            results.array(f"{name} pushpull", out)
        if name == "nag" and "momentum" in arguments:
            continue  # hvdlab's takes dense gradients only
        if (
            name != "test"
        ):  # without an optimizer MXNet's servers give memory of others' for rows that were not pushed
            results.seen += _row_sparse(kv, side, first + 50)
    return results.seen


SCHEDULERS: list[tuple[str, dict[str, Any]]] = [
    ("FactorScheduler", {"step": 2, "factor": 0.3, "base_lr": 0.3}),
    (
        "FactorScheduler",
        {"step": 1, "factor": 0.3, "stop_factor_lr": 0.004, "warmup_steps": 3, "base_lr": 0.2},
    ),
    ("MultiFactorScheduler", {"step": [1, 3, 4], "factor": 0.7, "base_lr": 0.1, "warmup_steps": 2}),
    ("PolyScheduler", {"max_update": 5, "base_lr": 0.3, "pwr": 3, "final_lr": 0.07}),
    ("CosineScheduler", {"max_update": 4, "base_lr": 0.3, "final_lr": 0.07}),
    (
        "CosineScheduler",
        {
            "max_update": 6,
            "base_lr": 0.3,
            "warmup_steps": 2,
            "warmup_begin_lr": 0.1,
            "warmup_mode": "constant",
        },
    ),
]


def schedules(kv: Any, side: Any) -> Any:
    """Schedulers on a store, whose servers, where it has some, compute the rates."""
    results = Results(kv, side)
    for number, (kind, settings) in enumerate(SCHEDULERS):
        for place, (name, arguments) in enumerate(
            [("sgd", {"momentum": 0.9}), ("sgd", {"learning_rate": 0.25}), ("adam", {})]
        ):
            scheduler = side.scheduler(kind, **settings)
            kv.set_optimizer(side.optimizer(name, lr_scheduler=scheduler, **arguments))
            kv._barrier()
            key = 70_000 + 100 * number + place
            common, own = generator(kv, key)
            kv.init(key, side.array((random(common, (5, 3)) / 100).astype("f4")))
            for _ in range(8):
                kv.push(key, side.array(random(own, (5, 3)) / 50))
                results.pull(key, (5, 3), what=f"{kind} {number} {name}")
    return results.seen


def half_precision(kv: Any, side: Any) -> Any:
    """float16 weights with float32 masters on the servers."""
    return _half_precision(kv, side, True)


def half_precision_by_default(kv: Any, side: Any) -> Any:
    """The same without ``multi_precision``: MXNet's servers keep float32 masters of float16 weights all the same."""
    return _half_precision(kv, side, False)


def _half_precision(kv: Any, side: Any, multi_precision: bool) -> Any:
    results = Results(kv, side)
    common, own = generator(kv, 7)
    for number, (name, arguments) in enumerate(OPTIMIZERS[1:]):
        kv.set_optimizer(side.optimizer(name, multi_precision=multi_precision, **arguments))
        kv._barrier()
        for place, shape in enumerate(SHAPES):
            key = 20_000 + 100 * number + place + 5000 * (not multi_precision)
            kv.init(key, side.array((random(common, shape) / 100).astype("float16")))
            for _ in range(4):
                gradients = [(random(own, shape) / 50).astype("float16") for _ in range(1 + place % 3)]
                kv.push(key, [side.array(gradient) for gradient in gradients])
                results.pull(key, shape, "float16", name)
    return results.seen


def compressed(kv: Any, side: Any) -> Any:
    """2-bit compression, with the residuals of several rounds."""
    results = Results(kv, side)
    common, own = generator(kv, 8)
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.3})
    for key, shape in enumerate([*SHAPES, (16,), (17,), (100,), (101,), (1001,)], start=7000):
        kv.init(key, side.array(random(common, shape)))
        results.pull(key, shape, what="first")
    for _ in range(5):
        for key, shape in enumerate([*SHAPES, (16,), (17,), (100,), (101,), (1001,)], start=7000):
            pushed = [(own.standard_normal(shape) * 0.3).astype("f4") for _ in range(1 + key % 3)]
            kv.push(key, [side.array(one) for one in pushed])
            results.pull(key, shape)
    kv.set_optimizer(side.optimizer("sgd", learning_rate=0.1, momentum=0.9))
    kv._barrier()
    for _ in range(3):
        kv.push(7003, side.array((own.standard_normal((2, 3, 4)) * 0.3).astype("f4")))
        results.pull(7003, (2, 3, 4))
    return results.seen


def names(kv: Any, side: Any) -> Any:
    """str keys, and an optimizer with factors by key."""
    results = Results(kv, side)
    common, own = generator(kv, 9)
    keys, shape = ["z_weight", "a_bias", "m_gamma"], (3, 2)
    kv.init(keys, [side.array(random(common, shape)) for _ in keys])
    for key in keys:
        kv.push(key, side.array(random(own, shape)))
        results.pull(key, shape)
    results.refusal("int key", lambda: kv.init(3, side.array(np.ones(1, "f4"))))
    results.refusal("unknown push", lambda: kv.push("zz", side.array(np.ones(1, "f4"))))
    results.refusal("unknown pull", lambda: kv.pull("zz", out=side.empty((1,))))
    results.refusal("unknown pushpull", lambda: kv.pushpull("zz", side.empty((1,))))
    optimizer = side.optimizer("sgd", learning_rate=0.1, momentum=0.9, wd=0.1)
    kv.set_optimizer(optimizer)
    kv._barrier()
    for _ in range(3):
        for key in keys:
            kv.push(key, side.array(random(own, shape)))
            results.pull(key, shape)
    return results.seen


def turns(kv: Any, side: Any) -> Any:
    """An asynchronous store, whose workers push one after the other."""
    results = Results(kv, side)
    for number, (name, arguments) in enumerate(OPTIMIZERS):
        kv.set_optimizer(side.optimizer(name, **arguments))
        kv._barrier()
        common, own = generator(kv, 11 + number)
        for place, shape in enumerate(SHAPES):
            key = 30_000 + 100 * number + place
            kv.init(key, side.array((random(common, shape) / 100).astype("f4")))
            kv._barrier()
            for turn in (0, 1, 1, 0):
                if kv.rank == turn:
                    kv.push(key, [side.array(random(own, shape) / 50) for _ in range(1 + place % 3)])
                    results.pull(key, shape, what=name)
                    out = side.empty(shape)
                    kv.pushpull(key, side.array(random(own, shape) / 50), out=out)
                    results.array("pushpull", out)
                kv._barrier()
            results.pull(key, shape, what=name)
            kv._barrier()
    return results.seen


def counting(kv: Any, side: Any) -> Any:
    """All at once, with sums that are exact in any order."""
    results = Results(kv, side)
    kv.set_optimizer(side.optimizer("test"))
    kv._barrier()
    kv.init(40_000, side.empty((3,)))
    for _ in range(3 if kv.rank == 0 else 11):
        kv.push(40_000, side.array(np.full(3, 1 if kv.rank == 0 else 2, np.float32)))
        out = side.empty((3,))
        kv.pull(40_000, out=out)
        side.numpy(out)  # MXNet has pulled by then
    kv._barrier()
    results.pull(40_000, (3,))
    return results.seen


# -- stores of one process --------------------------------------------------------------------------------------------


def kinds_of_stores(kv: Any, side: Any) -> Any:
    """Record the attributes of stores, by each of their names."""
    results = Results(kv, side)
    for name in (
        *("local", "LOCAL", "local_update_cpu", "local_allreduce_cpu", "device", "local_allreduce_device"),
        *("teststore", "TestStore"),
    ):
        store = side.create(name)
        results.value(name, (store.type, store.rank, store.num_workers))
        for word in ("optimizer", "OPTIMIZER", "Optimizer", "speed"):
            results.refusal(f"{name} {word}", functools.partial(store.is_capable, word))
    results.refusal("number", lambda: side.create(3))
    results.refusal("none", lambda: side.create(None))
    results.value("constant", side.module().KVStoreBase.OPTIMIZER)
    results.value("registered", "teststore" in side.module().KVStoreBase.kv_registry)
    base = side.module().KVStoreBase()
    one = side.array(np.ones(1, "f4"))
    calls: list[Callable[[], Any]] = [
        lambda: base.broadcast(1, one, one),
        lambda: base.pushpull(1, one),
        lambda: base.set_optimizer(None),
        lambda: base.is_capable("optimizer"),
        lambda: base.save_optimizer_states("x"),
        lambda: base.load_optimizer_states("x"),
        lambda: base.type,
        lambda: base.rank,
        lambda: base.num_workers,
        lambda: side.module().KVStoreBase.register(3),
    ]
    for number, call in enumerate(calls):
        results.refusal(f"base {number}", call)
    return results.seen


def the_test_store(kv: Any, side: Any) -> Any:
    """The pattern for plug-ins, in one process."""
    results = Results(kv, side)
    store, rng = side.create("teststore"), np.random.default_rng(30)
    shape = (3, 2)
    for _ in range(2):
        value, out = side.array(random(rng, shape)), side.empty(shape)
        outs = [side.empty(shape) for _ in range(3)]
        store.broadcast("a", value, out=out)
        store.broadcast(1, value, out=outs)
        values = [side.array(random(rng, shape)) for _ in range(4)]
        store.pushpull("a", values, out=outs)
        for array in (out, *outs, value, *values):
            results.array("with out", array)
        store.pushpull("a", values)
        store.pushpull("b", value)
        store.pushpull("b", value, out=out)
        for array in (out, value, *values):
            results.array("without", array)
    for number, call in enumerate(
        [
            lambda: store.set_optimizer(side.optimizer("sgd")),
            lambda: store.save_optimizer_states("x"),
            lambda: store.load_optimizer_states("x"),
        ]
    ):
        results.refusal(f"call {number}", call)
    return results.seen


def settings_of_optimizers(kv: Any, side: Any) -> Any:
    """Schedulers, counts, names of integer keys, and factors by key and by name; changed on the way."""
    results = Results(kv, side)
    rng = np.random.default_rng(31)
    idx2name = {0: "a_weight", 1: "a_bias", 2: "b_gamma", 3: "b_beta"}

    class Halved:
        base_lr = 0.01

        def __call__(self, num_update: int) -> float:
            return 50 * self.base_lr / (1 + num_update)

    settings: list[dict[str, Any]] = [
        {"wd": 0.1, "param_idx2name": idx2name},
        {"wd": 0.1},
        {"lr_scheduler": Halved()},
        {"begin_num_update": 5},
        {"begin_num_update": 5, "lr_scheduler": Halved()},
        {"clip_gradient": 0.0},
        {"rescale_grad": 0.1, "clip_gradient": 0.01},
        {"learning_rate": 1e-3, "epsilon": 1e-3, "beta2": 0.5},
        {"lazy_update": False},
    ]
    for name in ("sgd", "adam"):
        for number, arguments in enumerate(settings):
            if name == "sgd":
                arguments = {k: v for k, v in arguments.items() if k not in ("epsilon", "beta2")} | {
                    "momentum": 0.9
                }
            store, optimizer = side.create("local"), side.optimizer(name, **arguments)
            store.set_optimizer(optimizer)
            keys: list[Any] = [0, 1, 2, 3] if number % 2 == 0 else ["a_weight", "a_bias", "b_gamma", "b_beta"]
            store.init(keys, [side.array(random(rng, (5,))) for _ in keys])
            for step in range(6):
                if step == 2:
                    optimizer.set_lr_mult({keys[0]: 0.1, "a_bias": 3.0})
                    optimizer.set_wd_mult({keys[2]: 0.1, "b_beta": 3.0})
                if step == 3 and "lr_scheduler" not in arguments:
                    optimizer.set_learning_rate(0.25)
                if step == 4:
                    optimizer.rescale_grad = 0.125
                for key in keys[step % 3 :]:
                    store.push(key, side.array(random(rng, (5,))))
                    results.pull_from(store, key, (5,), f"{name} {number} {step}")
            results.value("rate", float(optimizer.learning_rate))
            results.value("updates", optimizer.num_update)
    for number, (kind, given) in enumerate(SCHEDULERS):
        scheduler = side.scheduler(kind, **given)
        for update in range(1, 12):
            results.value(f"{kind} {number} {update}", float(scheduler(update)))
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("FactorScheduler", {"step": 0}),
        ("FactorScheduler", {"step": 1, "factor": 2.0}),
        ("MultiFactorScheduler", {"step": []}),
        ("MultiFactorScheduler", {"step": [2, 1]}),
        ("PolyScheduler", {"max_update": 0}),
        ("CosineScheduler", {"max_update": 1.5}),
        ("CosineScheduler", {"max_update": 5, "warmup_mode": "odd"}),
        ("CosineScheduler", {"max_update": 5, "warmup_steps": -1}),
        ("CosineScheduler", {"max_update": 5, "warmup_begin_lr": 1.0}),
    ]
    for kind, given in wrong:
        results.refusal(f"{kind} {given}", functools.partial(side.scheduler, kind, **given))
    results.refusal(
        "rate beside a scheduler",
        lambda: side.optimizer("sgd", lr_scheduler=Halved()).set_learning_rate(0.1),
    )
    results.refusal("unknown optimizer", lambda: side.optimizer("magic"))
    results.refusal("unknown argument", lambda: side.optimizer("sgd", magic=3))
    return results.seen


def states_in_files(kv: Any, side: Any) -> Any:
    """Training goes on from saved states, with and without the optimizer in the file."""
    import tempfile

    results = Results(kv, side)
    for name in ("sgd", "adam"):
        for dump in (False, True):
            rng = np.random.default_rng(32)
            arguments = {"momentum": 0.9} if name == "sgd" else {}
            first, second = side.create("local"), side.create("device")
            results.refusal("no optimizer", functools.partial(first.save_optimizer_states, "/nowhere/x"))
            first.set_optimizer(side.optimizer(name, learning_rate=0.1, **arguments))
            second.set_optimizer(side.optimizer(name, learning_rate=0.7, **arguments))
            first.init(["a", "b"], [side.array(random(rng, (4,))) for _ in range(2)])
            for key in ("a", "b", "a"):
                first.push(key, side.array(random(rng, (4,))))
            with tempfile.NamedTemporaryFile() as file:
                first.save_optimizer_states(file.name, dump_optimizer=dump)
                for key in ("a", "b"):
                    out = side.empty((4,))
                    first.pull(key, out=out)
                    second.init(key, out)
                second.load_optimizer_states(file.name)
            for _ in range(2):
                for key in ("b", "a"):
                    second.push(key, side.array(random(rng, (4,))))
                    results.pull_from(second, key, (4,), f"{name} {dump}")
            results.refusal("no file", functools.partial(second.load_optimizer_states, "/nowhere/x"))
    return results.seen


def values_and_outputs(kv: Any, side: Any) -> Any:
    """Shapes, types, lists, and sparse outputs, where both accept them."""
    results = Results(kv, side)
    for name in ("local", "device"):
        _values_and_outputs(side.create(name), side, results)
    return results.seen


def _values_and_outputs(store: Any, side: Any, results: Results) -> None:
    rng = np.random.default_rng(33)
    store.init([1, 2], [side.array(random(rng, (2, 3))), side.array(random(rng, (2, 3), "float64"))])
    store.push(1, side.array(random(rng, (2, 3))))
    store.push([2, 1, 2], [side.array(random(rng, (2, 3), t)) for t in ("float64", "float32", "float64")])
    for key, dtype in ((1, "float64"), (1, "float16"), (2, "float32"), (2, "float16"), (1, "int32")):
        results.pull_from(store, key, (2, 3), "cast", dtype)
    for shape in ((3, 2), (6,), (2, 3, 1), (2, 2)):
        results.refusal(f"out {shape}", functools.partial(store.pull, 1, out=side.empty(shape)))
    results.refusal("bool key", lambda: store.pull(True, out=side.empty((2, 3))))
    results.refusal("other kind", lambda: store.pull("a", out=side.empty((2, 3))))
    results.refusal("barrier", store._barrier)
    results.refusal("command", lambda: store._send_command_to_servers(1, "x"))
    rows = np.array([4, 0, 2])
    store.init(7, side.rows(random(rng, (3, 2)), np.sort(rows), (6, 2)))
    out = side.no_rows((6, 2))
    store.pull(7, out=out)
    results.rows("ignored", out)
    store.pull(7, out=out, ignore_sparse=False)
    results.rows("filled", out)
    store.push(7, [side.rows(random(rng, (2, 2)), np.array([1, n]), (6, 2)) for n in (3, 4, 5)])
    store.pull(7, out=out, ignore_sparse=False)
    results.rows("replaced", out)
    two = [side.no_rows((6, 2)), side.no_rows((6, 2))]
    store.row_sparse_pull(7, out=two, row_ids=side.array(np.array([3, 3, 1], np.int64)))
    for one in two:
        results.rows("same for all", one)
    ids = [side.array(np.array(numbers, np.int64)) for numbers in ([5, 0], [[1, 4], [4, 1]])]
    store.row_sparse_pull(7, out=two, row_ids=ids)
    for one in two:
        results.rows("each its own", one)
    results.refusal("too few", lambda: store.row_sparse_pull(7, out=[*two, out], row_ids=ids))
    store.init(8, side.rows(random(rng, (6, 2)), np.arange(6), (6, 2)))
    outs = [[side.no_rows((6, 2)), side.no_rows((6, 2))], [side.no_rows((6, 2))]]
    nested = [ids, [side.array(np.array([2, 5], np.int64))]]
    store.row_sparse_pull([8, 7], out=outs, row_ids=nested)
    for one in (*outs[0], *outs[1]):
        results.rows("several keys", one)
    results.refusal("other lists", lambda: store.row_sparse_pull([7, 8], out=outs, row_ids=nested[:1]))
    results.refusal(
        "dense value", lambda: store.row_sparse_pull(1, out=side.no_rows((2, 3)), row_ids=ids[:1])
    )
    results.refusal("dense out", lambda: store.row_sparse_pull(7, out=side.empty((6, 2)), row_ids=ids))


def pulls_of_every_kind(kv: Any, side: Any) -> Any:
    """Dense and row-sparse values, pulled into dense and row-sparse arrays and lists of both, with and without an optimizer."""
    results = Results(kv, side)
    for name in ("local", "device"):
        for optimizer in (None, "sgd"):
            for sparse in (False, True):
                store = side.create(name)
                if optimizer is not None:
                    store.set_optimizer(side.optimizer(optimizer, learning_rate=0.5))
                _pulls_of_every_kind(store, side, results, sparse=sparse)
    return results.seen


def _pulls_of_every_kind(store: Any, side: Any, results: Results, *, sparse: bool) -> None:
    rng, shape = np.random.default_rng(34), (6, 2)
    kinds: dict[str, Callable[..., Any]] = {
        "dense": lambda dtype="float32": side.array(np.full(shape, 9, dtype)),
        "rows": lambda: side.rows(np.full((2, 2), 7, np.float32), np.array([1, 5]), shape),
    }

    def value() -> Any:
        data = random(rng, shape)
        return side.rows(data, np.arange(6), shape) if sparse else side.array(data)

    def seen(what: str, arrays: list[Any]) -> None:
        for array in arrays:
            whole = array.asnumpy() if hasattr(array, "asnumpy") else array
            whole = whole.todense() if hasattr(whole, "todense") else whole
            results.value(f"{what} of {store.type}", (str(whole.dtype), whole.tobytes()))

    store.init(["w", "d"], [value(), side.array(random(rng, shape))])
    for ignore_sparse in (True, False):
        for kind, made in kinds.items():
            out, outs = made(), [made(), kinds["dense"](), kinds["rows"]()]
            store.pull("w", out=out, ignore_sparse=ignore_sparse)
            store.pull("w", out=outs, ignore_sparse=ignore_sparse)
            several = [made(), [kinds["dense"](), made()]]
            store.pull(["w", "d"], out=several, ignore_sparse=ignore_sparse)
            seen(f"pull to {kind}, {ignore_sparse}", [out, *outs, several[0], *several[1]])
    store.pull("w", out=(half := kinds["dense"]("float16")))
    seen("another type", [half])
    for pushed, made in kinds.items():
        for target in (None, *kinds):
            given, out = made(), None if target is None else kinds[target]()
            store.pushpull("w", given, out=out)
            store.pull("w", out=(after := kinds["dense"]()))
            seen(f"pushpull of {pushed} to {target}", [given, after] if out is None else [given, out, after])
    for kind, made in kinds.items():
        store.broadcast(f"b {kind}", value(), out=(out := made()))
        seen(f"broadcast to {kind}", [out])


ALONE = [
    kinds_of_stores,
    the_test_store,
    settings_of_optimizers,
    states_in_files,
    values_and_outputs,
    pulls_of_every_kind,
]
