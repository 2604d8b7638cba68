"""A rank that the others have left behind: its failures, and their duration. No coordinator, no process."""

from __future__ import annotations

import numpy as np
import pytest

from hvdlab.collectives.engine.entries import Entry, Fail
from hvdlab.collectives.engine.rank_state import RankState
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import AbortedError, Cause, CauseKind
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import SUM, DType, OpKind

MEMBERS = tuple(m.Member(rank, "host", 100 + rank) for rank in range(3))
GONE_ON = m.Outdated("rank 1 was cut off, and the others have gone on without it")


def member() -> RankState:
    state = RankState(1)
    state.handle(m.Configure(0, 1, MEMBERS, "gloo", {}, False), 0)
    return state


def entry(name: str) -> Entry:
    tensor = np.zeros(4, np.float32)
    return Entry(Request(OpKind.ALLREDUCE, name, tensor, dtype=DType.F32, reduction=SUM), "line 1", 0)


def cut_off(state: RankState) -> None:
    state.disconnect(Cause(CauseKind.COORDINATOR_LOST, (), "the coordinator is gone"))


def back(state: RankState) -> list[AbortedError]:
    """Connect to the coordinator again; return the errors of the waiting submissions."""
    state.reconnect((0, 1, 2))
    effects = state.handle(GONE_ON, 0)
    assert all(isinstance(effect, Fail) for effect in effects)
    return [effect.error for effect in effects if isinstance(effect, Fail)]  # type: ignore[misc]  # all are aborted


def refused(state: RankState) -> bool:
    try:
        state.submit(entry("x"))
    except AbortedError as error:
        return error.cause.kind is CauseKind.COORDINATOR_LOST
    else:
        return False


def test_training_fails_until_all_begin_again() -> None:
    state = member()
    state.set_elastic(True)
    cut_off(state)
    back(state)
    assert refused(state)
    state.reached_reset(m.Regroup(1, 1, "it failed"))
    assert refused(state)
    state.handle(m.Configure(0, 7, MEMBERS, "gloo", {}, False), 0)
    state.handle(m.Regrouped(1), 0)
    assert not refused(state)


def test_training_that_begins_after_the_cut_fails_as_well() -> None:
    """Its first collectives would meet those that the others have come to."""
    state = member()
    state.set_elastic(True)
    cut_off(state)
    state.set_elastic(False)
    state.set_elastic(True)
    state.submit(entry("held"))
    (error,) = back(state)
    assert "gone on without it" in str(error)
    assert refused(state)
    state.set_elastic(False)
    state.set_elastic(True)
    assert refused(state)
    state.reached_reset(m.Regroup(1, 1, "it failed"))
    state.handle(m.Regrouped(1), 0)
    assert not refused(state)


def test_a_cell_fails_until_it_ends() -> None:
    state = member()
    state.begin_cell("cell")
    cut_off(state)
    state.submit(entry("held"))
    assert len(back(state)) == 1
    assert refused(state)
    state.handle(m.Configure(0, 7, MEMBERS, "gloo", {}, False), 0)
    assert refused(state)
    state.end_cell("cell", "AbortedError")
    state.begin_cell("next")
    assert not refused(state)


def test_without_a_cell_nothing_has_to_fail() -> None:
    state = member()
    cut_off(state)
    assert back(state) == []
    assert not refused(state)


@pytest.mark.parametrize("elastic", [True, False])
def test_a_successor_that_has_the_rank_fails_nothing_more(elastic: bool) -> None:
    state = member()
    state.begin_cell("cell")
    if elastic:
        state.set_elastic(True)
        state.reached_reset(m.Regroup(1, 1, ""))
    cut_off(state)
    state.reconnect((0, 1, 2))
    state.handle(m.Configure(0, 7, MEMBERS, "gloo", {}, False), 0)
    state.handle(m.Regrouped(1), 0)
    assert not refused(state)
