"""Values too large for one message: the pool fetches their parts from a rank, or brings them there, piece by piece.

The control thread serves the pieces. While a value is lent the rank's main thread does nothing else, so that no cell
changes what is being read; large arrays are read where they are, not copied first.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hvdlab.kernel_ext.wire.shared_buffer import Window, Windows
from hvdlab.kernel_ext.wire.values import Done, Fetch, Known, Piece, PushPart, Value

NOT_SHARED = "the memory of the pool's process can't be looked into"

PATIENCE = 60.0
"""Seconds without a question after which a rank no longer keeps a value, since the pool seems to be gone."""
REMEMBERED = 64
"""How many questions that the pool gave up before the answer are remembered."""


@dataclass(slots=True)
class _Lot:
    """What is lent; ``returned`` is None if the main thread does not wait for it."""

    answer: Value | Known
    parts: tuple[memoryview, ...]
    returned: asyncio.Future[None] | None
    asked: int = 0


class Lending:
    """What the pool may fetch. Made on the main thread of a rank.

    Args:
        loop: The loop of that thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lots: dict[int, _Lot] = {}
        self._given_up: deque[int] = deque(maxlen=REMEMBERED)
        self._leaving = False
        self._guard = threading.Lock()
        self._window: Window | None = None

    def lend(self, answer: Value, parts: Sequence[memoryview]) -> None:
        """Keep the parts that an answer speaks of. Main thread, before the answer is sent."""
        lot = self._lots[answer.ticket] = _Lot(answer, tuple(parts), self._loop.create_future())
        # The lot was stored before this look: either it sees that the ticket was given up, or give_back() sees the lot.
        if self.given_up(answer.ticket):
            _resolve(lot.returned)

    def lend_aside(self, answer: Known, parts: Sequence[memoryview]) -> None:
        """Keep the parts that an answer speaks of while the main thread goes on. Any thread, before the answer is sent.

        Lots that were lent in this way before are dropped, so that a pool that is gone leaves one lot at most.
        """
        for ticket in [ticket for ticket, lot in list(self._lots.items()) if lot.returned is None]:
            self._lots.pop(ticket, None)
        self._lots[answer.ticket] = _Lot(answer, tuple(parts), None)
        if self.given_up(answer.ticket):
            self._lots.pop(answer.ticket, None)

    def given_up(self, ticket: int) -> bool:
        """Whether the pool has said that it does not wait for this answer any more, or the rank leaves. Any thread."""
        return self._leaving or ticket in self._given_up

    async def returned(self, ticket: int) -> None:
        """Wait until the pool has given the value back, or seems to be gone. Main thread."""
        lot = self._lots.get(ticket)
        try:
            while lot is not None and lot.returned is not None:
                asked = lot.asked
                done, _ = await asyncio.wait((lot.returned,), timeout=PATIENCE)
                if done or lot.asked == asked:
                    return
        finally:
            self._lots.pop(ticket, None)
            with self._guard:
                self._window = None

    # -- control thread -----------------------------------------------------------------------------------------------

    def again(self, ticket: int) -> Value | Known | None:
        """The answer that was given already, if its value is still lent."""
        lot = self._lots.get(ticket)
        return None if lot is None else lot.answer

    def piece(self, fetch: Fetch) -> Piece:
        """A piece of a part; without data if there is none."""
        lot = self._lots.get(fetch.lot)
        if lot is None or fetch.part >= len(lot.parts):
            return Piece(fetch.ticket, None)
        lot.asked += 1
        data = lot.parts[fetch.part][fetch.offset : fetch.offset + fetch.length]
        if fetch.share:
            with contextlib.suppress(OSError):  # no descriptor or no memory is left: it goes as a message
                return self._shared(fetch, data)
        return Piece(fetch.ticket, bytes(data))

    def _shared(self, fetch: Fetch, data: memoryview) -> Piece:
        with self._guard:
            window = self._window
            if window is None or window.size < fetch.length:
                self._window = None
                window = self._window = Window(fetch.length)
            return Piece(fetch.ticket, None, window.write(data))

    def give_back(self, ticket: int | None = None) -> None:
        """The pool no longer needs the answer to this ticket, be it lent yet or not; without a ticket the rank leaves."""
        if ticket is None:
            self._leaving = True
        else:
            self._given_up.append(ticket)
        for number, lot in list(self._lots.items()):
            if ticket not in (None, number):
                continue
            if lot.returned is None:
                self._lots.pop(number, None)
                with self._guard:
                    self._window = None
            else:
                self._loop.call_soon_threadsafe(_resolve, lot.returned)


def _resolve(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


class Parcels:
    """What the pool has brought so far."""

    def __init__(self) -> None:
        self._parts: dict[int, list[bytearray]] = {}
        self._windows = Windows()

    def put(self, part: PushPart) -> Done:
        """Take a piece. Control thread."""
        try:
            parts = self._parts.get(part.lot)
            if parts is None:
                # Only one lot at a time: what is left of another belongs to a push that was given up.
                self._parts.clear()
                parts = self._parts[part.lot] = [bytearray(size) for size in part.sizes]
        except MemoryError:
            return Done(part.ticket, f"MemoryError: there is no room for {sum(part.sizes):,} bytes")
        target = parts[part.part]
        if part.shared is None:
            target[part.offset : part.offset + len(part.data)] = part.data
            return Done(part.ticket)
        try:
            self._windows.read(
                part.shared, memoryview(target)[part.offset : part.offset + part.shared.length]
            )
        except OSError:
            return Done(part.ticket, NOT_SHARED)
        return Done(part.ticket)

    def take(self, lot: int) -> list[bytearray]:
        """All parts of a lot, which is then forgotten. Main thread. Raises ``KeyError`` if it did not come."""
        return self._parts.pop(lot)

    def drop(self, lot: int) -> None:
        """Forget a lot: the pool has given the push up, or it is over. Control thread."""
        self._parts.pop(lot, None)
        self._windows.close()
