"""hvdlab.mxnet on real ranks: collectives, and trainings with Gluon that are equal to one process's on all the data."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hvdlab.collectives.errors import InvalidRequestError, MismatchError
from support.ranks.resident import Ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mxnet as mx

    import hvdlab.mxnet as hvd


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as started:
        yield started


# -- on the ranks -----------------------------------------------------------------------------------------------------

TYPES = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64")


def collectives() -> None:
    n, rank = hvd.size(), hvd.rank()
    for dtype in TYPES:
        for shape in ((1,), (4, 3), (70_000,)):
            mine = mx.nd.ones(shape, dtype=dtype) * (rank + 1)
            total = n * (n + 1) // 2
            for op, value in ((hvd.Sum, total), (hvd.Max, n), (hvd.Min, 1)):
                out = hvd.allreduce(mine, op=op)
                assert (out.dtype, out.shape) == (mine.dtype, shape)
                assert (out.asnumpy() == value).all()
            assert (mine.asnumpy() == rank + 1).all()
            assert hvd.allreduce_(mine, op=hvd.Sum) is mine
            assert (mine.asnumpy() == total).all()
            given = [mx.nd.ones(shape, dtype=dtype) * i for i in (1, 2)]
            assert [int(o.asnumpy().flat[0]) for o in hvd.grouped_allreduce(given, op=hvd.Sum)] == [n, 2 * n]
            assert hvd.grouped_allreduce_(given, op=hvd.Sum) is given
            assert [int(g.asnumpy().flat[-1]) for g in given] == [n, 2 * n]
            sent = mx.nd.ones(shape, dtype=dtype) * (rank + 3)
            assert (hvd.broadcast(sent, n - 1).asnumpy() == n + 2).all()
            assert (sent.asnumpy() == rank + 3).all()
            assert hvd.broadcast_(sent, 0) is sent
            assert (sent.asnumpy() == 3).all()


def shaped_by_ranks() -> None:
    n, rank = hvd.size(), hvd.rank()
    mine = mx.nd.ones((rank + 1, 2)) * rank
    expected = [[float(r)] * 2 for r in range(n) for _ in range(r + 1)]
    assert hvd.allgather(mine).asnumpy().tolist() == expected
    assert [o.asnumpy().tolist() for o in hvd.grouped_allgather([mine, mine])] == [expected] * 2
    even = mx.nd.arange(2 * n) + 100 * rank
    moved = hvd.alltoall(even)
    assert not isinstance(moved, tuple)
    assert moved.asnumpy().tolist() == [100.0 * r + 2 * rank + i for r in range(n) for i in (0, 1)]
    for splits in ([rank + 1] * n, mx.nd.array([rank + 1] * n, dtype="int32")):
        output, received = hvd.alltoall(mx.nd.ones((n * (rank + 1),)) * rank, splits=splits)
        assert output.asnumpy().tolist() == [float(r) for r in range(n) for _ in range(r + 1)]
        assert (received.dtype, received.asnumpy().tolist()) == (np.int32, list(range(1, n + 1)))
    rows = mx.nd.arange(2 * n) + rank
    assert hvd.reducescatter(rows, op=hvd.Sum).asnumpy().tolist() == [
        n * (2.0 * rank + i) + n * (n - 1) / 2 for i in (0, 1)
    ]
    assert len(hvd.grouped_reducescatter([rows, rows])) == 2


def operations_in_flight() -> None:
    """MXNet computes later, on other threads; a collective waits for its array's operands."""
    for _ in range(5):
        x = mx.nd.ones((300, 300))
        for _ in range(10):
            x = mx.nd.dot(x, mx.nd.ones((300, 300))) / 300
        y = hvd.allreduce_(x, op=hvd.Sum) * 2
        assert (y.asnumpy() == 2 * hvd.size()).all()


