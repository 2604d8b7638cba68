"""Pickled values between a rank's variables and the pool; large ones in chunks.

The control thread serves the chunks. The main thread stays blocked until a transfer is released, so that no cell changes
an array that is being read in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hvdlab.kernel_ext.rank.errors import one_line, safe_str
from hvdlab.kernel_ext.wire.pickling import INLINE, TooLarge, dump, dump_parts
from hvdlab.kernel_ext.wire.shared_buffer import NOT_SHARED, SharedBuffer, SharedBufferReader
from hvdlab.kernel_ext.wire.text import rough_size, wire_text
from hvdlab.kernel_ext.wire.values import (
    Acked,
    PullValue,
    PushValue,
    ReadChunk,
    Snapshot,
    TransferChunk,
    Value,
    WriteChunk,
)

T = TypeVar("T")

LONGEST_REPR = 4096


@dataclass(frozen=True, slots=True)
class DumpedValue:
    """A cell's value, pickled, or why there is no pickle of it.

    Attributes:
        pickled: The pickle; None if there is none.
        why: Why there is none.
        too_large: Whether that is because of its size.
    """

    pickled: bytes | None
    why: str = ""
    too_large: bool = False


def dump_result(value: Any, limit: int) -> DumpedValue:
    """Pickle a cell's value, if that takes no more than ``limit`` bytes."""
    try:
        return DumpedValue(dump(value, limit))
    except TooLarge:
        remedy = "give it a name in the cell, `%hvd_pull NAME` brings it"
        return DumpedValue(None, f"larger than {limit:,} bytes when pickled; {remedy}", too_large=True)
    except KeyboardInterrupt:
        return DumpedValue(None, "interrupted while it was pickled")
    except Exception as error:  # noqa: BLE001  # pickling runs the user's __reduce__
        return DumpedValue(None, f"it can't be pickled ({one_line(error)})")


def short_repr(value: Any, plain: str = "") -> str:
    """``plain`` or ``repr(value)``, bounded; never raises."""
    text = plain
    if not text:
        try:
            text = repr(value)
        except Exception as error:  # noqa: BLE001  # a user's __repr__ may raise anything
            text = f"<{type(value).__name__}: its __repr__ raised {type(error).__name__}: {safe_str(error)[:200]}>"
    text = wire_text(text)
    return text if len(text) <= LONGEST_REPR else f"{text[:LONGEST_REPR]}… ({len(text)} characters in all)"


def push(shell: Any, request: PushValue, brought: Callable[[int], Sequence[Any]]) -> Acked:
    """Bind the values to their names; either all of them or none.

    Args:
        brought: Gives the parts of a lot.
    """
    try:
        # From the pool that started this rank, at its user's request: no less trusted than the cells themselves.
        if request.lot:
            stream, *buffers = brought(request.lot)
            values = pickle.loads(stream, buffers=buffers)  # noqa: S301
        else:
            values = [pickle.loads(raw) for raw in request.pickles]  # noqa: S301
        shell.push(dict(zip(request.names, values, strict=True)))
    except BaseException as error:  # noqa: BLE001  # unpickling runs the user's code, which may also exit
        return Acked(request.ticket, one_line(error))
    return Acked(request.ticket)


def pull(shell: Any, request: PullValue) -> tuple[Value, list[memoryview]]:
    """Evaluate and pickle each expression; one that fails does not keep the others back.

    Returns:
        The answer, and the parts of which it has only the sizes: there are some if one name is asked for and its
        value is too large for a message.
    """
    if len(request.names) == 1:
        return _pull_alone(shell, request)
    pickles: list[bytes | None] = []
    errors: list[str] = []
    for name in request.names:
        parts, error = _evaluate(shell, name, lambda value: dump(value, INLINE))
        pickles.append(parts)
        errors.append(error)
    return Value(request.ticket, tuple(pickles), tuple(errors)), []


def _pull_alone(shell: Any, request: PullValue) -> tuple[Value, list[memoryview]]:
    parts, error = _evaluate(shell, request.names[0], dump_parts)
    if parts is None:
        return Value(request.ticket, (None,), (error,)), []
    if sum(part.nbytes for part in parts) > INLINE:
        return Value(request.ticket, (None,), ("",), tuple(part.nbytes for part in parts)), parts
    raw, error = _evaluate(shell, request.names[0], dump)
    return Value(request.ticket, (raw,), (error,)), []


