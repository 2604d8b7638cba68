"""Decisions of a parameter server: requests of workers in, updates of its memory and answers out. No I/O.

A request is carried out when it comes, so those of one worker are carried out in order, and none waits for another worker. A request
that was answered with ``RequestDone`` outlives the server. A worker repeats requests that were not answered; the sequence numbers next
to each value show which pushes were applied already.

An exception that a request raises goes to its sender as ``RequestFailed``. If the server ended of it, the worker would repeat the request
to the successor, which would end of it as well. A message without an answer that raises ends only its connection.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np

from hvdlab.collectives.errors import HvdlabError, KVStoreError, ProtocolError
from hvdlab.collectives.kvstore.arrays import Array, RowSparse
from hvdlab.collectives.kvstore.base import Key
from hvdlab.collectives.kvstore.optimizer_state import OptimizerSpec
from hvdlab.collectives.kvstore.optimizers import Gradient, Optimizer, State, restored
from hvdlab.collectives.kvstore.servers import messages as m
from hvdlab.collectives.kvstore.servers.memory import (
    Block,
    KeyRecord,
    SharedFile,
    StoreMemory,
    StoreRecord,
    ValueSlot,
    element_type,
)
from hvdlab.collectives.protocol.messages import Message
from hvdlab.collectives.text import format_ranks

AWAY_SECONDS = 10.0
"""Seconds that a worker whose connection has ended may take to come back before it counts as dead; the coordinator usually reports earlier."""
TRANSFER_BYTES = 1 << 20
"""Bytes of an arena that go over a connection at once."""
_MOST_COUNTED = 1 << 62
"""Bound of counts that come from an optimizer: far from the largest that a slot has room for."""
_LONGEST_TEXT = 4000
"""Characters of an exception's text that are sent."""
_RAISED = (Exception, SystemExit)
"""Exceptions that answer a request; an optimizer of the user's may call ``sys.exit``."""


_Request = m.Push | m.Pull | m.Init | m.SetOptimizer | m.StockRequest


