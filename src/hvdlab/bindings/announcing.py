"""When a rank submits and announces the gradients of a backward pass: several together.

Each announcement costs this rank and the coordinator a message, and the order that answers it interrupts the backward
pass. To submit a gradient costs several times as much right after the layer that made it, whose data fill the processor's caches, as
together with others. So gradients take turns: when there is enough to move, when the first of them has waited for some
milliseconds, and when the backward pass ends or a thread waits for them.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Protocol

from hvdlab.collectives import context

ENOUGH_BYTES = 4 << 20
"""Gradients of this size are worth moving while the backward pass goes on: they take milliseconds, a turn takes some tenths of one."""
LONGEST_SECONDS = 0.01
"""After so many seconds the next gradient has those before announced with it, however small they are."""


class BackwardPass(Protocol):
    """What a framework knows of the backward pass that runs on this thread."""

    def at_end(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the backward pass ends, unless it fails.

        A callback may give another one, which is called after all that were given before. Does nothing outside of a backward pass, or if
        the framework does not say when one ends.
        """


class Announcer:
    """Says when what is held is to be submitted and announced. For one thread at a time.

    Args:
        backward: Has the rest announced at the end of the backward pass.
        submit: Submits what is held. A method, whose object may own the announcer: it is referred to weakly.
    """

    def __init__(self, backward: BackwardPass, submit: Callable[[], None]) -> None:
        self._backward = backward
        self._submit = weakref.WeakMethod(submit)
        self._bytes = 0
        self._since = 0.0
        self._waiting = False

    def hold(self, nbytes: int) -> None:
        """``nbytes`` more are held: announce now, or at the end of the backward pass at the latest.

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
        """Submit and announce what is held, if anything."""
        if self._waiting:
            self._submit_held()
            context.engine().flush()

    def end(self) -> None:
        """The backward pass ends: submit the rest, and announce it once all that share the backward pass have submitted theirs.

        Two of them may have used one name. That is found on every rank alike if nothing is executed in between.
        """
        if self._waiting:
            self._submit_held()
            self._backward.at_end(_flush)

    def _submit_held(self) -> None:
        self._waiting = False
        submit = self._submit()
        if submit is not None:
            submit()

    def forget(self) -> None:
        """Hold nothing any more: what was held has ended."""
        self._waiting = False


def _announce_rest(announcer: weakref.ref[Announcer]) -> None:
    found = announcer()
    if found is not None and context.is_initialized():
        found.end()


def _flush() -> None:
    if context.is_initialized():
        context.engine().flush()