def _evaluate(shell: Any, name: str, pack: Callable[[Any], T]) -> tuple[T | None, str]:
    try:
        return pack(eval(name, shell.user_global_ns, shell.user_ns)), ""
    except TooLarge:
        return None, f"larger than {rough_size(INLINE)}; pull it by itself"
    except BaseException as error:  # noqa: BLE001  # evaluating and pickling run the user's code, which may also exit
        return None, one_line(error)


PATIENCE = 60.0
"""Seconds without a question after which a rank no longer keeps a value, since the pool seems to be gone."""
REMEMBERED = 64
"""How many questions that the pool gave up before the answer are remembered."""


@dataclass(slots=True)
class OutgoingTransfer:
    """Memory that is lent; ``returned`` is None if the main thread does not wait for it."""

    answer: Value | Snapshot
    parts: tuple[memoryview, ...]
    returned: asyncio.Future[None] | None
    asked: int = 0


class OutgoingTransfers:
    """Values that the pool may fetch. Made on the main thread of a rank.

    Args:
        loop: The loop of that thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lots: dict[int, OutgoingTransfer] = {}
        self._given_up: deque[int] = deque(maxlen=REMEMBERED)
        self._leaving = False
        self._guard = threading.Lock()
        self._window: SharedBuffer | None = None

    def lend(self, answer: Value, parts: Sequence[memoryview]) -> None:
        """Keep the parts that an answer speaks of. Main thread, before the answer is sent."""
        lot = self._lots[answer.ticket] = OutgoingTransfer(answer, tuple(parts), self._loop.create_future())
        # The lot was stored before this look: either it sees that the ticket was given up, or give_back() sees the lot.
        if self.given_up(answer.ticket):
            _resolve(lot.returned)

    def lend_aside(self, answer: Snapshot, parts: Sequence[memoryview]) -> None:
        """Keep the parts that an answer speaks of while the main thread goes on. Any thread, before the answer is sent.

        Lots that were lent in this way before are dropped, so that a pool that is gone leaves one lot at most.
        """
        for ticket in [ticket for ticket, lot in list(self._lots.items()) if lot.returned is None]:
            self._lots.pop(ticket, None)
        self._lots[answer.ticket] = OutgoingTransfer(answer, tuple(parts), None)
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

    def again(self, ticket: int) -> Value | Snapshot | None:
        """The answer that was given already, if its value is still lent."""
        lot = self._lots.get(ticket)
        return None if lot is None else lot.answer

    def piece(self, fetch: ReadChunk) -> TransferChunk:
        """A piece of a part; without data if there is none."""
        lot = self._lots.get(fetch.lot)
        if lot is None or fetch.part >= len(lot.parts):
            return TransferChunk(fetch.ticket, None)
        lot.asked += 1
        data = lot.parts[fetch.part][fetch.offset : fetch.offset + fetch.length]
        if fetch.share:
            with contextlib.suppress(OSError):  # no descriptor or no memory is left: it goes as a message
                return self._shared(fetch, data)
        return TransferChunk(fetch.ticket, bytes(data))

    def _shared(self, fetch: ReadChunk, data: memoryview) -> TransferChunk:
        with self._guard:
            window = self._window
            if window is None or window.size < fetch.length:
                self._window = None
                window = self._window = SharedBuffer(fetch.length)
            return TransferChunk(fetch.ticket, None, window.write(data))

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


class IncomingTransfers:
    """Parts of values that the pool has brought so far."""

    def __init__(self) -> None:
        self._parts: dict[int, list[bytearray]] = {}
        self._windows = SharedBufferReader()

    def put(self, part: WriteChunk) -> Acked:
        """Take a piece. Control thread."""
        try:
            parts = self._parts.get(part.lot)
            if parts is None:
                # Only one lot at a time: what is left of another belongs to a push that was given up.
                self._parts.clear()
                parts = self._parts[part.lot] = [bytearray(size) for size in part.sizes]
        except MemoryError:
            return Acked(part.ticket, f"MemoryError: there is no room for {sum(part.sizes):,} bytes")
        target = parts[part.part]
        if part.shared is None:
            target[part.offset : part.offset + len(part.data)] = part.data
            return Acked(part.ticket)
        try:
            self._windows.read(
                part.shared, memoryview(target)[part.offset : part.offset + part.shared.length]
            )
        except OSError:
            return Acked(part.ticket, NOT_SHARED)
        return Acked(part.ticket)

    def take(self, lot: int) -> list[bytearray]:
        """All parts of a lot, which is then forgotten. Main thread. Raises ``KeyError`` if it did not come."""
        return self._parts.pop(lot)

    def drop(self, lot: int) -> None:
        """Forget a lot: the pool has given the push up, or it is over. Control thread."""
        self._parts.pop(lot, None)
        self._windows.close()
