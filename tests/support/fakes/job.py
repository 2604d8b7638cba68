"""Stand-ins for the surroundings of a launcher's job, where no process runs."""

from __future__ import annotations

from collections.abc import Sequence


class IdleStarter:
    """Starter that starts nothing, signals nothing and gives up nothing; a test that checks one of these overrides
    it."""

    def start(self, ranks: Sequence[int], size: int) -> None:
        raise AssertionError("a job whose hosts come and go says where ranks are started")

    def start_on(self, host: str, ranks: Sequence[int], size: int) -> None:
        """Ranks are to be started there."""

    def give_up(self, host: str) -> None:
        """Ignore that host from now on."""

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank."""

    def place(self, rank: int, size: int) -> None:
        return None

    def close(self, timeout: float) -> None:
        """The job is over."""


class NoSink:
    """Sink that takes no output, since there is none."""

    def write(self, rank: int, stream: int, data: bytes) -> None:
        raise AssertionError("no rank runs that could write")

    def ended(self, rank: int) -> None:
        """A rank writes no more."""

    def close(self) -> None:
        """All output was written."""
