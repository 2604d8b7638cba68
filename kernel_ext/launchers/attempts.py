"""When a controller that died or did not start is started again, and where. Pure logic."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

SAME_PORTS = (0.1, 0.3, 1.0, 2.0)
"""Seconds to wait before another attempt with the ports that clients know: a program that has taken one may let go of it."""
OTHER_PORTS = (0.0, 0.3, 1.0)
"""Seconds to wait before each attempt with ports that the controller chooses, once the known ones can't be had."""

SOON = 0.2
"""Seconds from a controller's death to the start of the next one."""
DEATHS = 3
"""After so many deaths …"""
DEATHS_WITHIN = 60.0
"""… within so many seconds the next controllers are started after growing pauses, unless the user uses the cluster, …"""
LATER, AT_LATEST = 5.0, 30.0
"""… from the first of these up to the second, in seconds. The second also follows a start that has failed for good."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to start a controller.

    Attributes:
        wait: Seconds before it.
        elsewhere: Whether the controller takes other ports than its predecessor had.
    """

    wait: float = 0.0
    elsewhere: bool = False


class Attempts:
    """The attempts of one start.

    Args:
        again: Whether the controller takes a predecessor's place. If not, no client knows its ports, and the caller that
            waits for it gets the first error that other ports can't cure, at once.
    """

    def __init__(self, *, again: bool) -> None:
        self._same = deque(SAME_PORTS if again else ())
        self._other = deque(OTHER_PORTS)
        self._again = again

    def after(self, *, taken: bool) -> Attempt | None:
        """The attempt that follows one that failed; None for none. ``taken``: it failed since its ports were taken."""
        if self._same:
            return Attempt(self._same.popleft())
        if taken and self._other:
            return Attempt(self._other.popleft(), self._again)
        return None


class Deaths:
    """The deaths of controllers that were up."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=DEATHS + 8)

    def __bool__(self) -> bool:
        return bool(self._times)

    def add(self, now: float) -> float:
        """A controller has died now. Returns the seconds after which the next one is started."""
        lately = sum(now - then < DEATHS_WITHIN for then in self._times)
        self._times.append(now)
        return SOON if lately < DEATHS else min(AT_LATEST, LATER * 2 ** (lately - DEATHS))
