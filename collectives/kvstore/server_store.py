"""Stores whose values are on parameter servers: ``dist_async``."""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.collectives import context
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.errors import AbortedError, Cause, CauseKind, KVStoreError, Pending
from hvdlab.collectives.kvstore.arrays import (
    NUMPY,
    Array,
    ArrayType,
    RowSparse,
    add_up,
    add_up_rows,
    array_type_of,
    checked_rows,
    view_of,
    write,
)
from hvdlab.collectives.kvstore.base import Key, pairs
from hvdlab.collectives.kvstore.local_store import KVStore, ServerInfo, UserUpdater, Value, row_ids_of
from hvdlab.collectives.kvstore.optimizer_state import OptimizerSpec
from hvdlab.collectives.kvstore.optimizers import Optimizer, Updater, create, portable, restored
from hvdlab.collectives.kvstore.servers import messages as m
from hvdlab.collectives.kvstore.servers.connection import Answer, ServerLink, ServerRequest
from hvdlab.collectives.kvstore.servers.discovery import servers_of
from hvdlab.collectives.kvstore.servers.spans import RequestSpan, StoreSpans
from hvdlab.collectives.kvstore.workers import Workers, joined, wait_for_handles
from hvdlab.collectives.process_sets import ProcessSet
from hvdlab.collectives.types import OpKind

_WAITED_SECONDS = 0.01
"""Seconds from which on a pull counts as having waited for a busy server, which is recorded."""

_INT64: np.dtype[Any] = np.dtype(np.int64)


ShardPlace = tuple[int, int, int, tuple[int, ...]]
"""A shard as it travels to another worker: number of the server, begin, end, and shape."""


@dataclass(slots=True)
class KeyShard:
    """Range of a key that one server has: elements of the flat value, or rows of a row-sparse one.

    Attributes:
        server: Number of the server.
        link: The connection to the server.
        start, stop: First element, or row, of the shard, and the one behind its last.
        shape: Shape of this shard.
        pushed: Pushes whose answer this worker has not read.
        seen: Version of the value that this worker pulled last, plus its pushes since.
    """

    server: int
    link: ServerLink
    start: int
    stop: int
    shape: tuple[int, ...]
    pushed: deque[ServerRequest] = field(default_factory=deque)
    seen: int = 0


def _as_mxnet(
    key: Key, shape: tuple[int, ...], links: Sequence[ServerLink], bound: int, *, by_rows: bool
) -> list[KeyShard]:
    """Return the shards as MXNet places a key: the whole on one server, or equal parts on all servers if it is large.

    Args:
        key, shape: The key, and the shape of its value.
        links: The connections to all servers, in the same order on all workers.
        bound: Number of elements from which on a key is divided among all servers.
        by_rows: Divide it into whole rows; otherwise into the elements of the flat value.
    """
    n, size = len(links), int(np.prod(shape, dtype=np.int64))
    whole = shape[0] if by_rows else size
    if size < bound or n == 1 or not shape:
        server = (key * 9973 if isinstance(key, int) else zlib.crc32(key.encode())) % n
        return [KeyShard(server, links[server], 0, whole, shape)]
    ends = [int(np.floor(whole / n * i + 0.5)) for i in range(n + 1)]
    rest = shape[1:] if by_rows else ()
    return [
        KeyShard(server, link, start, stop, (stop - start, *rest))
        for server, (link, start, stop) in enumerate(zip(links, ends, ends[1:], strict=False))
    ]


_Pulled = tuple[KeyShard, ServerRequest]
"""A pull on its way."""


