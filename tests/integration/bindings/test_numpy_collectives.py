"""The collectives of numpy arrays on real ranks: results, layouts and types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError, NotInitializedError, UnsupportedError
from support.ranks.resident import Ranks


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as started:
        yield started


def mine() -> tuple[int, int]:
    return context.engine().rank, context.engine().size


# -- on the ranks -------------------------------------------------------------------------------------------------

TYPES = ["uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]


def reduce_all(type_: str, count: int) -> None:
    rank, size = mine()
    x = (np.arange(count) % 5 + rank).astype(type_)
    each = [(np.arange(count) % 5 + r).astype(type_) for r in range(size)]
    expected = {
        hvd.Sum: np.sum(each, axis=0, dtype=type_),
        hvd.Max: np.max(each, axis=0),
        hvd.Min: np.min(each, axis=0),
        hvd.Product: np.prod(each, axis=0, dtype=type_),
    }
    for op, result in expected.items():
        got = hvd.allreduce(x, op=op)
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, result)
    average = hvd.allreduce(x, op=hvd.Average)
    np.testing.assert_allclose(
        average.astype(np.float64), np.trunc(np.mean(each, axis=0)) if x.dtype.kind in "iu" else np.mean(each, axis=0), rtol=1e-3
    )  # fmt: skip


def booleans() -> None:
    rank, size = mine()
    x = np.array([True, False, rank == 0])
    assert hvd.allreduce(x, op=hvd.Max).tolist() == [True, False, True]
    assert hvd.allreduce(x, op=hvd.Min).tolist() == [True, False, size == 1]
    with pytest.raises(UnsupportedError, match="cast"):
        hvd.allreduce(x, op=hvd.Sum)


def scales() -> None:
    rank, size = mine()
    x = np.full(3, rank + 1.0)
    total = size * (size + 1) / 2
    np.testing.assert_allclose(
        hvd.allreduce(x, op=hvd.Sum, prescale_factor=2, postscale_factor=0.25), total / 2
    )
    big = np.full(3000, rank + 1.0)
    np.testing.assert_allclose(hvd.allreduce(big, op=hvd.Average, prescale_factor=3), 3 * total / size)


def layouts() -> None:
    rank, size = mine()
    zero_d = hvd.allreduce(np.float32(rank), op=hvd.Sum)
    assert zero_d.shape == ()
    assert zero_d == size * (size - 1) / 2
    assert hvd.allreduce(np.empty((0, 3), np.float32), op=hvd.Sum).shape == (0, 3)
    base = np.arange(12, dtype=np.float64).reshape(3, 4)
    np.testing.assert_array_equal(hvd.allreduce(base.T, op=hvd.Sum), base.T * size)
    np.testing.assert_array_equal(hvd.allreduce(base[:, ::2], op=hvd.Sum), base[:, ::2] * size)
    fortran = np.asfortranarray(base)
    np.testing.assert_array_equal(hvd.allgather(fortran), np.concatenate([base] * size))
    assert hvd.allreduce(memoryview(b"\x01\x02"), op=hvd.Max).tolist() == [1, 2]
    assert hvd.allreduce([1.0, 2.0], op=hvd.Average).tolist() == [1.0, 2.0]


def in_place() -> None:
    rank, size = mine()
    x = np.full(5, float(rank + 1))
    assert hvd.allreduce_(x, op=hvd.Sum) is x
    assert (x == size * (size + 1) / 2).all()
    base = np.zeros((4, 4))
    base[:, ::2] = rank + 1
    hvd.allreduce_(base[:, ::2], op=hvd.Max)
    assert base.tolist() == [[size, 0, size, 0]] * 4
    root = size - 1
    y = np.full((2, 2), rank)
    hvd.broadcast_(y.T, root)
    assert (y == root).all()
    frozen = np.ones(3)
    frozen.setflags(write=False)
    with pytest.raises(InvalidRequestError, match="read-only"):
        hvd.allreduce_(frozen)
    with pytest.raises(InvalidRequestError, match="list has no memory"):
        hvd.allreduce_([1.0, 2.0])
    buffer = bytearray(b"\x01\x02")
    assert hvd.allreduce_(buffer, op=hvd.Max) is buffer
    assert (hvd.allreduce(frozen, op=hvd.Sum) == size).all()


def gathers() -> None:
    rank, size = mine()
    x = np.full((rank + 1, 2), rank, np.int32)
    expected = np.concatenate([np.full((r + 1, 2), r, np.int32) for r in range(size)])
    np.testing.assert_array_equal(hvd.allgather(x), expected)
    assert hvd.allgather(np.int64(rank)).tolist() == list(range(size))
    none_from_0 = np.full((0 if rank == 0 else 2,), rank)
    assert hvd.allgather(none_from_0).tolist() == [r for r in range(1, size) for _ in range(2)]
    a, b = hvd.grouped_allgather([x, x.astype(np.float64)], name="g")
    np.testing.assert_array_equal(a, expected)
    np.testing.assert_array_equal(b, expected)


def broadcasts() -> None:
    rank, size = mine()
    for root in range(size):
        x = np.full((3, 2), rank, np.float16)
        assert (hvd.broadcast(x, root) == root).all()
        assert (x == rank).all()


def scatters() -> None:
    rank, size = mine()
    rows = 2 * size + 1
    x = np.arange(rows * 3, dtype=np.float64).reshape(rows, 3) * (rank + 1)
    whole = np.arange(rows * 3, dtype=np.float64).reshape(rows, 3) * size * (size + 1) / 2
    starts = np.cumsum([0] + [3 if r == 0 else 2 for r in range(size)])
    mine_ = hvd.reducescatter(x, op=hvd.Sum)
    np.testing.assert_allclose(mine_, whole[starts[rank] : starts[rank + 1]])
    (averaged,) = hvd.grouped_reducescatter([x], op=hvd.Average)
    np.testing.assert_allclose(averaged, mine_ / size)


def exchanges() -> None:
    rank, size = mine()
    x = np.array([[10 * rank + r] for r in range(size)])
    received, splits = hvd.alltoall(x)
    assert received.ravel().tolist() == [10 * r + rank for r in range(size)]
    assert splits == (1,) * size
    uneven = [r + 1 for r in range(size)]
    data = np.full(sum(uneven), rank)
    received, splits = hvd.alltoall(data, uneven)
    assert splits == (rank + 1,) * size
    assert received.tolist() == [r for r in range(size) for _ in range(rank + 1)]
    with pytest.raises(InvalidRequestError, match="one split per member"):
        hvd.alltoall(data, [1] * (size + 1))
    if size > 1:
        with pytest.raises(InvalidRequestError, match="divide"):
            hvd.alltoall(np.zeros(size + 1))


def asynchronous() -> None:
    rank, size = mine()
    operations: list[Any] = [
        hvd.allreduce_async(np.full(2, rank + i), f"a{i}", op=hvd.Sum) for i in range(20)
    ]
    operations.append(hvd.broadcast_async(np.full(2, rank), 0))
    operations.append(hvd.allgather_async(np.full(1, rank)))
    hvd.barrier()
    results = [hvd.synchronize(operation) for operation in reversed(operations)]
    assert all(hvd.poll(operation) for operation in operations)
    assert results[0].tolist() == list(range(size))
    assert results[1].tolist() == [0, 0]
    for i, result in enumerate(reversed(results[2:])):
        assert (result == size * i + size * (size - 1) / 2).all()


def process_sets() -> None:
    rank, size = mine()
    engine = context.engine()
    new = engine.add_process_set([size - 1])
    assert engine.process_sets()[0] == tuple(range(size))
    if rank == size - 1:
        assert engine.ranks(new) == (size - 1,)
        assert hvd.allreduce(np.ones(2), op=hvd.Sum, process_set=new).tolist() == [1, 1]
    else:
        with pytest.raises(InvalidRequestError):
            hvd.allreduce(np.ones(2), process_set=new)
    hvd.barrier()
    engine.remove_process_set(new)
    assert new not in engine.process_sets()
    with pytest.raises(InvalidRequestError):
        hvd.allreduce(np.ones(2), process_set=new)


def unsupported() -> None:
    with pytest.raises(UnsupportedError, match="complex128"):
        hvd.allreduce(np.ones(2, complex))
    with pytest.raises(UnsupportedError, match="native byte order"):
        hvd.allreduce(np.ones(2, ">f4"))
    with pytest.raises(UnsupportedError, match="Adasum"):
        hvd.reducescatter(np.ones(2), op=hvd.Adasum)
    with pytest.raises(UnsupportedError, match="floating-point"):
        hvd.allreduce(np.ones(2, int), op=hvd.Adasum)
    with pytest.raises(UnsupportedError):
        hvd.allgather(np.array(["text"]))


def places() -> tuple[int, int, int, int]:
    engine = context.engine()
    return engine.local_rank, engine.local_size, engine.cross_rank, engine.cross_size


def timeline(path: str) -> None:
    engine = context.engine()
    if engine.rank == 0:
        engine.start_timeline(path)
    hvd.barrier()
    for i in range(5):
        hvd.allreduce(np.ones(10), f"in.timeline.{i}")
    if engine.rank == 0:
        engine.stop_timeline()
    hvd.barrier()


# -- tests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_", TYPES)
def test_allreduce_of_every_type(ranks: Ranks, type_: str) -> None:
    ranks.run(reduce_all, type_, 7)
    ranks.run(reduce_all, type_, 5001)  # on the data plane; small ones travel with the negotiation


@pytest.mark.parametrize(
    "function",
    [booleans, scales, layouts, in_place, gathers, broadcasts, scatters, exchanges, asynchronous, process_sets, unsupported],
    ids=lambda function: function.__name__,
)  # fmt: skip
def test_collectives(ranks: Ranks, function: Any) -> None:
    ranks.run(function)


def test_ranks_of_one_host_know_their_places(ranks: Ranks) -> None:
    assert ranks.run(places) == [(rank, ranks.size, 0, 1) for rank in range(ranks.size)]


def test_a_timeline_has_every_rank(ranks: Ranks, tmp_path: Any) -> None:
    import json

    path = tmp_path / "timeline.json"
    ranks.run(timeline, str(path))
    events = json.loads(path.read_text())
    text = json.dumps(events)
    assert all(f"in.timeline.{i}" in text for i in range(5))
    assert len({event["pid"] for event in events}) >= ranks.size


def test_without_a_world_there_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HVDLAB_COORDINATOR", raising=False)
    with pytest.raises(NotInitializedError, match="init"):
        hvd.allreduce(np.ones(2))
    context.init()
    try:
        assert mine() == (0, 1)
        assert hvd.allreduce(np.full(3, 2.0), op=hvd.Sum).tolist() == [2.0] * 3
    finally:
        context.shutdown()
    assert not context.is_initialized()
    context.shutdown()
