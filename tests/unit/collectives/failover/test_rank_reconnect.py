"""How long a rank waits for the coordinator's successor."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from hvdlab.collectives.errors import StartError
from hvdlab.collectives.failover import rank_reconnect
from hvdlab.collectives.failover.rank_reconnect import LONGER, SUCCESSORS, RankReconnect
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.handshake import NobodyThereError, RefusedError, UnreachableError
from hvdlab.collectives.settings import Settings
from hvdlab.collectives.time_limits import RESTART_WINDOW, RESTARTS, Deadline, RestartLimit
from support.patience import PATIENCE


class Waiting(RankReconnect):
    """Each attempt takes a given time, and fails."""

    def __init__(
        self,
        seconds: float,
        error: Exception,
        monkeypatch: pytest.MonkeyPatch,
        *,
        returns: bool = False,
        cut_off: float = 100.0,
    ) -> None:
        self.now, self.attempts = 0.0, 0
        self.ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._seconds, self._error = seconds, error
        monkeypatch.setattr(rank_reconnect, "Deadline", lambda limit: Deadline(limit, clock=lambda: self.now))
        monkeypatch.setattr(rank_reconnect, "PAUSE", 0.0)
        dispatcher: Any = SimpleNamespace(give_up=self.ended.put, elastic=returns)
        control: Any = SimpleNamespace(call=lambda call: call())
        settings = Settings(coordinator="unix:/nowhere", reattach=10.0, cut_off=cut_off)
        super().__init__(settings, m.Hello(1, "", "rank", 0), 0, dispatcher, control)

    def _connect(self, deadline: Deadline) -> Any:
        self.attempts += 1
        self.now += self._seconds
        raise self._error

    def run(self) -> str:
        self.begin("it was killed")
        said = self.ended.get(timeout=PATIENCE)
        self.cancel(10)
        return said


def test_it_waits_for_the_next_one_when_a_successor_dies_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(LONGER * 10.0 - 1, StartError("closed"), monkeypatch)
    assert waiting.run() == "it was killed; closed"
    assert waiting.attempts == SUCCESSORS + 2  # the last of them comes too late


def test_it_waits_longer_than_a_successor_needs_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(LONGER * 10.0, StartError("did not answer"), monkeypatch)
    assert waiting.run() == "it was killed; did not answer"
    assert waiting.attempts == 1


def test_it_does_not_wait_where_nobody_would_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(0.0, NobodyThereError("refused"), monkeypatch)
    assert "the process that started it has ended as well" in waiting.run()
    assert waiting.attempts == 1


def test_a_rank_that_can_come_back_waits_longer_for_its_network(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(LONGER * 10.0, UnreachableError("no answer"), monkeypatch, returns=True)
    assert waiting.run() == "it was killed; no answer"
    assert waiting.attempts == 4  # the last of them had 10 s left


def test_one_that_can_not_come_back_waits_as_for_a_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(LONGER * 10.0, UnreachableError("no answer"), monkeypatch)
    assert waiting.run() == "it was killed; no answer"
    assert waiting.attempts == 1


def test_one_that_is_refused_for_good_does_not_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(0.0, RefusedError("taken"), monkeypatch, returns=True)
    assert waiting.run() == "it was killed; taken"
    assert waiting.attempts == 1


def test_one_that_comes_too_early_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(25.0, RefusedError("still there", again=True), monkeypatch, returns=True)
    assert waiting.run() == "it was killed; still there"
    assert waiting.attempts > 3


def test_search_that_fails_by_an_unexpected_error_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(0.0, OSError("no descriptor left"), monkeypatch)
    assert waiting.run() == "it was killed; the search for it failed (OSError: no descriptor left)"
    assert waiting.attempts == 1


def test_one_that_loses_its_connection_again_and_again_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting = Waiting(0.0, StartError("closed"), monkeypatch, returns=True)
    waiting._handlers.reconnected = lambda endpoint: None  # type: ignore[method-assign]
    waiting._returned = RestartLimit(clock=lambda: waiting.now)
    endpoint: Any = None
    for _ in range(RESTARTS):
        assert waiting._may_return()
        waiting.now += 1.0
        waiting._go_on(endpoint, m.Welcome(0, 0, incarnation=0))
    assert not waiting._may_return()
    waiting.now += RESTART_WINDOW
    assert waiting._may_return()
    waiting._go_on(endpoint, m.Welcome(0, 0, incarnation=1))  # a successor
    assert waiting._may_return()
