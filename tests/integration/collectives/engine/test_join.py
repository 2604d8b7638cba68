"""Uneven work: ranks that have none left join, and the others go on."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.errors import (
    AbortedError,
    CauseKind,
    CollectiveError,
    JoinedRanksError,
    MismatchError,
)
from support.patience import PATIENCE
from support.ranks.resident import RankGone, Ranks, resident_ranks

SMALL, LARGE = 8, 300_000


@pytest.fixture(params=[1, 2, 4])
def some(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param) as ranks:
        yield ranks


three = resident_ranks(3)


# -- on the ranks -------------------------------------------------------------------------------------------------


def rank_and_size() -> tuple[int, int]:
    return context.engine().rank, context.engine().size


def uneven(epochs: int) -> list[int]:
    """Run r + 1 batches on rank r in each epoch; return the rank reported as the last to join."""
    rank, size = rank_and_size()
    last = []
    for _ in range(epochs):
        for batch in range(rank + 1):
            working = size - batch  # ranks that have this many batches, and joined ones count as zero
            for count in (SMALL, LARGE):
                total = hvd.allreduce(np.ones(count, np.float32), f"sum{count}", op=hvd.Sum)
                assert (total == working).all(), (total, working)
                mean = hvd.allreduce(np.full((2, count), 2.0), f"mean{count}")
                assert np.allclose(mean, 2.0 * working / size)
            several = [
                np.full(n, rank + 1, t) for n, t in [(3, np.int32), (LARGE, np.float16), (1, np.float64)]
            ]
            sums = hvd.grouped_allreduce(several, "group", op=hvd.Sum, prescale_factor=2.0)
            expected = 2 * sum(r + 1 for r in range(batch, size))
            assert all((x == expected).all() for x in sums), (sums, expected)
            scalar = hvd.allreduce(np.float32(1), op=hvd.Sum)
            assert scalar.shape == ()
            assert scalar == working
            hvd.barrier()
        last.append(hvd.join())
    return last


def fused(count: int) -> int:
    rank, _size = rank_and_size()
    if rank == 0:
        handles = [hvd.allreduce_async(np.full(100 + i, i), f"f{i}", op=hvd.Sum) for i in range(count)]
        context.engine().flush()
        for i, handle in enumerate(handles):
            assert (hvd.synchronize(handle) == i).all()
    return hvd.join()


def leave_it_in_flight() -> tuple[int, list[float]]:
    """Leave asynchronous ones in flight when joining, and synchronize them afterwards."""
    rank, _size = rank_and_size()
    handles = [hvd.allreduce_async(np.ones(n), f"h{n}", op=hvd.Sum) for n in (4, LARGE) if rank]
    last = hvd.join()
    return last, [float(hvd.synchronize(handle)[0]) for handle in handles]


def unsupported() -> Any:
    """Rank 1 joins at once, the others try unsupported operations."""
    rank, _size = rank_and_size()
    if rank == 1:
        return hvd.join()
    told = []
    x = np.ones((3, 2))
    tries: list[Callable[[], object]] = [
        lambda: hvd.allgather(x), lambda: hvd.broadcast(x, 0), lambda: hvd.alltoall(x, [1, 1, 1]),
        lambda: hvd.reducescatter(x), lambda: hvd.allreduce(x, op=hvd.Max), lambda: hvd.grouped_allgather([x, x]),
        lambda: context.engine().add_process_set([0, 2]),
    ]  # fmt: skip
    for attempt in tries:
        with pytest.raises(JoinedRanksError, match="not supported with join: rank 1 has joined") as error:
            attempt()
        assert isinstance(error.value, CollectiveError)
        assert error.value.joined == (1,)
        told.append(str(error.value))
    assert hvd.allreduce(x, op=hvd.Sum)[0, 0] == 2.0  # the group and the join are as they were
    hvd.join()
    return told


def join() -> int:
    return hvd.join()


def reduce(name: str, count: int = 4) -> float:
    return float(hvd.allreduce(np.ones(count), name, op=hvd.Sum)[0])


def leave() -> None:
    context.shutdown()
    context.init()


def wrong_shape() -> None:
    rank, _size = rank_and_size()
    if rank != 2:
        with pytest.raises(MismatchError):
            hvd.allreduce(np.ones(3 + rank), "wrong")
    hvd.join()


def of_a_set(set_id: int) -> tuple[int, float]:
    """Rank 0 joins in the set only, and meanwhile does something in the world."""
    rank, _size = rank_and_size()
    total = -1.0
    if rank == 1:
        total = float(hvd.allreduce(np.ones(4), "in the set", op=hvd.Sum, process_set=set_id)[0])
    last = hvd.join(process_set=set_id) if rank < 2 else -1
    reduce("world")
    return last, total


def add(ranks: list[int]) -> int:
    return context.engine().add_process_set(ranks)


# -- tests ----------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_uneven_batches_over_epochs(some: Ranks) -> None:
    assert some.run(uneven, 3, timeout=60) == [[some.size - 1] * 3] * some.size


@pytest.mark.parametrize("plane", ["gloo"])
def test_uneven_batches_on_other_planes(plane: str) -> None:
    with Ranks(2, env={"HVDLAB_PLANE": plane}) as ranks:
        assert ranks.run(uneven, 2, timeout=60) == [[1] * 2] * 2


def test_fused_operations(three: Ranks) -> None:
    assert three.run(fused, 60) == [0] * 3


def test_what_was_in_flight_before_joining_still_counts(three: Ranks) -> None:
    results = three.run(leave_it_in_flight)
    assert len({last for last, _ in results}) == 1
    assert [values for _, values in results] == [[], [2.0, 2.0], [2.0, 2.0]]


def test_what_needs_everyones_data_fails_where_it_is_submitted(three: Ranks) -> None:
    one, two, three_ = three.run(unsupported)
    assert one == three_
    assert two in (0, 2)
    assert three.run(reduce, "after") == [3.0] * 3


def test_a_mismatch_of_the_others_does_not_concern_those_that_have_joined(three: Ranks) -> None:
    three.run(wrong_shape)
    assert three.run(reduce, "after") == [3.0] * 3


def test_joining_one_process_set_leaves_the_others_alone(three: Ranks) -> None:
    (set_id,) = {*three.run(add, [0, 1])}
    joined = three.run(of_a_set, set_id)
    assert joined == [(1, -1.0), (1, 1.0), (-1, -1.0)]


def test_a_deadlock_is_found_and_joining_is_none(three: Ranks) -> None:
    joined = three.start(join, ranks=[2])
    stuck = [three.start(reduce, name, ranks=[rank]) for rank, name in enumerate("ab")]
    (error,) = joined.outcomes(PATIENCE)
    assert isinstance(error, AbortedError)
    assert error.cause.kind is CauseKind.DEADLOCK
    assert "rank 0 in allreduce `a`" in str(error)
    assert all(isinstance(x.outcomes(PATIENCE)[0], AbortedError) for x in stuck)
    joined = three.start(join, ranks=[1, 2])
    for _ in range(3):
        assert three.run(reduce, "x", ranks=[0]) == [1.0]
    assert three.run(join, ranks=[0]) == [0]
    assert joined.results(PATIENCE) == [0, 0]


def test_an_interrupt_ends_the_join_of_all(three: Ranks) -> None:
    joined = [three.start(join, ranks=[rank]) for rank in (0, 1)]
    assert three.run(reduce, "x", ranks=[2]) == [1.0]  # both have joined by now
    three.kill(1, signal.SIGINT)
    assert isinstance(joined[1].outcomes(PATIENCE)[0], KeyboardInterrupt)
    (error,) = joined[0].outcomes(PATIENCE)
    assert isinstance(error, AbortedError)
    assert error.cause.kind is CauseKind.INTERRUPTED
    three.catch_up()
    assert three.run(join)[0] in range(3)


def test_a_rank_that_leaves_ends_the_join_of_the_others() -> None:
    with Ranks(3) as ranks:
        joined = [ranks.start(join, ranks=[rank]) for rank in (0, 1)]
        assert ranks.run(reduce, "x", ranks=[2]) == [1.0]
        left = ranks.start(leave, ranks=[2])
        errors = [x.outcomes(PATIENCE)[0] for x in joined]
        assert [e.cause.kind for e in errors] == [CauseKind.RANK_LEFT] * 2
        again = ranks.start(leave, ranks=[0, 1])
        left.results(PATIENCE)
        again.results(PATIENCE)
        assert len({*ranks.run(join)}) == 1


def test_a_rank_that_dies_ends_the_join_of_the_others() -> None:
    with Ranks(3) as ranks:
        joined = [ranks.start(join, ranks=[rank]) for rank in (0, 1)]
        assert ranks.run(reduce, "x", ranks=[2]) == [1.0]
        ranks.kill(2)
        errors = [x.outcomes(PATIENCE)[0] for x in joined]
        assert [e.cause.kind for e in errors] == [CauseKind.RANK_DIED] * 2
        assert "): ranks 0,1 waited; rank 2 died" in str(errors[0])
        # One that has joined dies while the others work.
        joined = [ranks.start(join, ranks=[0])]
        assert ranks.run(reduce, "x", ranks=[1]) == [1.0]
        ranks.kill(0)
        assert isinstance(joined[0].outcomes(PATIENCE)[0], RankGone)
        (last,) = ranks.outcomes(join, ranks=[1])  # which may come before the news
        assert last == 1 or last.cause.kind is CauseKind.RANK_DIED
        assert ranks.run(join, ranks=[1]) == [1]
