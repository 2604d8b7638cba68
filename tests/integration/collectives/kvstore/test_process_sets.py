"""Stores of some of the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab import kvstore
from hvdlab.collectives import context, process_sets
from hvdlab.collectives.errors import AbortedError, InvalidRequestError
from hvdlab.collectives.process_sets import ProcessSet
from hvdlab.kvstore import KVStoreError
from support.ranks.resident import Ranks

DISTRIBUTED = ("dist_sync", "dist_async", "horovod", "byteps")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(5) as started:
        started.run(start_servers)
        yield started


def start_servers() -> None:
    """Start the servers. They live as long as the ranks, so a fixture's have to come before its first test."""
    kvstore.create("dist_async")


def stores_of_two_sets_and_of_all(name: str) -> list[tuple[int, int, int, float]]:
    """Return values of a store of this rank's set, made twice, then of one of all: this worker's numbers, and the value
    after a push of 1 each."""
    halves = [process_sets.add_process_set([1, 3, 4]), process_sets.add_process_set([0, 2])]
    mine = next(one for one in halves if one.included())
    found = []
    for process_set in (mine, mine, None):
        kv = kvstore.create(name, process_set=process_set)
        value, ones = np.full(3, float(kv.rank == 0)), np.ones(3)
        if name.startswith("dist"):
            kv.set_optimizer("test")
            kv.init("w", value)
            kv.pushpull("w", ones, out=value)
            kv.barrier()
            kv.pull("w", out=value)
        else:
            kv.broadcast("w", value, out=value)
            kv.pushpull("w", ones)
            value += ones
        found.append((kv.rank, kv.local_rank, kv.num_workers, float(value[0])))
    for process_set in halves:
        process_sets.remove_process_set(process_set)
    return found


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_a_store_of_a_process_set_is_that_sets_alone(ranks: Ranks, name: str) -> None:
    found = ranks.run(stores_of_two_sets_and_of_all, name)
    numbers = [(0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    for rank, ((number, size), rows) in enumerate(zip(numbers, found, strict=True)):
        assert rows == [(number, number, size, 1.0 + size)] * 2 + [(rank, rank, 5, 6.0)]


def what_is_refused() -> None:
    both = process_sets.add_process_set([0, 1])
    rank = context.engine().rank
    for name in DISTRIBUTED:
        if rank > 1:
            with pytest.raises(
                KVStoreError, match=rf"rank {rank} can't make a store of the process set of ranks 0,1,"
            ):
                kvstore.create(name, process_set=both)
        with pytest.raises(InvalidRequestError, match="is not registered"):
            kvstore.create(name, process_set=ProcessSet([0, 1, 2]))
        with pytest.raises(InvalidRequestError, match=r"takes a hvd\.ProcessSet, not list"):
            kvstore.create(name, process_set=[0, 1])  # type: ignore[arg-type]
    for name in ("local", "device", "nccl", "teststore"):
        with pytest.raises(KVStoreError, match=f"{name}.*is of one process"):
            kvstore.create(name, process_set=both)
    hvd.barrier()
    process_sets.remove_process_set(both)


def test_who_is_not_in_the_set_and_what_has_no_workers_is_refused_at_once(ranks: Ranks) -> None:
    ranks.run(what_is_refused)


_kv: Any = None
_half: Any = None
"""The process set of that store."""


def make_in_two_sets() -> None:
    """The first stores of the job are those of sets: each has servers of its own."""
    global _kv, _half
    halves = [process_sets.add_process_set([1, 2]), process_sets.add_process_set([0, 3])]
    _half = next(one for one in halves if one.included())
    _kv = kvstore.create("dist_async", process_set=_half)
    _kv.set_optimizer("test")
    _kv.init("w", np.zeros(3))


def push_in_all() -> float:
    everyone = kvstore.create("dist_async")
    everyone.set_optimizer("test")
    everyone.init("w", np.zeros(3))
    everyone.push("w", np.ones(3))
    return push(everyone)


def push(kv: Any = None) -> float:
    kv, out = kv or _kv, np.zeros(3)
    if kv is _kv:
        kv.push("w", np.ones(3))
    kv.pull("w", out=out)
    kv.barrier()
    kv.pull("w", out=out)
    return float(out[0])


_waiting: Any = None
"""An operation that has begun."""


def ask_the_other() -> None:
    """Begin an operation that can't end without the other worker of the set."""
    global _waiting
    _waiting = hvd.allreduce_async(np.ones(1), "the other", process_set=_half)


def who_died() -> tuple[int, ...]:
    with pytest.raises(AbortedError) as caught:
        hvd.synchronize(_waiting)
    return caught.value.cause.ranks


def test_sets_that_started_servers_apart_meet_in_a_store_of_all_and_die_apart() -> None:
    with Ranks(4) as ranks:
        ranks.run(make_in_two_sets)
        assert ranks.run(push_in_all) == [4.0] * 4
        assert ranks.run(push) == [2.0] * 4
        ranks.run(ask_the_other, ranks=[1])
        ranks.kill(2)
        assert ranks.run(who_died, ranks=[1]) == [(2,)]
        assert ranks.run(push, ranks=[0, 3]) == [4.0] * 2