def arguments() -> None:
    a = mx.nd.ones((2,)) * (hvd.rank() + 1)
    n = hvd.size()
    assert hvd.allreduce(a).asnumpy()[0] == (n + 1) / 2
    assert hvd.allreduce(a, None, "x", 3, 2.0, 0.5, op=hvd.Sum).asnumpy()[0] == n * (n + 1) / 2
    assert hvd.grouped_allreduce([]) == []
    empty: list[Any] = []
    assert hvd.grouped_allreduce_(empty) is empty
    with pytest.raises(AssertionError, match="Adasum"):
        hvd.allreduce(a, op=hvd.Adasum)
    with pytest.raises(ValueError, match="op="):
        hvd.allreduce(a, average=True, op=hvd.Sum)
    with pytest.warns(DeprecationWarning, match="average="):
        hvd.allreduce(a, average=False)
    with pytest.raises(InvalidRequestError, match=r"takes an mx\.nd\.NDArray, not list"):
        hvd.allreduce([1.0])
    with pytest.raises(InvalidRequestError, match="row_sparse"):
        hvd.allreduce(mx.nd.sparse.zeros("row_sparse", (2, 2)))
    assert hvd.broadcast_object({"rank": hvd.rank()}) == {"rank": 0}
    assert hvd.allgather_object(hvd.rank(), name="ranks") == list(range(n))
    if n > 1:
        with pytest.raises(MismatchError):
            hvd.allreduce(mx.nd.ones((hvd.rank() + 1,)), name="other")
        only = hvd.add_process_set([n - 1])
        if hvd.rank() == n - 1:
            assert hvd.allreduce(a, op=hvd.Sum, process_set=only).asnumpy()[0] == n
        hvd.remove_process_set(only)
    half, context = hvd.Compression.fp16.compress(a)
    assert (half.dtype, hvd.Compression.fp16.decompress(half, context).dtype) == (np.float16, np.float32)


def net(width: int = 4) -> Any:
    made = mx.gluon.nn.Sequential(prefix="net_")
    with made.name_scope():
        made.add(mx.gluon.nn.Dense(8, activation="relu"), mx.gluon.nn.Dense(width))
    return made


def batches(n: int) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    return [
        (rng.standard_normal((2 * n, 5)).astype("f4"), rng.standard_normal((2 * n, 4)).astype("f4"))
        for _ in range(4)
    ]


def weights_of(model: Any) -> list[Any]:
    return [p.data().asnumpy() for _, p in sorted(model.collect_params().items())]


def initialised() -> tuple[Any, list[Any]]:
    """A net whose weights are rank 0's everywhere, though they were not known when they were broadcast."""
    np.random.seed(hvd.rank())
    mx.random.seed(hvd.rank())
    model = net()
    model.initialize(mx.init.Xavier())
    hvd.broadcast_parameters(model.collect_params(), root_rank=0)
    model(mx.nd.ones((1, 5)))
    return model, weights_of(model)


def step(model: Any, trainer: Any, x: Any, y: Any) -> None:
    with mx.autograd.record():
        loss = mx.gluon.loss.L2Loss()(model(mx.nd.array(x)), mx.nd.array(y))
    loss.backward()
    trainer.step(len(x))


def reference(start: list[Any], n: int) -> list[Any]:
    """Return one process's weights after training on all the data."""
    model = net()
    model.initialize()
    model(mx.nd.ones((1, 5)))
    for (_, parameter), value in zip(sorted(model.collect_params().items()), start, strict=True):
        parameter.set_data(mx.nd.array(value))
    trainer = mx.gluon.Trainer(
        model.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=None
    )
    for x, y in batches(n):
        step(model, trainer, x, y)
    return weights_of(model)


def trains_like_one_process(settings: dict[str, Any], tolerance: float) -> None:
    n, rank = hvd.size(), hvd.rank()
    model, start = initialised()
    assert all(np.array_equal(a, b) for a, b in zip(start, hvd.broadcast_object(start), strict=True))
    options = dict(settings)
    if options.pop("fp16", False):
        options["compression"] = hvd.Compression.fp16
    trainer = hvd.DistributedTrainer(
        model.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, **options
    )
    for x, y in batches(n):
        step(model, trainer, x[rank::n], y[rank::n])
    for mine, theirs in zip(weights_of(model), reference(start, n), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)


