"""Waits of this rank for others outside of collectives: the coordinator says when such a wait is in vain."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from hvdlab.collectives.engine.request import PendingCollective
from hvdlab.collectives.errors import Cause, CauseKind, format_ranks
from hvdlab.collectives.protocol import messages as m


class Awaiting(Protocol):
    """What waits. Called on the control thread; must not block."""

    def still_waits(self) -> bool:
        """Whether nothing that has come by now ends the wait."""
        ...

    def in_vain(self, cause: Cause) -> None:
        """The wait is in vain: what would end it won't come, for this reason. Called once at most."""
        ...


class Awaits:
    """What threads of this process wait for.

    Args:
        send: Sends a message to the coordinator, from any thread.
    """

    def __init__(self, send: Callable[[m.Message], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        #: The waits that go on, by number: announcement, waiter, and when it began, in ns.
        self._waiting: dict[int, tuple[m.Await, Awaiting, int]] = {}

    def begin(self, ranks: Sequence[int], what: str, site: str, waiter: Awaiting, *, any: bool) -> int:
        """A thread begins to wait. Returns the number by which the wait is ended."""
        message = m.Await(next(self._numbers), tuple(ranks), any, what, site)
        with self._lock:
            self._waiting[message.number] = message, waiter, time.monotonic_ns()
        self._send(message)
        return message.number

    def end(self, number: int) -> None:
        """The thread waits no more, for whatever reason. Idempotent."""
        with self._lock:
            found = self._waiting.pop(number, None)
        if found is not None:
            self._send(m.Await(number))

    def pending(self, now: int) -> list[PendingCollective]:
        """The waits that go on, in the form in which collectives in flight are listed: for which ranks, and why. Any thread."""
        with self._lock:
            waiting = [(message, begun) for message, _, begun in self._waiting.values()]
        found = []
        for message, begun in waiting:
            kind = (
                f"wait for {'any of ' if message.any else ''}{format_ranks(message.ranks)} ({message.what})"
            )
            found.append(PendingCollective(f"{kind}.noname", kind, message.site, (now - begun) / 1e9))
        return found

    def absent(self, message: m.Message) -> None:
        """The coordinator knows that a wait is in vain. Control thread."""
        assert isinstance(message, m.Absent)
        with self._lock:
            found = self._waiting.pop(message.number, None)
        if found is not None:
            found[1].in_vain(Cause(CauseKind(message.kind), message.ranks, message.text))

    def asked(self, message: m.Message) -> None:
        """The coordinator asks whether a wait still goes on, after all mail that it has sent. Control thread."""
        assert isinstance(message, m.AwaitStill)
        with self._lock:
            found = self._waiting.get(message.number)
        if found is not None and found[1].still_waits():
            self._send(found[0])

    def reconnected(self) -> None:
        """Announce all waits again: the coordinator's successor knows of none yet. Control thread."""
        with self._lock:
            waiting = [message for message, _, _ in self._waiting.values()]
        for message in waiting:
            self._send(message)
