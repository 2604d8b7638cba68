"""Pickled values between a rank's variables and the pool; large ones in chunks.

The control thread serves the chunks. The main thread stays blocked until a transfer is released, so that no cell changes
an array that is being read in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hvdlab.kernel_ext.rank.errors import one_line, safe_str
from hvdlab.kernel_ext.wire.codec import wire_text
from hvdlab.kernel_ext.wire.pickling import INLINE, TooLarge, dump, dump_parts
from hvdlab.kernel_ext.wire.values import (
    NOT_SHARED,
    Acked,
    ChunkBuffer,
    PullValue,
    PushValue,
    ReadChunk,
    SharedBufferReader,
    Snapshot,
    TransferChunk,
    Value,
    WriteChunk,
    copy_to,
    rough_size,
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


def push(shell: Any, request: PushValue, incoming: Callable[[int], Sequence[Any]]) -> Acked:
    """Bind the values to their names; either all of them or none.

    Args:
        incoming: Returns the parts of a transfer.
    """
    try:
        # From the pool that started this rank, at its user's request: no less trusted than the cells themselves.
        if request.transfer_id:
            stream, *buffers = incoming(request.transfer_id)
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
    packed, error = _evaluate(shell, request.names[0], _pack_alone)
    if packed is None:
        return Value(request.ticket, (None,), (error,)), []
    raw, parts = packed
    return Value(request.ticket, (raw,), ("",), tuple(part.nbytes for part in parts)), parts


def _pack_alone(value: Any) -> tuple[bytes | None, list[memoryview]]:
    """Return the pickle of a value that fits into one message, or the parts of a larger one."""
    parts = dump_parts(value)
    if sum(part.nbytes for part in parts) > INLINE:
        return None, parts
    # Pickled once more, with the buffers in the pickle: it needs no transfer. Not evaluated once more: `next(it)` has another
    # value then.
    return dump(value), []


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
    """Parts that the pool may read.

    Attributes:
        answer: The answer that names the transfer; it is repeated if the request comes again.
        parts: The memory.
        released: Set once the pool needs the parts no more; None if the main thread does not wait for that.
        reads: How many chunks were read.
        buffer: The chunk that was read last. Each transfer has its own: the pool may be copying one while it reads another.
    """

    answer: Value | Snapshot
    parts: tuple[memoryview, ...]
    released: asyncio.Future[None] | None
    reads: int = 0
    buffer: ChunkBuffer = field(default_factory=ChunkBuffer)


class OutgoingTransfers:
    """Values that the pool may read in chunks. Made on the main thread of a rank.

    Args:
        loop: The loop of that thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transfers: dict[int, OutgoingTransfer] = {}
        #: A pull that the user gives up may be released before its value is ready. If that were forgotten,
        #: the main thread would wait for a pool that never asks.
        self._released: deque[int] = deque(maxlen=REMEMBERED)
        self._leaving = False

    def offer(self, answer: Value, parts: Sequence[memoryview]) -> None:
        """Keep the parts of an answer. Main thread, before the answer is sent."""
        transfer = OutgoingTransfer(answer, tuple(parts), self._loop.create_future())
        self._transfers[answer.ticket] = transfer
        # The transfer was stored before this look: either it sees the release, or release() sees the transfer.
        if self.is_released(answer.ticket):
            _resolve(transfer.released)

    def offer_while_running(self, answer: Snapshot, parts: Sequence[memoryview]) -> None:
        """Keep the parts of an answer while the main thread goes on. Any thread, before the answer is sent.

        Earlier transfers of this kind are dropped, so that a pool that is gone leaves one at most.
        """
        for number in [number for number, one in list(self._transfers.items()) if one.released is None]:
            self._transfers.pop(number, None)
        self._transfers[answer.ticket] = OutgoingTransfer(answer, tuple(parts), None)
        if self.is_released(answer.ticket):
            self._transfers.pop(answer.ticket, None)

    def is_released(self, ticket: int) -> bool:
        """Return whether the pool waits no more for the answer with this ticket, or the rank leaves. Any thread."""
        return self._leaving or ticket in self._released

    async def released(self, ticket: int) -> None:
        """Wait until the pool has released the transfer, or seems to be gone. Main thread."""
        transfer = self._transfers.get(ticket)
        try:
            while transfer is not None and transfer.released is not None:
                reads = transfer.reads
                done, _ = await asyncio.wait((transfer.released,), timeout=PATIENCE)
                if done or transfer.reads == reads:
                    return
        finally:
            self._transfers.pop(ticket, None)
            if transfer is not None:
                transfer.buffer.free()

    # -- control thread -----------------------------------------------------------------------------------------------

    def cached_reply(self, ticket: int) -> Value | Snapshot | None:
        """Return the answer that was given already, if its transfer is open."""
        transfer = self._transfers.get(ticket)
        return None if transfer is None else transfer.answer

    def read(self, request: ReadChunk) -> TransferChunk:
        """Return a chunk of a part; without data if the transfer or the part is gone."""
        transfer = self._transfers.get(request.transfer_id)
        if transfer is None or request.part >= len(transfer.parts):
            return TransferChunk(request.ticket, None)
        transfer.reads += 1
        data = transfer.parts[request.part][request.offset : request.offset + request.length]
        chunk = transfer.buffer.put(
            request.length, lambda target: copy_to(target, data), share=request.share, plain=data
        )
        return TransferChunk(request.ticket, *chunk)

    def release(self, transfer_id: int) -> None:
        """Free this transfer, or refuse to start it if it has not begun."""
        # Before the look: `offer` stores its transfer and looks at this then, so one of the two sees the other.
        self._released.append(transfer_id)
        if (transfer := self._transfers.get(transfer_id)) is not None:
            self._free(transfer_id, transfer)

    def release_all(self) -> None:
        """Free every transfer and start no new one: the rank is leaving."""
        self._leaving = True
        for number, transfer in list(self._transfers.items()):
            self._free(number, transfer)

    def _free(self, number: int, transfer: OutgoingTransfer) -> None:
        if transfer.released is None:
            self._transfers.pop(number, None)
            transfer.buffer.free()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the rank is ending
                self._loop.call_soon_threadsafe(_resolve, transfer.released)


def _resolve(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


class IncomingTransfers:
    """Parts of values that the pool has written so far."""

    def __init__(self) -> None:
        self._parts: dict[int, list[bytearray]] = {}
        self._reader = SharedBufferReader()

    def write(self, chunk: WriteChunk) -> Acked:
        """Store a chunk. Control thread."""
        try:
            parts = self._parts.get(chunk.transfer_id)
            if parts is None:
                # Only one transfer at a time: an unfinished one belongs to a push that was given up.
                self._parts.clear()
                parts = self._parts[chunk.transfer_id] = [bytearray(size) for size in chunk.sizes]
        except MemoryError:
            return Acked(chunk.ticket, f"MemoryError: there is no room for {sum(chunk.sizes):,} bytes")
        try:
            with self._reader.chunk(chunk.data, chunk.shared) as data:
                parts[chunk.part][chunk.offset : chunk.offset + len(data)] = data
        except OSError:
            # The pool then sends the bytes in messages.
            return Acked(chunk.ticket, NOT_SHARED)
        return Acked(chunk.ticket)

    def pop(self, transfer_id: int) -> list[bytearray]:
        """Return all parts of a transfer, and forget it. Main thread. Raises ``KeyError`` if it did not come."""
        return self._parts.pop(transfer_id)

    def discard(self, transfer_id: int) -> None:
        """Forget a transfer: the pool has given the push up, or it is over. Control thread."""
        self._parts.pop(transfer_id, None)
        self._reader.close()
