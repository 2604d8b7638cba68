"""A rank that has no file descriptor left when its group's memory comes, and has some again later."""

from __future__ import annotations

import contextlib
import os
import resource
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.engine import control_thread
from hvdlab.collectives.engine.control_thread import SharedMemoryRetry, StoreWait
from hvdlab.collectives.errors import AbortedError
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.time_limits import Deadline
from support.engine_probe import EngineProbe
from support.patience import PATIENCE
from support.ranks.resident import Ranks, resident_ranks

ranks = resident_ranks(2, scope="function")


MOST = 64
"""Descriptors that a rank may have when it has none left."""

limit = resource.getrlimit(resource.RLIMIT_NOFILE)
held: list[int] = []


def reserve() -> None:
    """Take the small numbers that are free."""
    held.append(os.open(os.devnull, os.O_RDONLY))
    while held[-1] < MOST:
        held.append(os.open(os.devnull, os.O_RDONLY))


def holds_memory() -> bool:
    """Whether a group has its memory below the limit."""
    for number in range(MOST):
        # Most numbers are no open descriptor.
        with contextlib.suppress(OSError):
            if "memfd:" in os.readlink(f"/proc/self/fd/{number}"):
                return True
    return False


def fill() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (MOST, limit[1]))
    # Until no descriptor is left.
    with contextlib.suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))


def give_up() -> None:
    context.engine().withdraw("a new group, please")


def generation() -> int:
    number: int = EngineProbe(context.engine()).locked.state.sets[0].generation
    return number


def await_generation(number: int) -> None:
    deadline = Deadline(PATIENCE)
    while generation() < number:
        deadline.check("the next group")


def free() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    while held:
        os.close(held.pop())


def begin_cell() -> None:
    context.engine().begin_cell("a cell")


def total() -> float:
    return float(hvd.allreduce(np.ones(100_000, np.float32), "total", op=hvd.Sum)[0])


def renew(ranks: Ranks) -> int:
    """Bring all ranks into another group. Returns its generation."""
    (before, _) = ranks.run(generation)
    ranks.run(give_up, ranks=[0])
    ranks.run(await_generation, before + 1)
    return int(before) + 1


def rise(ranks: Ranks) -> None:
    """Bring rank 1 into a group whose end makes no room below the limit. The one before may end late."""
    deadline = Deadline(30)
    while ranks.run(holds_memory, ranks=[1]) != [False]:
        deadline.check("a group above the limit")
        ranks.run(reserve, ranks=[1])
        renew(ranks)


def test_the_first_collective_works_once_there_are_descriptors_again(ranks: Ranks) -> None:
    rise(ranks)
    assert ranks.run(total) == [2.0] * 2
    ranks.run(fill, ranks=[1])
    now = renew(ranks)
    outcomes = ranks.outcomes(total)
    assert all(isinstance(error, AbortedError) for error in outcomes)
    assert "ulimit -n" in str(outcomes[0])
    ranks.run(await_generation, now + 1)  # without memory as well
    ranks.run(free, ranks=[1])
    ranks.run(begin_cell, ranks=[1])
    assert ranks.run(total) == [2.0] * 2


def small_total() -> float:
    return float(hvd.allreduce(np.ones(10, np.float32), "small", op=hvd.Sum)[0])


def test_small_ones_need_no_memory(ranks: Ranks) -> None:
    """The others do not wait at a board that this rank does not have."""
    rise(ranks)
    ranks.run(fill, ranks=[1])
    now = renew(ranks)
    for _ in range(5):
        assert ranks.run(small_total) == [2.0] * 2
    assert ranks.run(generation) == [now] * 2
    ranks.run(free, ranks=[1])
    ranks.run(await_generation, now + 1)
    assert ranks.run(small_total) == [2.0] * 2


def test_it_is_found_out_without_a_cell_as_well(ranks: Ranks) -> None:
    rise(ranks)
    ranks.run(fill, ranks=[1])
    now = renew(ranks)
    ranks.run(free, ranks=[1])
    ranks.run(await_generation, now + 1)
    assert ranks.run(total) == [2.0] * 2


def handlers_of(sent: list[m.Message], calls: list[Any]) -> Any:
    """Return handlers that keep messages and calls for later."""
    control = SimpleNamespace(call_later=lambda seconds, call: calls.append(call))
    return SimpleNamespace(send=sent.append, control=control)


def test_looks_end_when_the_memory_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    there = False
    monkeypatch.setattr(control_thread, "_has_descriptors", lambda: there)
    sent: list[m.Message] = []
    calls: list[Any] = []
    lack = SharedMemoryRetry(handlers_of(sent, calls))
    lack.memory_missing(0, 5)
    lack.memory_missing(3, 2)
    lack.memory_missing(0, 6)
    assert len(calls) == 1
    calls.pop()()
    assert not sent
    assert len(calls) == 1
    lack.memory_received(3)
    there = True
    calls.pop()()
    assert sent == [m.Renew(0, 6)]
    assert not calls
    lack.retry_now()
    assert len(sent) == 1


def test_two_threads_that_ask_again_at_once_ask_once_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shared(dict[int, int]):
        """Generations of which another thread takes the last one just before this one does."""

        def popitem(self) -> tuple[int, int]:
            found = super().popitem()
            sent.append(m.Renew(*found))
            return super().popitem()

    monkeypatch.setattr(control_thread, "_has_descriptors", lambda: True)
    sent: list[m.Message] = []
    lack = SharedMemoryRetry(handlers_of(sent, []))
    monkeypatch.setattr(lack, "_generations", Shared())
    lack.memory_missing(0, 5)
    lack.retry_now()
    assert sent == [m.Renew(0, 5)]


def test_a_wait_that_an_abort_and_an_answer_end_at_once_has_one_end() -> None:
    class Raced(StoreWait):
        """Wait that another thread aborts while this one stores the answer."""

        @property
        def value(self) -> bytes | None:
            return self.__dict__.get("value")

        @value.setter
        def value(self, value: bytes | None) -> None:
            first = bool(value) and "value" in self.__dict__
            self.__dict__["value"] = value
            if first:
                self.end(None)

    wait = Raced(1, (0, 1))
    wait.end(b"answer")
    assert wait.wait(0)
