"""Reactions of the launcher's loop to events, without processes; the clock is the test's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest

from hvdlab.launch.host_discovery import HostsFound, HostSource
from hvdlab.runner import events as e
from hvdlab.runner import job as job_module
from hvdlab.runner.job import JobRun, QueuedEvent
from hvdlab.runner.job_spec import JobSpec
from support.fakes.job import IdleStarter, NoSink


class Loop:
    """Job with up to three ranks whose hosts come and go, and the calls of its client and its starter."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        patch.setattr(job_module, "time", self)
        self.expected: list[tuple[int, ...]] = []
        self.started: list[tuple[str, tuple[int, ...]]] = []
        given = JobSpec(
            ("train",), 1, (), min_ranks=1, max_ranks=3, source=HostSource(), cooldown=(10.0, 600.0)
        )
        self.run = JobRun(given, NoSink(), None)
        self.run._client = SimpleNamespace(  # type: ignore[assignment]  # stands in for a Client
            expect=lambda ranks: self.expected.append(tuple(ranks)),
            release=lambda ranks: None,
            rank_lost=lambda rank, pid, reason: None,
        )
        self.run._starter = _Starter(self.started)

    def monotonic(self) -> float:
        """Return the clock that the loop reads."""
        return self.now

    def take(self, *posted: QueuedEvent) -> None:
        for event in posted:
            self.run._take(event)

    def come(self, *ranks: int) -> None:
        for rank in ranks:
            self.take(e.Spawned(rank, 100 + rank), e.Connected(rank))


class _Starter(IdleStarter):
    """Starter that records the starts and their hosts; nothing runs."""

    def __init__(self, started: list[tuple[str, tuple[int, ...]]]) -> None:
        self._started = started

    def start_on(self, host: str, ranks: Sequence[int], size: int) -> None:
        self._started.append((host, tuple(ranks)))


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    made = Loop(monkeypatch)
    yield made
    made.run._events.close()


def test_what_is_expected_last_are_the_ranks_that_there_are(loop: Loop) -> None:
    """A host fails just as another one may be tried again: the table of hosts reports it amid the effects of the
    failure."""
    loop.take(HostsFound({"a": 1, "b": 1, "c": 1}))
    loop.come(0, 1, 2)
    loop.take(e.Unstartable((1,), "the connection to b is lost"))
    assert loop.expected[-1] == (0, 2)
    loop.now = 10.0
    loop.take(e.Unstartable((2,), "the connection to c is lost"))
    assert loop.started[-1] == ("b", (1,))
    assert loop.expected[-1] == (0, 1), "rank 1 would be refused"
