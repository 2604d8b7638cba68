"""One time limit that is carried through the steps of an operation."""

from __future__ import annotations

import time
from collections.abc import Callable


class Deadline:
    """A point in time, or never.

    Args:
        seconds: How long from now; ``None`` means no limit.
        clock: Source of monotonic seconds; tests pass their own.
    """

    __slots__ = ("_clock", "_when", "seconds")

    def __init__(self, seconds: float | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._when = None if seconds is None else clock() + seconds

    def remaining(self) -> float | None:
        """Seconds left, never negative; ``None`` if there is no limit. Fits every ``timeout`` argument."""
        return None if self._when is None else max(0.0, self._when - self._clock())

    @property
    def expired(self) -> bool:
        return self._when is not None and self._clock() >= self._when

    def check(self, what: str) -> None:
        """Raise ``TimeoutError``, which says that ``what`` took too long, if the time is over."""
        if self.expired:
            raise TimeoutError(f"{what} took longer than {self.seconds:g} s")
