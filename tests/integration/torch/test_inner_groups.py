"""Inner groups of watched groups: connecting, and aborts in the middle of operations."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hvdlab.torch.c10d.inner_groups import make_inner
from support.ranks.resident import Ranks

RANKS = 4
LIMIT = timedelta(seconds=60)


@pytest.fixture(scope="module")
def world() -> Iterator[Ranks]:
    with Ranks(RANKS, init=False, imports=["hvdlab.torch"]) as ranks:
        yield ranks


def _unended(path: str, rank: int, elements: int, groups: int) -> int:
    """Abort many groups at different moments of an operation, and return how many operations did not end by that."""
    pauses, pausing, unended = random.Random(rank), threading.Event(), 0
    store: Any = dist.FileStore(path, RANKS)
    for number in range(groups):
        space: Any = dist.PrefixStore(str(number), store)  # type: ignore[attr-defined]
        inner = make_inner("gloo", space, rank, RANKS, LIMIT)
        options: Any = dist.AllreduceOptions()  # type: ignore[attr-defined]
        inner.group.allreduce([torch.ones(elements)], options).wait()
        pausing.wait(pauses.uniform(0, 1e-3))
        ended = threading.Event()
        work = inner.group.allreduce([torch.ones(elements)], options)
        work.get_future().add_done_callback(lambda _, ended=ended: ended.set())
        pausing.wait(pauses.uniform(0, 1e-3))
        inner.abort()
        unended += not ended.wait(LIMIT.total_seconds() / 6)
        inner.close()
        space.set(f"closed {rank}", "")
        for other in range(RANKS):
            space.get(f"closed {other}")
    return unended


@pytest.mark.parametrize(("elements", "groups"), [(2, 40), (1_000_000, 20)])
def test_an_abort_ends_operations_of_gloo_at_any_moment(
    world: Ranks, tmp_path: Path, elements: int, groups: int
) -> None:
    ranks = [(str(tmp_path / "store"), rank, elements, groups) for rank in range(RANKS)]
    assert world.start(_unended, per_rank=ranks).results(120) == [0] * RANKS


def _destroyed_at_once(path: str, rank: int, groups: int) -> None:
    """Rank 0 destroys each group as soon as it has it."""
    store: Any = dist.FileStore(path, 2)
    for number in range(groups):
        space: Any = dist.PrefixStore(str(number), store)  # type: ignore[attr-defined]
        inner = make_inner("gloo", space, rank, 2, LIMIT)
        if rank == 0:
            inner.abort()
        inner.close()


def test_a_rank_that_destroys_its_group_at_once_does_not_fail_the_connecting_of_others(
    world: Ranks, tmp_path: Path
) -> None:
    ranks = [(str(tmp_path / "store"), rank, 60) for rank in range(2)]
    world.start(_destroyed_at_once, ranks=[0, 1], per_rank=ranks).results(120)
