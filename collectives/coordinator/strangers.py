"""Log lines about connections that are turned away: one for each of the first ones, then how many more."""

from __future__ import annotations

import time
from collections.abc import Callable

from hvdlab.collectives.text import visible

EACH = 5
"""Lines of a minute before the rest is only counted: any process that reaches the port could fill the log otherwise."""

LONGEST = 300
"""Characters of a line at most: some lines have text in them that a stranger has sent."""

MINUTE = 60.0


class TurnedAway:
    """Lines about strangers, few at a time.

    Args:
        log: Takes a line for the operator.
        call_at: ``call_at(when, call)`` has something called later.
        clock: Returns the time, in seconds.
    """

    def __init__(
        self,
        log: Callable[[str], None],
        call_at: Callable[[float, Callable[[], None]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log, self._call_at, self._clock = log, call_at, clock
        self._said = 0  # in this minute
        self._counted = 0
        self._last = ""

    def tell(self, text: str) -> None:
        """A connection was turned away, with this line about it."""
        text = visible(text, LONGEST)
        if self._said == 0:
            self._call_at(self._clock() + MINUTE, self._minute_over)
        if self._said < EACH:
            self._said += 1
            self._log(text)
        else:
            self._counted += 1
            self._last = text

    def _minute_over(self) -> None:
        counted, last, self._counted, self._last = self._counted, self._last, 0, ""
        self._said = 0
        if counted == 1:
            self.tell(last)
        elif counted:
            self.tell(f"{counted} more connections were turned away within a minute, the last: {last}")
