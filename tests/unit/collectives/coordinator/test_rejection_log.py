"""No client of the port can fill the operator's log."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from hvdlab.collectives.coordinator.connections import LOGGED_PER_MINUTE, MINUTE, RejectionLog
from support.logged_lines import LoggedLines


class Clock:
    """Clock that the test moves, and the calls that are due then."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.calls: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def call_at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.calls, (when, next(self._order), call))

    def pass_(self, seconds: float) -> None:
        self.now += seconds
        while self.calls and self.calls[0][0] <= self.now:
            heapq.heappop(self.calls)[2]()


def test_the_first_ones_are_told_each_and_the_others_counted() -> None:
    logged = LoggedLines()
    clock = Clock()
    rejections = RejectionLog(logged.log, clock, lambda: clock.now)
    for number in range(1000):
        rejections.add(f"connection {number} is closed")
    assert logged.lines() == [f"connection {number} is closed" for number in range(LOGGED_PER_MINUTE)]
    clock.pass_(MINUTE)
    assert logged.lines()[LOGGED_PER_MINUTE:] == [
        f"{1000 - LOGGED_PER_MINUTE} more connections were turned away within a minute, the last: connection 999 is closed"
    ]
    rejections.add("another")
    assert logged.lines()[-1] == "another"


def test_an_attack_that_goes_on_costs_a_few_lines_a_minute() -> None:
    logged = LoggedLines()
    clock = Clock()
    rejections = RejectionLog(logged.log, clock, lambda: clock.now)
    for _ in range(10):
        for _ in range(600):
            rejections.add("no Hello")
            clock.pass_(0.1)
    assert LOGGED_PER_MINUTE <= len(logged.lines()) <= 11 * (LOGGED_PER_MINUTE + 1)


def test_the_last_ones_are_told_and_nothing_is_called_for_ever() -> None:
    logged = LoggedLines()
    clock = Clock()
    rejections = RejectionLog(logged.log, clock, lambda: clock.now)
    for _ in range(LOGGED_PER_MINUTE + 1):
        rejections.add("the token is wrong")
    clock.pass_(MINUTE)
    assert logged.lines() == ["the token is wrong"] * (LOGGED_PER_MINUTE + 1)
    for _ in range(3):
        clock.pass_(MINUTE)
    assert not clock.calls
    assert len(logged.lines()) == LOGGED_PER_MINUTE + 1
