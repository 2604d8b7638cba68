"""Many process sets, many tensors in flight, many steps: no error, right results, and memory that stays flat."""

from __future__ import annotations

import gc
import os

import numpy as np
import psutil
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from support.engine_probe import EngineProbe
from support.ranks.resident import Ranks, resident_ranks

SETS = 64
IN_FLIGHT = 2000
MIB = 1 << 20


three = resident_ranks(3, scope="function")


two = resident_ranks(2, scope="function")


def resident(pid: int | None = None) -> int:
    return psutil.Process(pid or os.getpid()).memory_info().rss


def many_sets(steps: int) -> int:
    """Submit this rank's tensors of all sets at once, in an order of its own; return how many it had in flight."""
    engine = context.engine()
    size = engine.size
    members = [sorted({i % size, (i // size) % size}) for i in range(SETS)]
    sets = [(engine.add_process_set(ranks), ranks) for ranks in members]
    rng = np.random.default_rng(engine.rank)
    in_flight = 0
    for step in range(steps):
        handles = []
        for i in rng.permutation(IN_FLIGHT):
            id, ranks = sets[i % SETS]
            if engine.rank in ranks:
                x = np.full(1 + i % 700, i + step + engine.rank, np.float32)
                handles.append((i, ranks, hvd.allreduce_async(x, f"t{i}", op=hvd.Sum, process_set=id)))
        in_flight = len(handles)
        for i, ranks, handle in handles:
            result = np.asarray(hvd.synchronize(handle))
            assert result.shape == (1 + i % 700,)
            assert (result == sum(i + step + rank for rank in ranks)).all(), (i, ranks)
    for id, _ in sets:
        engine.remove_process_set(id)
    return in_flight


def test_two_thousand_tensors_are_in_flight_over_64_process_sets(three: Ranks) -> None:
    in_flight = three.start(many_sets, 2).results(timeout=100)
    assert sum(in_flight) > IN_FLIGHT


def steps_with_new_names(first: int, count: int) -> tuple[int, int]:
    """Reduce tensors whose names never come again; return resident bytes, and how many tensors are known by number."""
    for number in range(first, first + count, 50):
        handles = [hvd.allreduce_async(np.ones(2), f"name {number + i}", op=hvd.Sum) for i in range(50)]
        for handle in handles:
            assert np.asarray(hvd.synchronize(handle))[0] == 2
    gc.collect()
    engine = context.engine()
    return resident(), len(EngineProbe(engine).locked.state.locals)


@pytest.mark.parametrize(
    ("count", "growth"),
    [
        (6_000, 3 * MIB),
        pytest.param(100_000, 4 * MIB, marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
def test_endless_new_names_take_no_more_memory(two: Ranks, count: int, growth: int) -> None:
    coordinator = two.coordinator.pid
    warm = 6_000 if count < 20_000 else 30_000  # until all bounded tables are full
    before = two.start(steps_with_new_names, 0, warm).results(timeout=400)
    coordinator_before = resident(coordinator)
    after = two.start(steps_with_new_names, warm, count).results(timeout=800)
    for (rss, known), (rss_after, known_after) in zip(before, after, strict=True):
        assert known_after == known <= 4096
        assert rss_after - rss < growth, f"{(rss_after - rss) / count:.0f} bytes per name"
    assert resident(coordinator) - coordinator_before < growth


def steps_of_training(count: int) -> int:
    rng = np.random.default_rng(0)
    for step in range(count):
        handles = [
            hvd.allreduce_async(np.ones(int(n), np.float32), f"grad.{i}", op=hvd.Sum)
            for i, n in enumerate(rng.integers(1, 20_000, 8))
        ]
        hvd.allgather(np.ones((context.engine().rank + step % 3, 2)))
        for handle in handles:
            hvd.synchronize(handle)
    gc.collect()
    return resident()


@pytest.mark.parametrize(
    ("count", "growth"),
    [
        (700, 3 * MIB),
        pytest.param(10_000, 4 * MIB, marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
def test_steps_leave_nothing_behind(two: Ranks, count: int, growth: int) -> None:
    coordinator = two.coordinator.pid
    warm = two.start(steps_of_training, count).results(timeout=400)
    coordinator_before = resident(coordinator)
    after = two.start(steps_of_training, count).results(timeout=400)
    for rss, rss_after in zip(warm, after, strict=True):
        assert rss_after - rss < growth, f"{(rss_after - rss) / count:.0f} bytes per step"
    assert resident(coordinator) - coordinator_before < growth
