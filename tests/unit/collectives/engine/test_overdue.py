"""A rank reports its long executions, and their end."""

from __future__ import annotations

import numpy as np

from hvdlab.collectives.engine.entries import Entry
from hvdlab.collectives.engine.rank_state import RankState
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import SUM, DType, OpKind

SECOND = 1_000_000_000


def executing(waited: float = 0.0) -> tuple[RankState, Entry]:
    """Return a rank that received the order to execute a tensor at 5 s."""
    state = RankState(0)
    members = tuple(m.Member(rank, "host", 1) for rank in (0, 1))
    state.handle(m.Configure(0, 1, members, "shm", {}), 0)
    x = np.ones(4, np.float32)
    entry = Entry(Request(OpKind.ALLREDUCE, "x", x, x, DType.F32, SUM), "site", 1)
    state.submit(entry)
    state.take_messages()
    if waited:
        state.report_waiting(entry, waited)
        state.take_messages()
    state.handle(m.Execute(0, 1, 1, (m.Batch((entry.local.id,)),)), 5 * SECOND)
    return state, entry


def test_what_takes_long_is_told_with_its_time() -> None:
    state, _ = executing()
    state.report_oldest_executing(5 * SECOND + SECOND // 2)
    assert state.take_messages() == []
    state.report_oldest_executing(8 * SECOND)
    assert state.take_messages() == [m.Blocked(0, 1, 0, 3.0, executing=True)]


def test_its_end_is_told() -> None:
    state, entry = executing()
    state.report_oldest_executing(8 * SECOND)
    state.take_messages()
    assert state.finish(entry)
    assert state.take_messages() == [m.Blocked(0, 1, -1, 0.0, executing=True)]


def test_a_wait_that_was_told_of_goes_on_as_execution() -> None:
    state, entry = executing(waited=0.5)
    assert state.take_messages() == [m.Blocked(0, 1, 0, 0.5, executing=True)]
    assert state.finish(entry)
    assert len(state.take_messages()) == 1


def test_nothing_is_told_of_what_ends_in_time() -> None:
    state, entry = executing()
    assert state.finish(entry)
    assert state.take_messages() == []