class TransferArena(Protocol):
    """Memory for gradients to the server and for values back, which a worker and the server both see."""

    @property
    def remote(self) -> bool:
        """Return whether the worker sees the server's bytes only once they were sent as :class:`Data`."""
        ...

    def array(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Return a part of it as an array. Raises ``ProtocolError`` if it is not inside."""
        ...

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes that the worker sent. Raises ``ProtocolError`` if the arena is shared."""
        ...


# -- events and effects -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerArrived:
    """Worker that has shown its token over a new connection."""

    peer: int
    rank: int
    pid: int
    arena: TransferArena


@dataclass(frozen=True, slots=True)
class ServerReceived:
    """Message of a worker, with the file that came along."""

    peer: int
    message: m.FromWorker
    file: SharedFile | None = None


@dataclass(frozen=True, slots=True)
class WorkerDisconnected:
    """End of a connection."""

    peer: int


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """End of a rank's process, as the coordinator reports."""

    rank: int
    pid: int
    reason: str


@dataclass(frozen=True, slots=True)
class ServerTick:
    """Event at the time that :meth:`ParameterServerState.next_tick` named."""


Event = WorkerArrived | ServerReceived | WorkerDisconnected | WorkerDied | ServerTick


@dataclass(frozen=True, slots=True)
class ServerSend:
    """Message to send, and a file with it."""

    peer: int
    message: Message
    file: SharedFile | None = None


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Connection to end: its worker has left (no reason), or broke the protocol, as ``reason`` describes."""

    peer: int
    reason: str = ""


Effect = ServerSend | Disconnect


# -- state ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Worker:
    #: Its rank in the world.
    rank: int
    #: Its process id: another one is a restarted worker, whose requests begin with number 1.
    pid: int
    #: Its connection; -1 while it has none.
    peer: int
    #: Its memory for gradients and values.
    arena: TransferArena
    #: When its connection ended, in seconds; ``inf`` while it has one.
    away_since: float = math.inf
    #: Why the bytes that it sent last are not in its arena; empty if they are.
    unwritten: str = ""


@dataclass(slots=True)
class _Store:
    #: Values, and all that a successor needs.
    memory: StoreMemory
    #: The record in ``memory`` that counts.
    record: StoreRecord
    #: The optimizer that ``record`` describes; None before the first one.
    optimizer: Optimizer | None
    #: Result of the optimizer's ``create_state`` for each key, for its structure only: the arrays are in ``memory``.
    structures: dict[Key, Any] = field(default_factory=dict)

    def participants(self) -> list[int]:
        """Return the workers that use the store now."""
        return [rank for rank in self.record.workers if rank not in self.record.gone]


class ParameterServerState:
    """State of one server. All methods belong to one thread.

    Args:
        not_imported: Which modules of the user's optimizers could not be imported here, and why; empty if all were.
    """

    def __init__(self, not_imported: str = "") -> None:
        self._not_imported = not_imported
        #: Stores in use, by number.
        self._stores: dict[int, _Store] = {}
        #: Memory that workers have brought for stores that none has opened here yet.
        self._brought: dict[int, StoreMemory] = {}
        #: Workers that live, by rank.
        self._workers: dict[int, _Worker] = {}
        #: Ranks of workers by connection.
        self._ranks: dict[int, int] = {}
        #: Stores that wait for their memory, and the workers that open them, with their requests.
        self._opening: dict[int, list[tuple[int, m.OpenStore]]] = {}
        #: Requests for stores whose memory was not brought yet: their worker, and since when.
        self._early: dict[int, list[tuple[int, _Request, float]]] = {}
        #: Effects of the event that is handled, in order.
        self._effects: list[Effect] = []
        #: Ranks that have died. A store that is brought later goes on without them.
        self._dead: set[int] = set()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """React to an event at ``now``, in seconds. Return the effects, which the caller carries out in order."""
        if isinstance(event, ServerReceived):
            try:
                self._on_message(event, now)
            except _RAISED as error:  # of a message without an answer: errors of requests are answered below
                self._effects.append(Disconnect(event.peer, _text_of(error)))
        elif isinstance(event, WorkerArrived):
            self._on_arrived(event)
        elif isinstance(event, WorkerDisconnected):
            self._on_disconnected(event.peer, now)
        elif isinstance(event, WorkerDied):
            self._on_died(event)
        else:
            self._pass_time(now)
        effects, self._effects = self._effects, []
        return effects

    def next_tick(self) -> float:
        """Return when :class:`ServerTick` is due; ``inf`` if it is not."""
        due = [worker.away_since + AWAY_SECONDS for worker in self._workers.values()]
        due += [since + AWAY_SECONDS for early in self._early.values() for _, _, since in early]
        return min(due, default=math.inf)

    def stock(self) -> tuple[int, int]:
        """Return the number of keys of all stores, and the bytes of their values."""
        blocks = [block for store in self._stores.values() for block in store.memory.blocks.values()]
        return len(blocks), sum(block.current.value.nbytes for block in blocks)

    def close(self) -> None:
        """Close all memory."""
        for memory in (*(store.memory for store in self._stores.values()), *self._brought.values()):
            memory.close()
        self._stores.clear()
        self._brought.clear()

    # -- connections --------------------------------------------------------------------------------------------------

    def _on_arrived(self, event: WorkerArrived) -> None:
        before = self._workers.get(event.rank)
        if before is not None:
            # The old connection can end after the new one has come: its end must not count as that of the worker.
            self._ranks.pop(before.peer, None)
            if before.pid != event.pid:
                self._remove_worker(event.rank, "was started anew")
        self._workers[event.rank] = _Worker(event.rank, event.pid, event.peer, event.arena)
        self._ranks[event.peer] = event.rank
        self._forget_early(event.rank)  # the worker repeats these requests

    def _forget_early(self, rank: int) -> None:
        self._early = {
            number: [one for one in early if one[0] != rank] for number, early in self._early.items()
        }

    def _on_disconnected(self, peer: int, now: float) -> None:
        rank = self._ranks.pop(peer, None)
        if rank is not None:
            self._workers[rank].peer, self._workers[rank].away_since = -1, now

    def _on_died(self, event: WorkerDied) -> None:
        worker = self._workers.get(event.rank)
        # The end of an earlier process of this rank must not remove the one that came in its place.
        if worker is None or worker.pid == event.pid:
            self._dead.add(event.rank)
            self._remove_worker(event.rank, f"died: {event.reason}" if event.reason else "has left")

    def _remove_worker(self, rank: int, reason: str) -> None:
        """Remove a worker from all stores, and fail the openings of others that wait for it."""
        worker = self._workers.pop(rank, None)
        if worker is not None and self._ranks.pop(worker.peer, None) is not None:
            self._effects.append(Disconnect(worker.peer))
        self._forget_early(rank)
        for number in list(self._stores):
            self._remove_from_store(number, rank)
        # The dead worker was perhaps the one that makes the memory, for which the others would wait for ever.
        for number, openings in list(self._opening.items()):
            for opener, request in openings:
                if rank in request.workers and opener != rank:
                    self._fail(opener, request.sequence, f"rank {rank} {reason}", (rank,))
            if any(rank in request.workers for _, request in openings):
                del self._opening[number]

    def _remove_from_store(self, number: int, rank: int) -> None:
        store = self._stores[number]
        if rank not in store.participants():
            return
        self._set_record(store, msgspec.structs.replace(store.record, gone=(*store.record.gone, rank)))
        if not store.participants():
            store.memory.close()
            del self._stores[number]

    @staticmethod
    def _set_record(store: _Store, record: StoreRecord) -> None:
        """Use a store by this record from now on; the memory has it first, for a successor."""
        store.memory.describe(record)
        store.record = record

    def _pass_time(self, now: float) -> None:
        # A copy: a worker whose time is over is removed.
        for worker in list(self._workers.values()):
            if now >= worker.away_since + AWAY_SECONDS:
                self._remove_worker(worker.rank, f"died: its connection has been gone for {AWAY_SECONDS:g} s")
        for number, early in list(self._early.items()):
            for rank, request, since in early:
                if now >= since + AWAY_SECONDS:
                    self._fail(
                        rank, request.sequence, "no worker of this server's host has the store any more"
                    )
            self._early[number] = [one for one in early if now < one[2] + AWAY_SECONDS]

    def _send(self, rank: int, message: Message, file: SharedFile | None = None) -> None:
        worker = self._workers.get(rank)
        # Otherwise the answer is dropped: the worker repeats its request over the next connection.
        if worker is not None and worker.peer >= 0:
            self._effects.append(ServerSend(worker.peer, message, file))

    def _fail(self, rank: int, sequence: int, text: str, ranks: tuple[int, ...] = ()) -> None:
        self._send(rank, m.RequestFailed(sequence, text, ranks))

    def _refuse(self, rank: int, sequence: int, error: BaseException) -> None:
        """Answer a request that has raised this."""
        self._fail(rank, sequence, _text_of(error))

    # -- requests -----------------------------------------------------------------------------------------------------

    def _on_message(self, event: ServerReceived, now: float) -> None:
        message = event.message
        rank = self._ranks.get(event.peer)
        if rank is None:
            raise ProtocolError(f"a {type(message).__name__} of a connection without a worker")
        if isinstance(message, m.Push | m.Pull | m.Init | m.SetOptimizer | m.StockRequest):
            self._request(rank, message, now)
        elif isinstance(message, m.Data):
            self._write_to_arena(self._workers[rank], message)
        elif isinstance(message, m.Bring):
            self._bring(message, event.file)
        elif isinstance(message, m.OpenStore):
            self._open(rank, message)
        elif isinstance(message, m.CloseStore):
            if message.store in self._stores:
                self._remove_from_store(message.store, rank)
        else:
            self._remove_worker(rank, "has left")

    @staticmethod
    def _write_to_arena(worker: _Worker, message: m.Data) -> None:
        """Write bytes to an arena; if there is no memory for them, the request to which they belong fails."""
        try:
            worker.arena.write(message.offset, message.data)
        except ProtocolError:
            raise
        except _RAISED as error:
            worker.unwritten = _text_of(error)

    def _request(self, rank: int, request: _Request, now: float) -> None:
        try:
            self._execute(rank, request, now)
        except _RAISED as error:
            self._refuse(rank, request.sequence, error)

    def _execute(self, rank: int, request: _Request, now: float) -> None:
        worker, store = self._workers[rank], self._stores.get(request.store)
        if worker.unwritten and isinstance(request, m.Push | m.Init | m.Pull):
            # Bytes come right before the request that they belong to, so the failure is that of this request alone.
            text, worker.unwritten = worker.unwritten, ""
            self._fail(rank, request.sequence, f"what goes with it did not reach the server: {text}")
        elif store is None and worker.arena.remote:
            # A worker of this server's host has the store's memory, and may find the restarted server later than this worker.
            self._early.setdefault(request.store, []).append((rank, request, now))
        elif store is None or rank not in store.record.workers:
            self._fail(rank, request.sequence, "this server has no such store")
        elif isinstance(request, m.Push | m.Pull):
            self._access(store, rank, request)
        elif isinstance(request, m.Init):
            self._init(store, rank, request)
        elif isinstance(request, m.SetOptimizer):
            self._set_optimizer(store, rank, request)
        else:
            blocks = store.memory.blocks.values()
            nbytes = sum(block.current.value.nbytes for block in blocks)
            self._send(rank, m.Stock(request.sequence, len(blocks), nbytes))

    def _bring(self, message: m.Bring, file: SharedFile | None) -> None:
        if file is None:
            raise ProtocolError("a store was brought without its memory")
        if message.store in self._stores or message.store in self._brought:
            # Each worker of the host brings the memory to a new server; it is the same file, and the first one counts.
            file.close()
            return
        memory = StoreMemory(file)
        if memory.store is not None:  # of a server before this one
            self._add_store(message.store, memory)
        else:
            self._brought[message.store] = memory
        # Openings first: new memory becomes a store with the first of them, and the early requests are for that store.
        for rank, request in self._opening.pop(message.store, []):
            self._open(rank, request)
        for rank, early, now in self._early.pop(message.store, []):
            self._request(rank, early, now)

    def _add_store(self, number: int, memory: StoreMemory) -> None:
        record = memory.store
        assert record is not None
        optimizer = None
        if record.optimizer is not None:
            optimizer = self._restored_optimizer(record.optimizer)
            updates = [
                int(block.current.head[2])
                for block in memory.blocks.values()
                if block.current.head[1] == record.generation
            ]
            # The record has the optimizer as it was set, the blocks have its counts since: schedules of the learning rate go on from
            # the highest.
            optimizer.num_update = max([optimizer.num_update, *updates])
        self._stores[number] = _Store(memory, record, optimizer)
        for rank in self._dead:
            # A rank that came back is a worker again; and the store itself goes with its last worker.
            if rank not in self._workers and number in self._stores:
                self._remove_from_store(number, rank)

    def _restored_optimizer(self, spec: OptimizerSpec) -> Optimizer:
        """Return the optimizer that the server before this one had."""
        try:
            return _usable(spec)
        except _RAISED as error:  # its module could be imported then, and can't any more
            return _Unavailable(self._refusal(error))

    def _refusal(self, error: BaseException) -> str:
        return "; ".join(filter(None, (_text_of(error), self._not_imported)))

    def _open(self, rank: int, request: m.OpenStore) -> None:
        try:
            self._open_checked(rank, request)
        except _RAISED as error:
            self._refuse(rank, request.sequence, error)

    def _open_checked(self, rank: int, request: m.OpenStore) -> None:
        if request.store not in self._stores:
            if rank not in request.workers:
                raise ProtocolError(f"rank {rank} opens a store of {format_ranks(request.workers)}")
            memory = self._brought.pop(request.store, None)
            if memory is None:
                self._opening.setdefault(request.store, []).append((rank, request))
                return
            memory.describe(StoreRecord(request.workers))
            self._add_store(request.store, memory)
        store = self._stores[request.store]
        if rank not in store.record.workers:
            raise ProtocolError(f"rank {rank} opens a store of {format_ranks(store.record.workers)}")
        if rank not in store.participants():
            self._readmit(store, rank, restarted=True)
        if not self._workers[rank].arena.remote:
            self._send(rank, m.SharedStoreMemory(request.store), store.memory.file)
        self._send(rank, m.RequestDone(request.sequence))

    def _readmit(self, store: _Store, rank: int, *, restarted: bool) -> None:
        """Let a worker that has left use the store again.

        A restarted worker numbers its requests from 1 again, one that was only cut off goes on. If the server is killed in the middle
        of this, the worker still counts as one that has left, and asks again: the record is written last.
        """
        if restarted:
            index = store.record.workers.index(rank)
            for block in store.memory.blocks.values():
                block.current.applied[index] = 0
        gone = tuple(one for one in store.record.gone if one != rank)
        self._set_record(store, msgspec.structs.replace(store.record, gone=gone))

    def _init(self, store: _Store, rank: int, request: m.Init) -> None:
        # A repeated request finds the key that it has made itself.
        if request.key not in store.memory.blocks:
            given = self._workers[rank].arena.array(
                request.offset, element_type(request.dtype), request.shape
            )
            self._make_block(store, request.key, given)
        self._send(rank, m.RequestDone(request.sequence))

    def _make_block(self, store: _Store, key: Key, value: Array, before: ValueSlot | None = None) -> Block:
        """Make a block for a key with this value, and with new states of the present optimizer."""
        optimizer = store.optimizer
        if optimizer is not None and optimizer.multi_precision:
            value = value.astype(np.float32)
        arrays: list[Array] = []
        if optimizer is not None:
            store.structures[key] = _new_state(optimizer, key, value)
            arrays = list(_arrays_of(store.structures[key]))
        states = tuple((array.dtype.str[1:], array.shape) for array in arrays)
        record = KeyRecord(key, value.shape, value.dtype.str[1:], states, 0)
        block = store.memory.add(record)
        slot = block.current
        if before is not None:
            # The value is the same: workers tell its age by the version, and a repeated push is found by the sequence numbers.
            slot.head[0], slot.applied[:] = before.head[0], before.applied
        slot.head[1] = store.record.generation
        slot.head[2] = 0 if optimizer is None else optimizer.begin_num_update
        np.copyto(slot.value, value)
        for place, array in zip(slot.states, arrays, strict=True):
            np.copyto(place, array)
        # Last: from here on a successor uses the block, so all that is in it has to be complete.
        store.memory.keep(block)
        return block

    def _set_optimizer(self, store: _Store, rank: int, request: m.SetOptimizer) -> None:
        try:
            optimizer = _usable(request.optimizer)
        except _RAISED as error:
            self._fail(rank, request.sequence, self._refusal(error))
            return
        generation = store.record.generation
        if request.keeps_states and type(store.optimizer) is type(optimizer):
            optimizer.num_update = max(optimizer.num_update, store.optimizer.num_update)
        else:
            # No block is touched here: each keeps its old states until its next push, which sees the other generation and makes new
            # ones.
            generation += 1
            store.structures.clear()
        record = msgspec.structs.replace(store.record, optimizer=request.optimizer, generation=generation)
        self._set_record(store, record)
        store.optimizer = optimizer
        self._send(rank, m.RequestDone(request.sequence))

    # -- pushes and pulls ---------------------------------------------------------------------------------------------

    def _access(self, store: _Store, rank: int, request: m.Push | m.Pull) -> None:
        if request.key not in store.memory.blocks:
            self._fail(rank, request.sequence, f"this server has no key {request.key!r}")
        elif isinstance(request, m.Push):
            self._push(store, rank, request)
        else:
            self._pull(store, rank, request)

    def _pull(self, store: _Store, rank: int, request: m.Pull) -> None:
        slot, arena = store.memory.blocks[request.key].current, self._workers[rank].arena
        dtype = element_type(request.dtype)
        start = request.offset
        value: Array = slot.value
        if request.rows >= 0:
            numbers = arena.array(start, np.dtype(np.int64), (request.rows,))
            if value.ndim == 0:
                raise ProtocolError(f"key {request.key!r} has no rows")
            if request.rows and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(value):
                raise ProtocolError(f"rows of key {request.key!r} are out of range")
            start += numbers.nbytes
            value = value[numbers]
        out = arena.array(start, dtype, value.shape)
        with np.errstate(invalid="ignore", over="ignore"):  # as C casts
            np.copyto(out, value, casting="unsafe")
        if arena.remote:
            data = out.tobytes()
            for first in range(0, len(data), TRANSFER_BYTES):
                self._send(rank, m.Data(start + first, data[first : first + TRANSFER_BYTES]))
        self._send(rank, m.RequestDone(request.sequence, int(slot.head[0])))

    def _push(self, store: _Store, rank: int, push: m.Push) -> None:
        """Apply a push and answer it, unless it was applied before: then the first answer was lost with the connection."""
        slot, index = store.memory.blocks[push.key].current, store.record.workers.index(rank)
        # First: a push that was applied must not fail when it is repeated, whatever has changed since.
        if push.sequence <= int(slot.applied[index]):
            self._send(rank, m.RequestDone(push.sequence, int(slot.head[0])))
            return
        if rank not in store.participants():
            self._readmit(store, rank, restarted=False)  # it was only cut off
        if store.optimizer is None:
            self._fail(rank, push.sequence, "a dist_async store needs an optimizer: call set_optimizer")
            return
        # Read now: `_apply()` can put another block in place of the one that this slot belongs to.
        before = int(slot.head[0])
        self._apply(store, store.optimizer, rank, push)  # should it raise, the value is as before
        self._send(rank, m.RequestDone(push.sequence, before + 1, max(0, before - push.seen)))

    def _gradient(self, optimizer: Optimizer, block: Block, rank: int, push: m.Push) -> Array | RowSparse:
        found = self._pushed(block, rank, push)
        if not optimizer.multi_precision:
            return found
        if isinstance(found, RowSparse):
            return RowSparse(found.data.astype(np.float32), found.indices, found.shape)
        return found.astype(np.float32, copy=False)

    def _pushed(self, block: Block, rank: int, push: m.Push) -> Array | RowSparse:
        arena, dtype, shape = self._workers[rank].arena, element_type(push.dtype), block.record.shape
        if push.rows < 0:
            return arena.array(push.offset, dtype, shape)
        if not shape:
            raise ProtocolError(f"key {push.key!r} has no rows")
        numbers = arena.array(push.offset, np.dtype(np.int64), (push.rows,))
        data = arena.array(push.offset + numbers.nbytes, dtype, (push.rows, *shape[1:]))
        try:
            return RowSparse(data, numbers, shape)
        except ValueError as error:
            raise ProtocolError(f"rows of key {push.key!r}: {error}") from error

    def _apply(self, store: _Store, optimizer: Optimizer, rank: int, push: m.Push) -> None:
        block = store.memory.blocks[push.key]
        gradient = self._gradient(optimizer, block, rank, push)
        if int(block.current.head[1]) != store.record.generation:
            block = self._make_block(store, push.key, block.current.value.copy(), block.current)
        new = block.other
        # Into the slot that does not count: an optimizer that raises, or ends the server, halfway through its update leaves the value
        # whole.
        block.current.copy_to(new)
        counts = optimizer._index_update_count
        # From the slot, not from the optimizer's own table: that of a restarted server is empty, and it also counts an update that
        # raised.
        counts[push.key] = int(new.head[2])
        state = self._state(store, push.key, new.value, new.states)
        _update(optimizer, push.key, new.value, gradient, state)
        new.head[2] = counts[push.key]
        new.applied[store.record.workers.index(rank)] = push.sequence
        # Value, states, counts and sequence number are all in the other slot: they count together, from here on.
        block.commit()

    def _state(self, store: _Store, key: Key, value: Array, arrays: Sequence[Array]) -> Any:
        """Return the optimizer's state of a key, with these arrays in it."""
        assert store.optimizer is not None
        if key not in store.structures:  # the server before this one made it
            store.structures[key] = _new_state(store.optimizer, key, value)
        return _with_arrays(store.structures[key], iter(arrays))


class _Unavailable(Optimizer):
    """Optimizer in place of one that can't be made here: every push is refused, and values and states stay as they are."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def create_state(self, index: Key, weight: Array) -> State:
        raise KVStoreError(self._text)

    def update(self, index: Key, weight: Array, grad: Gradient, state: State) -> None:
        raise KVStoreError(self._text)


def _usable(spec: OptimizerSpec) -> Optimizer:
    """Return an optimizer as it was on its worker. Raises ``KVStoreError`` if it is not here, or has counts that are none."""
    optimizer = restored(spec)
    for name in ("begin_num_update", "num_update"):
        count = getattr(optimizer, name, None)
        if not isinstance(count, int) or not 0 <= count <= _MOST_COUNTED:
            raise KVStoreError(
                f"{name} of the optimizer is {count!r}: a number of updates from 0 on is needed"
            )
    return optimizer


def _new_state(optimizer: Optimizer, index: Key, value: Array) -> Any:
    try:
        return optimizer.create_state(index, value)
    except _RAISED as error:
        raise _optimizer_error(error) from error


def _update(optimizer: Optimizer, index: Key, value: Array, gradient: Gradient, state: State) -> None:
    try:
        optimizer.update(index, value, gradient, state)
    except _RAISED as error:
        raise _optimizer_error(error) from error


def _optimizer_error(error: BaseException) -> KVStoreError:
    if isinstance(error, KVStoreError):
        return error
    return KVStoreError(f"the optimizer raised {_text_of(error)}")


def _text_of(error: BaseException) -> str:
    """Return the text to send of an exception: one of ours as it is, of any other its class with the text."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  (a class of the user's may have any __str__)
        text = "(its text can't be had)"
    if not isinstance(error, HvdlabError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    # Lone surrogates, as in names of files, can't be sent.
    return text[:_LONGEST_TEXT].encode(errors="replace").decode()


def _arrays_of(state: Any) -> Iterator[Array]:
    if isinstance(state, np.ndarray):
        yield state
    elif isinstance(state, tuple | list):
        for item in state:
            yield from _arrays_of(item)


def _with_arrays(state: Any, arrays: Iterator[Array]) -> Any:
    if isinstance(state, np.ndarray):
        return next(arrays)
    return tuple(_with_arrays(item, arrays) for item in state) if isinstance(state, tuple | list) else None
