"""Rendezvous store of a process set and generation, through the rank's connection to the coordinator."""

from __future__ import annotations

import _thread
import itertools
from collections.abc import Callable

from hvdlab.collectives.planes.base import KeyValue, PlaneAborted
from hvdlab.collectives.protocol import messages as m


class StoreWaits:
    """Waits for values of the rendezvous store, by ticket. Any thread."""

    def __init__(self) -> None:
        #: Numbers for tickets.
        self._numbers = itertools.count(1)
        #: Waits by ticket.
        self._waiting: dict[int, StoreWait] = {}

    def new(self, scope: tuple[int, int]) -> StoreWait:
        ticket = StoreWait(next(self._numbers), scope)
        self._waiting[ticket.number] = ticket
        return ticket

    def answer(self, number: int, value: bytes) -> None:
        ticket = self._waiting.pop(number, None)
        if ticket is not None:
            ticket.end(value)

    def forget(self, ticket: StoreWait) -> None:
        self._waiting.pop(ticket.number, None)

    def abort(self, scope: tuple[int, int] | None = None) -> None:
        """End the waits of a process set and generation, or all."""
        # A copy: the threads that wait remove their tickets meanwhile.
        for ticket in list(self._waiting.values()):
            if scope is None or ticket.scope == scope:
                ticket.end(None)


class StoreWait:
    """Pending wait for one value; ``value`` stays ``None`` if the wait was aborted."""

    def __init__(self, number: int, scope: tuple[int, int]) -> None:
        self.number = number
        self.scope = scope
        self.value: bytes | None = None
        # Held until the end: a bare lock is the cheapest object to wait on.
        self._ended = _thread.allocate_lock()
        self._ended.acquire()

    def end(self, value: bytes | None) -> None:
        if self._ended.locked():
            self.value = value
            self._ended.release()

    def wait(self, timeout: float) -> bool:
        return self._ended.acquire(timeout=timeout)


class EngineStore(KeyValue):
    """Rendezvous values of one process set and generation; blocking, any thread but the control thread."""

    def __init__(
        self,
        process_set: int,
        generation: int,
        tickets: StoreWaits,
        send: Callable[[m.Message], None],
    ) -> None:
        #: Process set and generation.
        self._scope = (process_set, generation)
        self._tickets = tickets
        self._send = send
        #: Whether the generation has ended.
        self._aborted = False

    def set(self, key: str, value: bytes) -> None:
        self._send(m.StoreSet(*self._scope, key, value))

    def get(self, key: str, timeout: float) -> bytes:
        ticket = self._tickets.new(self._scope)
        try:
            # The ticket is added before the flag is read, and abort() sets the flag before it reads the tickets: one of them sees it.
            if self._aborted:
                raise PlaneAborted(f"generation {self._scope[1]} has ended")
            self._send(m.StoreGet(*self._scope, key, ticket.number))
            if not ticket.wait(timeout):
                raise TimeoutError(f"no member has set `{key}` within {timeout:g} s")
        finally:
            self._tickets.forget(ticket)
        if ticket.value is None:
            raise PlaneAborted(f"generation {self._scope[1]} has ended")
        return ticket.value

    def abort(self) -> None:
        """End the waits of this and all later calls. Any thread."""
        self._aborted = True
        self._tickets.abort(self._scope)