def a_store_in_gluon() -> None:
    n, rank = hvd.size(), hvd.rank()
    for kind in ("horovod", "byteps"):
        model, start = initialised()
        kv = mx.kv.create(kind)
        assert isinstance(kv, mx.kvstore.KVStoreBase)
        trainer = mx.gluon.Trainer(
            model.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=kv
        )
        for x, y in batches(n):
            with mx.autograd.record():
                loss = mx.gluon.loss.L2Loss()(model(mx.nd.array(x[rank::n])), mx.nd.array(y[rank::n]))
            loss.backward()
            trainer.step(len(x))  # gradients are summed: this is the batch of all
        for mine, theirs in zip(weights_of(model), reference(start, n), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def optimizers() -> None:
    n, rank = hvd.size(), hvd.rank()
    for factor in (1.0, 4.0):
        for groups in (0, 2):
            inner = mx.optimizer.create("sgd", learning_rate=1.0)
            optimizer = hvd.DistributedOptimizer(inner, factor, num_groups=groups)
            assert isinstance(optimizer, mx.optimizer.Optimizer)
            weights = [mx.nd.ones((3,)) for _ in range(3)]
            grads = [mx.nd.ones((3,)) * (rank + 1) * (i + 1) for i in range(3)]
            updater = mx.optimizer.get_updater(optimizer)
            updater([0, 1, 2], grads, weights)
            for i, weight in enumerate(weights):
                np.testing.assert_allclose(weight.asnumpy(), 1 - (i + 1) * (n + 1) / 2, rtol=1e-6)
            optimizer.set_learning_rate(0.5)
            assert (inner.lr, optimizer.learning_rate) == (0.5, 0.5)
            optimizer.begin_num_update = 7
            assert inner.begin_num_update == 7
            assert set(inner._index_update_count) == {0, 1, 2}
    inner = mx.optimizer.create("sgd", learning_rate=1.0)
    wrapped = hvd.DistributedOptimizer(inner)
    params = [mx.gluon.Parameter(name, shape=(1,)) for name in "ba"]
    for parameter in params:
        parameter.initialize()
    with pytest.warns(UserWarning, match="averages gradients itself"):
        trainer = hvd.DistributedTrainer(params, wrapped)
    assert (trainer.optimizer, inner.rescale_grad) == (inner, 1.0)
    assert [p.name for p in trainer._params] == ["a", "b"]


def settings_that_are_refused() -> None:
    """When the optimizer or trainer is made, not in the middle of the first step."""
    distributed = hvd.DistributedOptimizer(mx.optimizer.create("sgd"))
    parameter = mx.gluon.Parameter("a", shape=(1,))
    parameter.initialize()
    on_two = mx.gluon.Parameter("b", shape=(1,))
    on_two.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    makers: list[Any] = [
        lambda **options: hvd.DistributedOptimizer(mx.optimizer.create("sgd"), **options),
        lambda **options: hvd.DistributedTrainer([parameter], "sgd", **options),
    ]
    for make in makers:
        for factor in (0, -1.0, float("inf"), float("nan")):
            with pytest.raises(InvalidRequestError, match=f"must be positive, not {factor}"):
                make(gradient_predivide_factor=factor)
        with pytest.raises(InvalidRequestError, match="no negative number of groups: -1"):
            make(num_groups=-1)
        with pytest.raises(InvalidRequestError, match=r"takes a hvd\.ProcessSet, not list"):
            make(process_set=[0])
        with pytest.raises(InvalidRequestError, match="is not registered"):
            make(process_set=hvd.ProcessSet([0]))
        assert make(num_groups=hvd.size() + 5, gradient_predivide_factor=2) is not None
    with pytest.raises(InvalidRequestError, match=r"takes an mx\.optimizer\.Optimizer, not str"):
        hvd.DistributedOptimizer("sgd")
    with pytest.raises(InvalidRequestError, match="distributed already"):
        hvd.DistributedOptimizer(distributed)
    with pytest.raises(InvalidRequestError, match="one device per rank, and the parameters are on 2"):
        hvd.DistributedTrainer([on_two], "sgd")


def trained_in_a_process_set() -> None:
    """Check that all ranks but the first train together; that one takes its steps alone."""
    n, rank = hvd.size(), hvd.rank()
    if n == 1:
        return
    together = hvd.add_process_set(list(range(1, n)))
    mean = (n + 2) / 2 if rank else 1  # of the ranks' gradients, which are their numbers from 1
    optimizer = hvd.DistributedOptimizer(
        mx.optimizer.create("sgd", learning_rate=1.0), 4.0, process_set=together
    )
    weight = mx.nd.zeros((2,))
    mx.optimizer.get_updater(optimizer)(0, mx.nd.ones((2,)) * (rank + 1), weight)
    assert weight.asnumpy().tolist() == [-mean] * 2
    parameter = mx.gluon.Parameter("a", shape=(2,))
    parameter.initialize(mx.init.Zero())
    trainer = hvd.DistributedTrainer([parameter], "sgd", {"learning_rate": 1.0}, process_set=together)
    with mx.autograd.record():
        loss = (parameter.data() * (rank + 1)).sum()
    loss.backward()
    trainer.step(1)
    assert parameter.data().asnumpy().tolist() == [-mean] * 2
    hvd.remove_process_set(together)
    with pytest.raises(InvalidRequestError, match="is not registered"):
        trainer.step(1)  # not alone, silently


def parameters() -> None:
    n = hvd.size()
    arrays = {name: mx.nd.ones((2,)) * (hvd.rank() + i) for i, name in enumerate("ba")}
    hvd.broadcast_parameters(arrays, root_rank=n - 1, prefix="p.")
    assert [arrays[name].asnumpy()[0] for name in "ba"] == [n - 1, n]
    for wrong in ([mx.nd.ones(1)], None):
        with pytest.raises(ValueError, match="dict or ParameterDict"):
            hvd.broadcast_parameters(wrong)
    with pytest.raises(AssertionError, match="prefix"):
        hvd.broadcast_parameters(arrays, prefix=3)  # type: ignore[arg-type]  # the wrong type is the test


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        collectives,
        shaped_by_ranks,
        operations_in_flight,
        arguments,
        a_store_in_gluon,
        optimizers,
        settings_that_are_refused,
        trained_in_a_process_set,
        parameters,
    ],
    ids=lambda f: f.__name__,
)
def test_on_ranks(ranks: Ranks, function: Any) -> None:
    ranks.run(function, timeout=100)


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({}, 1e-5),
        ({"num_groups": 2}, 1e-5),
        ({"gradient_predivide_factor": 3.0, "prefix": "x"}, 1e-5),
        ({"fp16": True}, 1e-2),
    ],
    ids=["plain", "groups", "predivided", "fp16"],
)
def test_gluon_trains_like_one_process(ranks: Ranks, settings: dict[str, Any], tolerance: float) -> None:
    ranks.run(trains_like_one_process, settings, tolerance, timeout=100)