class ServerStore(KVStore):
    """Store of values on parameter servers, one process on each host by default. Made by ``create``.

    Making one is collective: every worker makes its stores in the same order.

    Args:
        name: The value of ``type``.
        on_devices: Add the arrays of one worker from left to right; otherwise by groups of four.
        process_set: The process set whose ranks are the workers; ``None`` for all ranks.
    """

    def __init__(self, name: str, *, on_devices: bool, process_set: ProcessSet | None = None) -> None:
        super().__init__(name, on_devices=on_devices)
        engine = joined()
        self._workers = Workers(process_set)
        servers = servers_of(engine)
        self._id, number = self._workers.largest([secrets.randbits(62), servers.stores], "kv.create")
        servers.stores = number + 1
        #: Links to all servers; and the workers' ranks in the world, each with the key of its host.
        self._links, self._hosts = servers.find(self._workers)
        #: Number of stores on servers that the workers had made before.
        self._number = number
        self._multi_precision = False
        self._begin(engine)
        self._open(first=True)
        self.barrier()

    def _begin(self, engine: Engine) -> None:
        """Set the attributes that belong to this process alone."""
        #: Records pushes and pulls; ``None`` if nothing is recorded.
        self._spans = None
        if engine.settings.record:
            # Stores of several process sets may have the same number.
            self._spans = StoreSpans(engine, self._workers.id << 10 | self._number, len(self._links))
        self._bigarray_bound = engine.settings.kv_bigarray_bound
        #: The shards of each key.
        self._shards: dict[Key, list[KeyShard]] = {}
        self._record = engine.metric if engine.settings.record else None

    def _open(self, *, first: bool) -> None:
        """Open the store at all servers; the ``first`` time one worker of each host makes the memory."""
        rank, ranks = context.engine("kvstore").rank, tuple(rank for rank, _ in self._hosts)
        message = functools.partial(m.OpenStore, store=self._id, workers=ranks)
        opened = []
        for link in self._links:
            makes = min((rank for rank, host in self._hosts if host == link.address.host), default=-1)
            used = link.open_store(self._id, makes_memory=first and rank == makes, message=message)
            opened.append((link, used))
        # Only after all servers were asked: an opening waits until a worker of the server's host has brought the memory, and that
        # worker can wait for another server meanwhile.
        for link, request in opened:
            answer = link.wait(request)
            if isinstance(answer, m.RequestFailed) and answer.ranks:
                cause = Cause(CauseKind.RANK_DIED, answer.ranks, answer.text)
                raise AbortedError(Pending("create", f"kv.{self._id}", (rank,), answer.ranks), cause)
            self._checked(None, answer)
        for link in self._links:
            # At the end of the process the connection ends.
            weakref.finalize(self, link.close_store, self._id).atexit = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a restarted worker, which takes part from then on; the values are on the servers.

        Raises:
            KVStoreError: A push of this worker is on its way, or a server is lost.
        """
        with self._unused():
            for link in self._links:
                link.receive_answers()
            waiting = (
                key
                for key, shards in self._shards.items()
                for shard in shards
                for one in shard.pushed
                if one.answer is None
            )
            for key in waiting:
                raise KVStoreError(f"a push of key {key!r} is on its way: pull it first", key)
            kinds = {
                key: (value.dtype.str, tuple(value.shape), isinstance(value, RowSparse))
                for key, value in self._values.items()
            }
            places = {
                key: [(shard.server, shard.start, shard.stop, shard.shape) for shard in shards]
                for key, shards in self._shards.items()
            }
            return {
                "settings": self._settings(),
                "workers": self._workers,
                "numbers": (self._id, self._number),
                "hosts": self._hosts,
                "multi_precision": self._multi_precision,
                "kinds": kinds,
                "parts": places,
                # Places have secrets, which the data plane must not carry; the coordinator may.
                "left": servers_of(context.engine("kvstore")).publish_addresses(self._links),
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._unpickled = state
        if context.is_initialized():
            self._join()

    def __getattr__(self, name: str) -> Any:
        """Let a store that was unpickled before this process had joined the world take part at its first use."""
        # pickle and copy ask any object for special methods, which must not let a store join the world.
        if "_unpickled" not in vars(self) or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._join()
        return getattr(self, name)

    def _join(self) -> None:
        # Removed first: `_restore()` reads attributes, and each that is still missing would lead through `__getattr__()` to this
        # method again.
        state = vars(self).pop("_unpickled")
        try:
            self._restore(joined(), state)
        except BaseException:
            self._unpickled = state
            raise

    def _restore(self, engine: Engine, state: dict[str, Any]) -> None:
        self._restore_settings(state["settings"])
        self._workers, self._hosts = state["workers"], state["hosts"]
        self._id, self._number = state["numbers"]
        self._multi_precision = state["multi_precision"]
        servers = servers_of(engine)
        servers.stores = max(servers.stores, self._number + 1)
        self._links = servers.find_published(state["left"])
        self._begin(engine)
        places: dict[Key, list[ShardPlace]] = state["parts"]
        for key, shards in places.items():
            self._shards[key] = [
                KeyShard(server, self._links[server], start, stop, shape)
                for server, start, stop, shape in shards
            ]
        self._open(first=False)
        for key, (dtype, shape, sparse) in state["kinds"].items():
            self._values[key] = _nothing(np.dtype(dtype), shape, sparse=sparse)
            for shard in self._shards[key]:
                shard.link.record_key(
                    self._id, key, np.dtype(dtype).itemsize * int(np.prod(shard.shape, dtype=np.int64))
                )

    # -- values -------------------------------------------------------------------------------------------------------

    def init(self, key: Any, value: Any) -> None:
        """Give keys rank 0's values. Every worker calls it, and it returns when all have.

        Args:
            key: An int or a str, or a list of one kind of these, not initialised yet.
            value: An array, or for a list of keys a list of arrays; of the same shapes and types on all workers.

        Raises:
            AssertionError, TypeError, ValueError: A key or value is none.
            KVStoreError: A key was initialised before, is of the other kind than the store's keys, or has another shape or
                type on another worker, or a server refuses it, as where the optimizer's ``create_state`` raises (raised on all
                workers; the keys are not initialised then); or a server is lost.
            AbortedError: A worker died, failed, left or was interrupted.
        """
        with self._lock:
            found = pairs(key, value)
            self._check_kind(found)
            own: dict[Key, Array] = {}
            for one, given in found:
                if one in self._values or one in own:
                    raise KVStoreError(f"duplicate init of key {one}", one)
                own[one] = given.todense() if isinstance(given, RowSparse) else view_of(given).copy(order="C")
            wait_for_handles(
                [
                    (one, self._workers.submit_broadcast(array, self._name_of(one)))
                    for one, array in own.items()
                ]
            )
            new: dict[Key, tuple[Value, ArrayType]] = {}
            requests = []
            for one, given in found:
                array, sparse = own[one], isinstance(given, RowSparse)
                shards = _as_mxnet(one, array.shape, self._links, self._bigarray_bound, by_rows=sparse)
                self._shards[one] = shards
                if self._workers.rank == 0:
                    requests += [
                        (one, shard.link, self._send_first_value(one, shard, array, sparse))
                        for shard in shards
                    ]
                nothing = _nothing(array.dtype, array.shape, sparse=sparse)
                new[one] = (nothing, NUMPY if sparse else array_type_of(given) or NUMPY)
            refused: KVStoreError | None = None
            for one, link, request in requests:
                try:
                    self._checked(one, link.wait(request))
                except KVStoreError as error:
                    refused = refused or error
            # The first worker alone has sent requests: the others learn here whether the keys exist.
            text = self._workers.broadcast_text(
                "" if refused is None else str(refused), f"kv.{self._id}.init"
            )
            if refused is not None or text:
                raise refused or KVStoreError(text)
            for one, array in own.items():
                for shard in self._shards[one]:
                    nbytes = array.dtype.itemsize * int(np.prod(shard.shape, dtype=np.int64))
                    shard.link.record_key(self._id, one, nbytes)
            self._add(new)
            self.barrier()

    def _send_first_value(self, key: Key, shard: KeyShard, array: Array, by_rows: bool) -> ServerRequest:
        given = array[shard.start : shard.stop] if by_rows else array.reshape(-1)[shard.start : shard.stop]
        region = shard.link.allocate(given.nbytes)
        np.copyto(shard.link.array(region, given.dtype, given.shape), given)
        name, offset = array.dtype.str[1:], region.offset
        return shard.link.request(
            lambda sequence: m.Init(sequence, self._id, key, shard.shape, name, offset),
            region,
            given.nbytes,
        )

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Sum arrays over this worker's devices and send the sums to the servers.

        Returns at once; the values may be overwritten afterwards.

        Args:
            key: An int or a str, or a list of one kind of these; the same key several times counts as one list.
            value: An array or a list of arrays of the key's shape; for a list of keys a list of such.
            priority: Accepted for programs that give it. All work is done in the order in which it was asked for.

        Raises:
            AssertionError, TypeError, ValueError: A key or value is none.
            KVStoreError: A key was not initialised, a value has another shape than the stored one, there is no optimizer, or a server
                is lost. The refusal of a server is raised by the next pull of the key.
        """
        with self._lock:
            self._push(pairs(key, value))

    def _push(self, found: list[tuple[Key, Any]]) -> None:
        if self._updater is None:
            raise KVStoreError(
                f"a {self.type} store applies pushes by an optimizer: call set_optimizer first"
            )
        for key, total in self._sums(found).items():
            if isinstance(total, RowSparse) and not isinstance(self._values[key], RowSparse):
                total = _as_elements(total) if len(self._shards[key]) > 1 else total
            for shard in self._shards[key]:
                self._send(key, shard, total)

    def _span(
        self, kind: OpKind, key: Key, shard: KeyShard, dtype: np.dtype[Any], nbytes: int
    ) -> RequestSpan | None:
        return None if self._spans is None else self._spans.begin(kind, key, shard.server, dtype, nbytes)

    def _send(self, key: Key, shard: KeyShard, total: Value) -> None:
        self._pop_answered_pushes(shard)
        if isinstance(total, RowSparse):
            inside = (total.indices >= shard.start) & (total.indices < shard.stop)
            numbers, data = total.indices[inside] - shard.start, total.data[inside]
            rows, nbytes = len(numbers), numbers.nbytes + data.nbytes
            span = self._span(OpKind.PUSH, key, shard, data.dtype, nbytes)
            region = shard.link.allocate(nbytes)
            np.copyto(shard.link.array(region, _INT64, numbers.shape), numbers)
            np.copyto(shard.link.array(region, data.dtype, data.shape, numbers.nbytes), data)
        else:
            data = total if len(self._shards[key]) == 1 else total.reshape(-1)[shard.start : shard.stop]
            rows, nbytes = -1, data.nbytes
            span = self._span(OpKind.PUSH, key, shard, data.dtype, nbytes)
            region = shard.link.allocate(nbytes)
            np.copyto(shard.link.array(region, data.dtype, data.shape), data)
        name, offset, seen = data.dtype.str[1:], region.offset, shard.seen
        request = shard.link.request(
            lambda sequence: m.Push(sequence, self._id, key, name, offset, seen, rows),
            region,
            nbytes,
            span=span,
        )
        shard.pushed.append(request)
        # This worker's own push does not make the value older that it has.
        shard.seen += 1

    def _pop_answered_pushes(self, shard: KeyShard) -> None:
        """Record the staleness of answered pushes; a failed one stays in the queue, for the next pull to raise its error."""
        pushed = shard.pushed
        while pushed and isinstance(answer := pushed[0].answer, m.RequestDone):
            pushed.popleft()
            if self._record is not None:
                self._record("kv.staleness", answer.staleness)

    def _sum(self, key: Key, arrays: Sequence[Any]) -> Value:
        """Sum over this worker's devices, then compress: a worker has one residual for each key."""
        if isinstance(arrays[0], RowSparse):
            return add_up_rows(arrays)
        if len(arrays) == 1 and self._compression is None:
            only: Array = arrays[0]
            return only  # it is copied to the arena next
        total = self._buffer(key, arrays[0])
        add_up(arrays, total, on_devices=self._on_devices)
        self._spare[key] = total
        return total if self._compression is None else self._quantized(key, 0, total)

    def _check_arrays(self, key: Key, arrays: Sequence[Value]) -> None:
        super()._check_arrays(key, arrays)
        sparse, stored = isinstance(arrays[0], RowSparse), isinstance(self._values[key], RowSparse)
        if sparse != stored and (stored or self._updater is None):
            kinds = "row-sparse" if stored else "dense", "row-sparse" if sparse else "dense"
            raise KVStoreError(f"key {key!r} is {kinds[0]}, but was given a {kinds[1]} array", key)

    def _accepts_gradient(self, weight: np.dtype[Any], gradient: np.dtype[Any]) -> bool:
        return self._multi_precision or weight == gradient

    def _write(self, found: list[tuple[Key, Any]], ignore_sparse: bool) -> None:
        if not ignore_sparse:
            raise KVStoreError(f"a {self.type} store pulls dense values only: use row_sparse_pull")
        self._check_outputs(found, self._values)
        wanted: dict[Key, list[Any]] = {}
        for key, target in found:
            if isinstance(target, RowSparse):
                self._warn_sparse(key)
            else:
                wanted.setdefault(key, []).append(target)
        by_rows = {key: wanted.pop(key) for key in tuple(wanted) if isinstance(self._values[key], RowSparse)}
        self._pull_dense(wanted)
        for key, targets in by_rows.items():
            # Servers give the rows of a row-sparse value by number, and have all of them.
            value = self._pull_rows(key, np.arange(self._values[key].shape[0], dtype=np.int64))
            for target in targets:
                write(target, value)

    def _pull_dense(self, wanted: dict[Key, list[Any]]) -> None:
        # All requests before the first wait, so that several servers work at a time.
        pulls = {key: [self._request_pull(key, shard) for shard in self._shards[key]] for key in wanted}
        try:
            for key, waiting in pulls.items():
                for shard, request in waiting:
                    self._finish_pull(key, shard, request)
            for key, targets in wanted.items():
                self._copy(key, pulls[key], targets)
        finally:
            for waiting in pulls.values():
                for shard, request in waiting:
                    self._free(shard, request)

    def _request_pull(self, key: Key, shard: KeyShard) -> _Pulled:
        dtype = self._values[key].dtype
        nbytes = dtype.itemsize * int(np.prod(shard.shape, dtype=np.int64))
        span = self._span(OpKind.PULL, key, shard, dtype, nbytes)
        region = shard.link.allocate(nbytes)
        name, offset = dtype.str[1:], region.offset
        request = shard.link.request(
            lambda sequence: m.Pull(sequence, self._id, key, name, offset),
            region,
            keeps=True,
            span=span,
        )
        return shard, request

    def _finish_pull(self, key: Key, shard: KeyShard, request: ServerRequest) -> None:
        """Wait for a pull; pushes of this worker were answered before."""
        begun = time.monotonic()
        answer = shard.link.wait(request)
        waited = time.monotonic() - begun
        if waited > _WAITED_SECONDS and self._record is not None:
            self._record("kv.wait", waited)
        self._pop_answered_pushes(shard)
        failed = [request.answer for request in shard.pushed if isinstance(request.answer, m.RequestFailed)]
        if failed:
            shard.pushed = deque(request for request in shard.pushed if request.answer is None)
            self._checked(key, failed[0])
        done = self._checked(key, answer)
        assert isinstance(done, m.RequestDone)
        # Pushes without an answer are this worker's own: they do not make its value older.
        shard.seen = done.version + len(shard.pushed)

    def _copy(self, key: Key, pulls: list[_Pulled], targets: list[Any]) -> None:
        stored = self._values[key]
        if len(pulls) == 1:
            shard, request = pulls[0]
            assert request.region is not None
            value = shard.link.array(request.region, stored.dtype, stored.shape)
        else:
            value = np.empty(stored.shape, stored.dtype)
            for shard, request in pulls:
                assert request.region is not None
                value.reshape(-1)[shard.start : shard.stop] = shard.link.array(
                    request.region, stored.dtype, shard.shape
                )
        for target in targets:
            write(target, value)

    @staticmethod
    def _free(shard: KeyShard, request: ServerRequest) -> None:
        # If the wait was interrupted, the server still writes to this region later; then the answer frees it.
        if request.answer is None:
            request.keeps = False
        elif request.region is not None:
            shard.link.free(request.region)

    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """Copy some rows of row-sparse values, after this worker's pushes of them; see :meth:`KVStore.row_sparse_pull`."""
        if out is None or row_ids is None:
            raise AssertionError("row_sparse_pull needs out and row_ids")
        with self._lock:
            found = pairs(key, out)
            self._check_known(found)
            wanted = row_ids_of(key, row_ids, found)
            numbers = []
            for (one, target), rows in zip(found, wanted, strict=True):
                self._check_sparse(one, target)
                try:
                    numbers.append(np.unique(checked_rows(rows, self._values[one].shape[0])))
                except ValueError as error:
                    raise KVStoreError(f"row_sparse_pull of key {one!r}: {error}", one) from None
            for (one, target), rows in zip(found, numbers, strict=True):
                target.replace(rows, self._pull_rows(one, rows))

    def _pull_rows(self, key: Key, rows: npt.NDArray[np.int64]) -> Array:
        stored = self._values[key]
        data = np.empty((len(rows), *stored.shape[1:]), stored.dtype)
        row_bytes = stored.dtype.itemsize * int(np.prod(stored.shape[1:], dtype=np.int64))
        for shard in self._shards[key]:
            inside = np.flatnonzero((rows >= shard.start) & (rows < shard.stop))
            numbers = rows[inside] - shard.start
            span = self._span(OpKind.PULL, key, shard, stored.dtype, row_bytes * len(numbers))
            region = shard.link.allocate(numbers.nbytes + row_bytes * len(numbers))
            np.copyto(shard.link.array(region, _INT64, numbers.shape), numbers)
            message = functools.partial(
                m.Pull,
                store=self._id,
                key=key,
                dtype=stored.dtype.str[1:],
                offset=region.offset,
                rows=len(numbers),
            )
            request = shard.link.request(message, region, numbers.nbytes, keeps=True, span=span)
            try:
                self._finish_pull(key, shard, request)
                data[inside] = shard.link.array(
                    region, stored.dtype, (len(numbers), *stored.shape[1:]), numbers.nbytes
                )
            finally:
                self._free(shard, request)
        return data

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Push, then pull; for dense arrays.

        Args:
            key, value, out, priority: As in :meth:`KVStore.pushpull`.

        Raises:
            AssertionError, TypeError, ValueError: A key, value or output is none.
            KVStoreError: As :meth:`push` and :meth:`pull` do; or an array is row-sparse.
        """
        found = pairs(key, value)
        targets = found if out is None else pairs(key, out)
        for one, array in (*found, *targets):
            if isinstance(array, RowSparse):
                raise KVStoreError(f"key {one!r}: use push and row_sparse_pull for row-sparse arrays", one)
        with self._lock:
            self._check_known(targets)
            self._check_outputs(targets, self._values)
            with contextlib.ExitStack() as links:
                for link in self._links:
                    links.enter_context(link.batched())
                self._push(found)
                self._write(targets, ignore_sparse=True)

    # -- updates by an optimizer --------------------------------------------------------------------------------------

    def set_optimizer(self, optimizer: Any) -> None:
        """Let this optimizer update the stored values from the pushed gradients, on the servers. Every worker calls it with the same arguments.

        The optimizer travels as its name and its numbers, never as code, and so does its scheduler of the learning rate. Later changes
        of it have no effect here: use :meth:`set_learning_rate`.

        Args:
            optimizer: An optimizer of :mod:`hvdlab.kvstore`'s ``optimizer``, or one that a module of ``HVDLAB_KV_OPTIMIZERS`` has
                registered; or its name.

        Raises:
            TypeError: It is neither.
            ValueError: There is no optimizer of this name.
            KVStoreError: It, or its scheduler of the learning rate, is of a class that servers don't have; or a server could not import it.
        """
        found = create(optimizer) if isinstance(optimizer, str) else optimizer
        if not isinstance(found, Optimizer):
            if callable(found):
                raise KVStoreError(
                    f"a {self.type} store runs optimizers on its servers, to which functions don't travel: give one of "
                    "hvdlab.kvstore.optimizer, or a subclass that servers import (HVDLAB_KV_OPTIMIZERS), or use a dist_sync store, whose "
                    "workers run functions"
                )
            raise TypeError(f"a {type(found).__name__} is no optimizer and no name of one")
        spec = portable(found, _importable())
        with self._lock:
            failed = ""
            try:
                self._send_optimizer(spec, keeps_states=False)
            except KVStoreError as error:  # at the first worker only
                failed = str(error)
            # The first worker alone has asked the servers, and all raise the refusal.
            failed = self._workers.broadcast_text(failed, f"kv.{self._id}.set_optimizer")
            if failed:
                raise KVStoreError(failed)
            self._multi_precision = found.multi_precision
            # Checks pushes, and has the learning rate; it is not called here.
            self._updater = Updater(restored(spec))
            self.barrier()

    def _send_optimizer(self, spec: OptimizerSpec, *, keeps_states: bool) -> None:
        """Send the optimizer to all servers, if this is the first worker."""
        if self._workers.rank != 0:
            return
        message = functools.partial(m.SetOptimizer, store=self._id, optimizer=spec, keeps_states=keeps_states)
        requests = [(link, link.request(message)) for link in self._links]
        for link, request in requests:
            self._checked(None, link.wait(request))

    def set_learning_rate(self, lr: float) -> None:
        """Change the learning rate on the servers; see :meth:`KVStore.set_learning_rate`. Returns when all workers have called it.

        Args:
            lr: The learning rate, before the keys' factors. Earlier pushes are applied at the old rate, unless they are
                still on their way.

        Raises:
            KVStoreError: The store has no optimizer, or a server is lost.
            UserWarning: The optimizer has a scheduler, which gives the rate.
            AbortedError: A worker died, failed, left or was interrupted.
        """
        with self._lock:
            optimizer = self._running_optimizer()
            optimizer.set_learning_rate(float(lr))
            self.barrier()
            # Between two barriers: all workers have sent their pushes at the old rate before it, and none pushes for the new one
            # before the servers have it.
            self._send_optimizer(portable(optimizer, _importable()), keeps_states=True)
            self.barrier()

    def _set_updater(self, updater: UserUpdater | Updater | None) -> None:
        """Check the argument only: an updater of one process has no part in values that are on servers."""
        self._updater_of(updater)

    def _own_updater(self, verb: str) -> Updater:
        raise AssertionError(f"Cannot {verb} states for distributed training")

    # -- workers and servers ------------------------------------------------------------------------------------------

    @staticmethod
    def _checked(key: Key | None, answer: Answer) -> Answer:
        if isinstance(answer, m.RequestFailed):
            raise KVStoreError(answer.text if key is None else f"key {key!r}: {answer.text}", key)
        return answer

    def barrier(self) -> None:
        """Wait until all workers have called it. It orders calls, not pushes that are still on their way."""
        self._workers.barrier(f"kv.{self._id}")

    def _send_command_to_servers(self, head: int, body: str) -> None:
        """Refuse an optimizer as text (head 0), which is code in MXNet; do nothing for other commands, which are not needed here.

        Raises:
            KVStoreError: ``head`` is 0.
        """
        if head == 0:
            raise KVStoreError(
                "servers take an optimizer by set_optimizer, as its name and numbers, not as text"
            )

    def servers(self) -> list[ServerInfo]:
        """Return the processes that keep the values, with how much of this store each has; without those that are lost."""
        with self._lock:
            asked = [
                (index, link, link.request(functools.partial(m.StockRequest, store=self._id)))
                for index, link in enumerate(self._links)
                if not link.lost
            ]
            infos = []
            for index, link, request in asked:
                answer = self._checked(None, link.wait(request))
                assert isinstance(answer, m.Stock)
                host = link.address.host.partition("#")[0]
                infos.append(ServerInfo(index, host, link.pid, answer.keys, answer.bytes))
            return infos

    @property
    def rank(self) -> int:
        """Return the number of this worker, from 0."""
        return self._workers.rank

    @property
    def local_rank(self) -> int:
        """Return the number of this worker among those of its host, from 0."""
        return self._workers.local_rank

    @property
    def num_workers(self) -> int:
        """Return the number of workers."""
        return self._workers.count

    def _name_of(self, key: Key) -> str:
        return f"kv.{self._id}.{key}"


def _importable() -> tuple[str, ...]:
    """Return the modules that servers have imported."""
    return context.engine("kvstore").settings.kv_optimizers


def _nothing(dtype: np.dtype[Any], shape: tuple[int, ...], *, sparse: bool) -> Value:
    """Return an array that only has the shape and type of a value, which is on the servers."""
    if sparse:
        return RowSparse(np.zeros((0, *shape[1:]), dtype), [], shape)
    empty: Array = np.broadcast_to(np.zeros((), dtype), shape)
    return empty


def _as_elements(rows: RowSparse) -> RowSparse:
    """Return rows as elements of the flat array, into whose shards a large dense value is divided; a row may be in two of them."""
    size = int(np.prod(rows.shape[1:], dtype=np.int64))
    indices = (rows.indices[:, None] * size + np.arange(size)).reshape(-1)
    return RowSparse(rows.data.reshape(-1), indices, (rows.shape[0] * size,))


class KVStoreServer:
    """Server process of MXNet's scripts, which only waits here: servers are processes of their own that start with the first store that
    needs them.

    Args:
        kvstore: A store that has servers.

    Attributes:
        kvstore: The store.
        handle: Always ``None``; there is no handle of MXNet's.
    """

    def __init__(self, kvstore: KVStore) -> None:
        self.kvstore = kvstore
        self.handle = None

    def run(self) -> None:
        """Block until the job is over.

        Raises:
            KVStoreError: The store has no servers.
            NotInitializedError: ``init()`` was not called.
        """
        if not isinstance(self.kvstore, ServerStore):
            raise KVStoreError(f"a {self.kvstore.type} store has no servers")
        over = threading.Event()
        context.engine("KVStoreServer").on_leave(lambda reason: over.set())
        over.wait()
