"""When a rank announces the gradients of a backward pass to the coordinator: several together.

Each announcement costs this rank and the coordinator a message, and the order that answers it interrupts the backward
pass. So gradients are announced in turns: when there is enough to move, when the first of them has waited for a few
milliseconds, and when the backward pass ends or a thread waits for them.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Protocol

from hvdlab.collectives import context

ENOUGH_BYTES = 1 << 20
"""Gradients of this size are worth moving while the backward pass goes on."""
LONGEST_SECONDS = 0.005
"""After so many seconds the next gradient has those before announced with it, however small they are."""


class BackwardPass(Protocol):
    """What a framework knows of the backward pass that runs on this thread."""

    def at_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the backward pass ends, unless it fails.

        Does nothing outside of a backward pass, or if the framework does not say when one ends.
        """


class Announcer:
    """Announces what was submitted without being announced. For one thread at a time.

    Args:
        backward: Has the rest announced at the end of the backward pass.
    """

    def __init__(self, backward: BackwardPass) -> None:
        self._backward = backward
        self._bytes = 0
        self._since = 0.0
        self._waiting = False

    def hold(self, nbytes: int) -> None:
        """``nbytes`` more were submitted: announce now, or at the end of the backward pass at the latest.

        Outside a backward pass the thread that waits for them announces them.
        """
        now = time.monotonic()
        if not self._waiting:
            self._waiting, self._bytes, self._since = True, 0, now
            here: weakref.ref[Announcer] = weakref.ref(self)
            self._backward.at_end(lambda: _announce_rest(here))
        self._bytes += nbytes
        if self._bytes >= ENOUGH_BYTES or now - self._since >= LONGEST_SECONDS:
            self.announce()

    def announce(self) -> None:
        """Announce what is held, if anything."""
        if self._waiting:
            self._waiting = False
            context.engine().flush()

    def forget(self) -> None:
        """Hold nothing any more: what was held has ended."""
        self._waiting = False


def _announce_rest(announcer: weakref.ref[Announcer]) -> None:
    found = announcer()
    if found is not None and context.is_initialized():
        found.announce()
