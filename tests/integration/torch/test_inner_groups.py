"""Inner groups of watched groups: connecting, and aborts in the middle of operations and of the connecting."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hvdlab.collectives import context
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.types import OpKind
from hvdlab.torch.c10d.inner_groups import InnerGroup, make_inner
from hvdlab.torch.c10d.store import HvdlabStore
from hvdlab.torch.c10d.world import C10dWorld
from support.patience import GONE, HOUR, PATIENCE, PROGRAM_PATIENCE, eventually
from support.ranks.resident import Ranks

RANKS = 4
LIMIT = timedelta(seconds=60)


@pytest.fixture(scope="module")
def world() -> Iterator[Ranks]:
    with Ranks(RANKS, imports=["hvdlab.torch"]) as ranks:
        ranks.run(_ready)
        yield ranks


def _ready() -> None:
    """Have a store's link on all ranks: mail to a rank without one would be lost."""
    context.companion(C10dWorld)
    context.engine().run(Request(OpKind.BARRIER, "ready"))


def _store(space: str, size: int) -> HvdlabStore:
    return HvdlabStore(context.companion(C10dWorld).link, space, range(size), LIMIT)


def _connected(space: str, rank: int, size: int) -> InnerGroup:
    inner = make_inner("gloo", _store(space, size), rank, size, LIMIT)
    inner.connect()
    return inner


def _unended(name: str, rank: int, elements: int, groups: int) -> int:
    """Abort many groups at different moments of an operation, and return how many operations did not end by that."""
    pauses, pausing, unended = random.Random(rank), threading.Event(), 0
    closed = _store(f"{name} closed", RANKS)
    for number in range(groups):
        inner = _connected(f"{name} {number}", rank, RANKS)
        options: Any = dist.AllreduceOptions()
        inner.group.allreduce([torch.ones(elements)], options).wait()
        pausing.wait(pauses.uniform(0, 1e-3))
        ended = threading.Event()
        work = inner.group.allreduce([torch.ones(elements)], options)
        work.get_future().add_done_callback(lambda _, ended=ended: ended.set())
        pausing.wait(pauses.uniform(0, 1e-3))
        inner.abort()
        unended += not ended.wait(LIMIT.total_seconds() / 6)
        inner.close()
        closed.set(f"{number} {rank}", "")
        for other in range(RANKS):
            closed.get(f"{number} {other}")
    return unended


@pytest.mark.parametrize(("elements", "groups"), [(2, 40), (1_000_000, 20)])
def test_an_abort_ends_operations_of_gloo_at_any_moment(world: Ranks, elements: int, groups: int) -> None:
    ranks = [(f"of {elements}", rank, elements, groups) for rank in range(RANKS)]
    assert world.start(_unended, per_rank=ranks).results(PROGRAM_PATIENCE) == [0] * RANKS


def _destroyed_at_once(rank: int, groups: int) -> None:
    """Rank 0 destroys each group as soon as it has it."""
    for number in range(groups):
        inner = _connected(f"destroyed {number}", rank, 2)
        if rank == 0:
            inner.abort()
        inner.close()


def test_a_rank_that_destroys_its_group_at_once_does_not_fail_the_connecting_of_others(world: Ranks) -> None:
    ranks = [(rank, 60) for rank in range(2)]
    world.start(_destroyed_at_once, ranks=[0, 1], per_rank=ranks).results(PROGRAM_PATIENCE)


class _Observed(HvdlabStore):
    """Store that sets an event before one call, and can hold this call until it is closed."""

    def observe(self, call: str, *, hold: bool) -> None:
        self._call, self.reached, self._go = call, threading.Event(), threading.Event()
        if not hold:
            self._go.set()

    def _pass(self, call: str) -> None:
        if call == self._call:
            self.reached.set()
            self._go.wait()

    def close(self) -> None:
        super().close()
        self._go.set()

    def set(self, key: str, value: str | bytes) -> None:
        self._pass(f"set {key}")
        super().set(key, value)

    def get(self, key: str) -> bytes:
        self._pass(f"get {key}")
        return super().get(key)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._pass(f"wait {keys[0]}")
        super().wait(keys, timeout)

    def clone(self) -> HvdlabStore:
        return self


def _given_up(name: str, rank: int, call: str, groups: int) -> bool:
    """Abort groups that connect, once each of two ranks has come to its call of the store, which rank 1 does not make.

    Returns:
        Whether that has ended the connecting of all, without a thread that stays.
    """
    limit, meeting = timedelta(seconds=HOUR), _store(f"{name} meeting", 2)
    for number in range(groups):
        store = _Observed(context.companion(C10dWorld).link, f"{name} {number}", range(2), limit)
        store.observe(call, hold=rank == 1)
        inner = make_inner("gloo", store, rank, 2, limit)
        threads = _threads()
        connecting = threading.Thread(target=_fails_to_connect, args=(inner,), daemon=True)
        connecting.start()
        assert store.reached.wait(PATIENCE)
        # Gloo counts as connected to a rank that has not accepted the connection yet. An abort before that would fail the other rank's connecting.
        _meet(meeting, str(number), rank)
        inner.abort()
        connecting.join(GONE)
        inner.close()
        if connecting.is_alive():
            return False
        # The system lists a thread for a moment after it has been joined.
        eventually(functools.partial(_no_others_than, threads))
    return True


def _meet(store: HvdlabStore, name: str, rank: int) -> None:
    """Wait until both ranks have come here."""
    store.set(f"{name} {rank}", "")
    store.get(f"{name} {1 - rank}")


def _threads() -> set[str]:
    """Return the system's numbers of this process's threads."""
    return set(os.listdir("/proc/self/task"))


def _no_others_than(threads: set[str]) -> bool:
    return _threads() <= threads


def _fails_to_connect(inner: InnerGroup) -> None:
    with contextlib.suppress(RuntimeError):
        inner.connect()


@pytest.mark.parametrize(
    ("reached", "withheld"),
    [
        ("get address 1", "set address 1"),
        ("wait 0/1", "get address 0"),
        (
            "get 0/1",
            "wait 0/0",
        ),  # then Gloo connects, or waits for rank 1 to do so, by the order of the ports
        ("get connected 1", "set connected 1"),
    ],
)
def test_an_abort_ends_the_connecting_at_any_step(world: Ranks, reached: str, withheld: str) -> None:
    ranks = [(reached, rank, (reached, withheld)[rank], 8) for rank in range(2)]
    assert world.start(_given_up, ranks=[0, 1], per_rank=ranks).results(2 * PATIENCE) == [True, True]
