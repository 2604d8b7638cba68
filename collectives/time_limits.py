"""Limits in time: deadlines of operations, silence of the coordinator, and restarts within a minute. No I/O."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Clock of seconds from a fixed moment, such as ``time.monotonic``; tests pass one that they set themselves."""

    def __call__(self) -> float: ...


MOST_WAIT = 1.0
"""Seconds of one wait. Python runs a signal's handler only when the main thread is back from its wait, and a signal that comes just before
the thread blocks, or on another thread, does not end that. So Ctrl-C would have no effect until the awaited event comes."""


CLOCK_READS = 3
"""Reads of two clocks, of which the quickest counts: the thread may be kept from running between one and the other."""


def wall_offset() -> float:
    """Return the difference to add to seconds of this host's ``CLOCK_MONOTONIC`` to get seconds since 1970, as it is now."""
    return min(_read_clocks() for _ in range(CLOCK_READS))[1]


def _read_clocks() -> tuple[float, float]:
    """Return how long it took to read both clocks, up to which the difference can be wrong, and the difference."""
    begin, day, end = time.monotonic(), time.time(), time.monotonic()
    return end - begin, day - begin


class Deadline:
    """Point in time that all steps of an operation share, or never.

    Args:
        seconds: How long from now; ``None`` means no limit.
        clock: Source of monotonic seconds; tests pass their own.
    """

    __slots__ = ("_clock", "_when", "seconds")

    def __init__(self, seconds: float | None, *, clock: Clock = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        #: The end in the clock's seconds, or ``None``.
        self._when = None if seconds is None else clock() + seconds

    def remaining(self) -> float | None:
        """Return the seconds left, never negative; ``None`` if there is no limit. Fits every ``timeout`` argument."""
        return None if self._when is None else max(0.0, self._when - self._clock())

    @property
    def expired(self) -> bool:
        """Return whether the time is over."""
        return self._when is not None and self._clock() >= self._when

    def wait_for(self, condition: threading.Condition, reached: Callable[[], object]) -> bool:
        """Wait as ``condition.wait_for(reached)`` does, and come back now and then for signals. Return whether it was reached in time."""
        while True:
            left = self.remaining()
            if condition.wait_for(reached, MOST_WAIT if left is None else min(left, MOST_WAIT)):
                return True
            if left is not None and left <= MOST_WAIT:
                return False

    def check(self, what: str) -> None:
        """Raise ``TimeoutError`` if the time is over.

        Args:
            what: The operation, as it begins the error's text.
        """
        if self.expired:
            raise TimeoutError(f"{what} took longer than {self.seconds:g} s")


ASK_AFTER = 2.0
"""Seconds of silence after which the client sends the coordinator a ping. An idle coordinator is silent, so this is not the loss itself."""
STOPPED_AFTER = 1.0
"""Seconds without an answer after which the coordinator counts as lost if its process is stopped (SIGSTOP, a debugger)."""
SILENT_AFTER = 30.0
"""Seconds without an answer after which it counts as lost in any case. A busy machine can keep it from answering for many seconds."""


class Heartbeat:
    """Silence of the coordinator: when to ping it, and when it counts as lost.

    Silence alone proves nothing, since the coordinator speaks only if there is something to report. An unanswered ping does.

    Args:
        now: The time, in monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        self._heard = now
        #: Time of the unanswered ping, or ``None``.
        self._asked: float | None = None

    def heard(self, now: float) -> None:
        """Record that a message came from the coordinator."""
        self._heard = now
        self._asked = None

    def asks(self, now: float) -> bool:
        """Return whether to send a ping now. True once in each silence."""
        if self._asked is not None or now < self._heard + ASK_AFTER:
            return False
        self._asked = now
        return True

    def overdue(self, now: float) -> bool:
        """Return whether the answer is late enough to ask whether the process is stopped, for :meth:`lost`."""
        return self._asked is not None and now - self._asked >= STOPPED_AFTER

    def lost(self, now: float, *, stopped: bool) -> str:
        """Return why it counts as lost, or an empty text. Call this after reading everything that has arrived.

        Args:
            now: The time, in monotonic seconds.
            stopped: Whether the coordinator's process is known to be stopped.
        """
        if self._asked is None:
            return ""
        waited = now - self._asked
        if waited >= SILENT_AFTER:
            return f"it has not answered for {waited:.0f} s"
        if waited >= STOPPED_AFTER and stopped:
            return "its process is stopped (SIGSTOP)"
        return ""

    def timeout(self, now: float) -> float:
        """Return the seconds until the next :meth:`asks` or :meth:`lost` is due."""
        if self._asked is None:
            return max(0.0, self._heard + ASK_AFTER - now)
        # No descriptor reports that a process was stopped, so that it has to be checked again and again.
        return STOPPED_AFTER


RESTARTS = 5
"""Restarts that are allowed within :data:`RESTART_WINDOW`: the fault that ended the last ones would end the next one as well."""
RESTART_WINDOW = 60.0
"""Seconds within which restarts count."""


class RestartLimit:
    """Limit on the restarts of one thing within a time, such as those of a coordinator.

    Args:
        most: Restarts that are allowed within the window.
        window: Seconds.
        clock: Source of monotonic seconds; tests pass their own.

    Attributes:
        most: The same.
    """

    def __init__(
        self,
        most: int = RESTARTS,
        window: float = RESTART_WINDOW,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self.most = most
        self._window = window
        self._clock = clock
        #: Times of the latest restarts.
        self._times: deque[float] = deque(maxlen=most)

    def add(self) -> None:
        """Count a restart."""
        self._times.append(self._clock())

    def forget_last(self) -> None:
        """Remove the latest :meth:`add`: nothing had to be restarted after all."""
        self._times.pop()

    @property
    def recent(self) -> int:
        """Return the number of restarts within the window, up to ``most``."""
        now = self._clock()
        return sum(now < when + self._window for when in self._times)

    @property
    def reached(self) -> bool:
        """Return whether one more restart would be too many."""
        return self.recent == self.most
