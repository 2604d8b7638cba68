"""A rank that the coordinator has let go: no further generation begins there, so nothing may wait for one. No coordinator, no process."""

from __future__ import annotations

import numpy as np
import pytest

from hvdlab.collectives.engine.entries import Effect, Entry, Fail
from hvdlab.collectives.engine.rank_state import RankState
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import AbortedError, Cause, CauseKind
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import SUM, DType, OpKind

MEMBERS = tuple(m.Member(rank, "host", 100 + rank) for rank in range(3))
GO = m.Leave("the world was resized")
RESIZED = m.Abort(0, 1, CauseKind.MEMBERSHIP.value, (1,), "rank 1 left, because the world was resized", "")


def member() -> RankState:
    state = RankState(1)
    state.handle(m.Configure(0, 1, MEMBERS, "gloo", {}, False), 0)
    return state


def entry(name: str) -> Entry:
    tensor = np.zeros(4, np.float32)
    return Entry(Request(OpKind.ALLREDUCE, name, tensor, dtype=DType.F32, reduction=SUM), "line 1", 0)


def left_out(error: BaseException) -> bool:
    return isinstance(error, AbortedError) and error.cause.kind is CauseKind.MEMBERSHIP


def failed(effects: list[Effect]) -> list[str]:
    """Return the names of submissions that have failed because the others continue."""
    assert all(isinstance(effect, Fail) and left_out(effect.error) for effect in effects)
    return [effect.entry.name for effect in effects if isinstance(effect, Fail)]


def lose_coordinator(state: RankState) -> None:
    state.disconnect(Cause(CauseKind.COORDINATOR_LOST, (), "the coordinator is gone"))


def test_what_waits_for_a_successors_generation_fails_when_the_successor_lets_the_rank_go() -> None:
    state = member()
    lose_coordinator(state)
    state.reconnect((0, 1, 2))
    state.submit(entry("a"))
    assert failed(state.handle(GO, 0)) == ["a"]
    assert not state.sets[0].pending
    with pytest.raises(AbortedError) as raised:
        state.submit(entry("b"))
    assert left_out(raised.value)
    state.validate()


def test_so_does_what_is_submitted_once_training_begins() -> None:
    """The rank has not heard that it was let go when its program begins to train."""
    state = member()
    lose_coordinator(state)
    state.reconnect((0, 1, 2))
    state.handle(GO, 0)
    state.set_elastic(True)
    with pytest.raises(AbortedError) as raised:
        state.submit(entry("a"))
    assert left_out(raised.value)


def test_nothing_is_held_after_the_last_generation_was_aborted() -> None:
    state = member()
    assert state.handle(GO, 0) == []
    state.submit(entry("a"))  # goes to the coordinator, which refuses it
    state.handle(RESIZED, 0)
    with pytest.raises(AbortedError) as raised:
        state.submit(entry("b"))
    assert left_out(raised.value)


def test_a_successor_may_let_the_rank_stay() -> None:
    state = member()
    state.handle(GO, 0)
    lose_coordinator(state)
    state.reconnect((0, 1, 2))
    waits = entry("a")
    state.submit(waits)
    assert not state.handle(m.Configure(0, 7, MEMBERS, "gloo", {}, False), 0)[2:]
    assert waits.generation == 7
