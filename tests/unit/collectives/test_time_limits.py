"""Deadlines, silence of the coordinator, and restarts within a minute."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hvdlab.collectives import time_limits
from hvdlab.collectives.time_limits import (
    ASK_AFTER,
    MOST_WAIT,
    RESTART_WINDOW,
    SILENT_AFTER,
    STOPPED_AFTER,
    Deadline,
    Heartbeat,
    RestartLimit,
    wall_offset,
)


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_a_deadline_is_shared_by_steps() -> None:
    clock = Clock()
    deadline = Deadline(3, clock=clock)
    assert deadline.remaining() == 3
    clock.now += 2
    assert deadline.remaining() == 1
    assert not deadline.expired
    clock.now += 2
    assert deadline.remaining() == 0
    assert deadline.expired
    with pytest.raises(TimeoutError, match="the coffee took longer than 3 s"):
        deadline.check("the coffee")


def test_no_limit() -> None:
    deadline = Deadline(None)
    assert deadline.remaining() is None
    assert not deadline.expired
    deadline.check("anything")


def test_one_that_answers_is_asked_now_and_then() -> None:
    now, asked = 100.0, 0
    heartbeat = Heartbeat(now)
    for _ in range(10):
        now += heartbeat.timeout(now)
        if heartbeat.asks(now):
            asked += 1
            heartbeat.heard(now)
        assert heartbeat.lost(now, stopped=True) == ""
    assert asked == 10


def test_one_that_is_stopped_is_lost_soon() -> None:
    heartbeat = Heartbeat(0.0)
    assert not heartbeat.asks(ASK_AFTER / 2)
    assert heartbeat.asks(ASK_AFTER)
    assert not heartbeat.asks(ASK_AFTER), "asked once"
    assert heartbeat.lost(ASK_AFTER, stopped=True) == ""
    assert not heartbeat.overdue(ASK_AFTER + STOPPED_AFTER / 2)
    assert heartbeat.overdue(ASK_AFTER + STOPPED_AFTER)
    assert "stopped" in heartbeat.lost(ASK_AFTER + STOPPED_AFTER, stopped=True)


def test_a_busy_one_is_given_time() -> None:
    heartbeat = Heartbeat(0.0)
    assert heartbeat.asks(ASK_AFTER)
    assert heartbeat.lost(ASK_AFTER + SILENT_AFTER - 1, stopped=False) == ""
    assert "not answered for 30 s" in heartbeat.lost(ASK_AFTER + SILENT_AFTER, stopped=False)


def test_who_was_stopped_itself_hears_first_what_has_come() -> None:
    heartbeat = Heartbeat(0.0)
    assert heartbeat.asks(ASK_AFTER)
    much_later = 1000.0
    heartbeat.heard(much_later)
    assert not heartbeat.overdue(much_later)
    assert heartbeat.lost(much_later, stopped=False) == ""
    assert heartbeat.timeout(much_later) == ASK_AFTER


class Waits(threading.Condition):
    """Condition on which each wait passes the time that it allows; the awaited event comes at a set time of the clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.waits = clock, list[float]()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        assert timeout is not None
        self.waits.append(timeout)
        self.clock.now += timeout
        return predicate()


@pytest.mark.parametrize(
    ("seconds", "comes", "waits"),
    [
        (None, 2.5, [MOST_WAIT] * 3),
        (2.5, 9.0, [MOST_WAIT, MOST_WAIT, 0.5]),
        (2.5, 2.0, [MOST_WAIT] * 2),
        (0.0, 9.0, [0.0]),
    ],
)
def test_wait_comes_back_for_signals_and_ends_in_time(
    seconds: float | None, comes: float, waits: list[float]
) -> None:
    clock = Clock()
    begin, condition = clock.now, Waits(clock)
    deadline = Deadline(seconds, clock=clock)
    reached = deadline.wait_for(condition, lambda: clock.now >= begin + comes)
    assert (reached, condition.waits) == (seconds is None or comes <= seconds, waits)


def test_restarts_are_limited_within_a_time_only() -> None:
    clock = Clock()
    limit = RestartLimit(3, clock=clock)
    for count in range(3):
        assert not limit.reached
        assert limit.recent == count
        limit.add()
        clock.now += 1
    assert limit.reached
    clock.now += RESTART_WINDOW - 3
    assert not limit.reached, "the first one is a minute ago"
    assert limit.recent == 2


def test_a_restart_can_be_taken_back() -> None:
    limit = RestartLimit(1, clock=Clock())
    limit.add()
    limit.forget_last()
    assert not limit.reached


def test_the_difference_of_two_clocks_counts_no_time_between_their_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Kept from running before the read of the time of day, not at all, and after it.
    moments = iter([1.0, 3.0, 3.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0])
    clocks = SimpleNamespace(monotonic=lambda: next(moments), time=lambda: 100.0 + next(moments))
    monkeypatch.setattr(time_limits, "time", clocks)
    assert wall_offset() == 100.0