SIGNATURES = {
    "allgather": "tensor, name, priority, process_set",
    "allgather_object": "obj, name",
    "allreduce": "tensor, average, name, priority, prescale_factor, postscale_factor, process_set, op",
    "allreduce_": "tensor, average, name, priority, prescale_factor, postscale_factor, process_set, op",
    "alltoall": "tensor, splits, name, priority, process_set",
    "broadcast": "tensor, root_rank, name, priority, process_set",
    "broadcast_": "tensor, root_rank, name, priority, process_set",
    "broadcast_object": "obj, root_rank, name",
    "broadcast_parameters": "params, root_rank, prefix",
    "grouped_allgather": "tensors, name, priority, process_set",
    "grouped_allreduce": "tensors, average, name, priority, prescale_factor, postscale_factor, process_set, op",
    "grouped_allreduce_": "tensors, average, name, priority, prescale_factor, postscale_factor, process_set, op",
    "grouped_reducescatter": "tensors, op, name, priority, process_set, prescale_factor, postscale_factor",
    "reducescatter": "tensor, op, name, priority, process_set, prescale_factor, postscale_factor",
    "DistributedOptimizer": "optimizer, gradient_predivide_factor, num_groups, process_set",
    "DistributedTrainer": "params, optimizer, optimizer_params, compression, gradient_predivide_factor, prefix, num_groups, process_set",
}


def test_signatures_and_docstrings() -> None:
    for name, wanted in SIGNATURES.items():
        function = getattr(hvd, name)
        parameters = list(inspect.signature(function).parameters)
        names = wanted.split(", ")
        assert parameters[: len(names)] == names, name
        assert all(f"{parameter}:" in function.__doc__ for parameter in names), name
    assert set(SIGNATURES) < set(hvd.__all__)
    assert {"check_extension", "split_list"} < set(hvd.__all__)


def test_horovods_modules_are_ours() -> None:
    from hvdlab.horovod.import_hook import target

    assert target("horovod.mxnet.mpi_ops") == "hvdlab.mxnet.mpi_ops"
