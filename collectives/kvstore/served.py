"""Stores whose values are on parameter servers: ``dist_async``, and ``dist_sync`` if the servers make its updates."""

from __future__ import annotations

import contextlib
import functools
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hvdlab.collectives import context
from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.errors import AbortedError, Cause, CauseKind, KVStoreError, Pending
from hvdlab.collectives.kvstore.arrays import (
    NUMPY,
    Array,
    ArrayType,
    RowSparse,
    array_type_of,
    checked_rows,
    view_of,
    write,
)
from hvdlab.collectives.kvstore.collectives import Workers, completed, joined
from hvdlab.collectives.kvstore.keys import Key, pairs
from hvdlab.collectives.kvstore.optimizers import Optimizer, Updater, create, portable, restored
from hvdlab.collectives.kvstore.parts import Part, Parts
from hvdlab.collectives.kvstore.servers import messages as m
from hvdlab.collectives.kvstore.servers.finding import servers_of
from hvdlab.collectives.kvstore.servers.link import Answer, ServerLostError, Ticket
from hvdlab.collectives.kvstore.servers.spans import RequestSpan, StoreSpans
from hvdlab.collectives.kvstore.state_format import OptimizerSpec
from hvdlab.collectives.kvstore.store import KVStore, ServerInfo, UserUpdater, Value, row_ids_of
from hvdlab.collectives.kvstore.summing import add_up, add_up_rows
from hvdlab.collectives.logs import LOG
from hvdlab.collectives.process_sets import ProcessSet

_WAITED_SECONDS = 0.01
"""Seconds from which on a pull counts as having waited, for other workers or for a busy server, which is recorded."""

_INT64: np.dtype[Any] = np.dtype(np.int64)


class _Pulled(NamedTuple):
    """A pull on its way."""

    part: Part
    ticket: Ticket


class ServerStore(KVStore):
    """Values on parameter servers, one process on each host by default. Made by ``create``.

    Making one is collective: every worker makes its stores in the same order.

    Args:
        name: The value of ``type``.
        on_devices: Add the arrays of one worker from left to right; else by groups of four.
        synchronous: Whether a round of a key ends when every worker has pushed it; else every push is applied when it comes.
        process_set: The process set whose ranks are the workers; ``None`` for all ranks.
    """

    def __init__(
        self, name: str, *, on_devices: bool, synchronous: bool, process_set: ProcessSet | None = None
    ) -> None:
        super().__init__(name, on_devices=on_devices)
        engine = joined()
        self._workers = Workers(process_set)
        self._synchronous = synchronous
        servers = servers_of(engine)
        self._id, number = self._workers.largest([secrets.randbits(62), servers.stores], "kv.create")
        servers.stores = number + 1
        #: Links to all servers; and the workers' ranks in the world, each with the key of its host.
        self._links, self._hosts = servers.find(self._workers)
        #: How many stores on servers the workers had made before.
        self._number = number
        #: The workers' processes: ranks and process ids.
        self._processes = _present(engine, self._workers.ranks)
        bound = engine.settings.kv_staleness
        self._staleness = -1 if synchronous or bound is None else bound
        self._multi_precision = False
        replicas = engine.settings.kv_replicas
        self._begin(engine, replicas)
        if replicas > self._places.replicas and self._workers.rank == 0:
            LOG.warning(
                "HVDLAB_KV_REPLICAS=%d needs as many further hosts with workers: there are %d",
                replicas,
                self._places.replicas,
            )
        self._open(self._staleness, first=True)
        self.barrier()

    def _begin(self, engine: Engine, replicas: int) -> None:
        """Set the attributes that are this process's own."""
        #: Records pushes and pulls; ``None`` if nothing is recorded.
        self._spans = None
        if engine.settings.record:
            workers = len(self._hosts) if self._synchronous else 1
            # Stores of several process sets may have the same number.
            self._spans = StoreSpans(engine, self._workers.id << 10 | self._number, len(self._links), workers)
        self._places = Parts(self._links, engine.settings.kv_bigarray_bound, replicas)
        self._parts = self._places.by_key
        #: How many epochs this worker knows to have ended, and how many of these by rounds that were given up.
        self._epoch = self._given_up = 0
        #: Whether this worker counts at some server as one that has left the store, and whether a worker has closed it.
        self._left = self._closed = False
        self._cells = _cells_of(engine)
        self._record = engine.metric if engine.settings.record else None

    def _open(self, staleness: int, *, first: bool, again: bool = False) -> None:
        """Open the store at all servers; the ``first`` time one worker of each host makes the memory.

        ``again``: this worker has used it before, and is back.
        """
        rank, ranks = context.engine("kvstore").rank, tuple(rank for rank, _ in self._hosts)
        opened = []
        for link in self._places.links():
            makes = min((rank for rank, host in self._hosts if host == link.place.host), default=-1)
            message = functools.partial(
                m.Open,
                store=self._id,
                workers=ranks,
                synchronous=self._synchronous,
                staleness=staleness,
                again=again,
            )
            used = (
                link.request(message)
                if again
                else link.use(self._id, makes_memory=first and rank == makes, message=message)
            )
            opened.append((link, used))
        for link, ticket in opened:
            self._done(None, link.wait(ticket), "create")
        for link in () if again else self._links:
            weakref.finalize(self, link.close_store, self._id).atexit = False

    def __getstate__(self) -> dict[str, Any]:
        """The state for a worker that was started anew, which takes part from then on; the values are on the servers.

        Raises:
            KVStoreError: A push of this worker is on its way, or a server is lost.
        """
        with self._unused():
            for link in self._links:
                link.take_answers()
            waiting = (
                key
                for key, parts in self._parts.items()
                for part in parts
                for one in part.pushed
                if one.answer is None
            )
            for key in waiting:
                raise KVStoreError(f"a push of key {key!r} is on its way: pull it first", key)
            kinds = {
                key: (value.dtype.str, tuple(value.shape), isinstance(value, RowSparse))
                for key, value in self._values.items()
            }
            return {
                "settings": self._settings(),
                "workers": self._workers,
                "synchronous": self._synchronous,
                "numbers": (self._id, self._number),
                "hosts": self._hosts,
                "processes": self._processes,
                "multi_precision": self._multi_precision,
                "staleness": self._staleness,
                "replicas": self._places.replicas,
                "kinds": kinds,
                "parts": self._places.places(),
                # Places have secrets, which the data plane must not carry; the coordinator may.
                "left": servers_of(context.engine("kvstore")).leave_places(self._links),
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._brought = state
        if context.is_initialized():
            self._take_part()

    def __getattr__(self, name: str) -> Any:
        """Let a store that was unpickled before this process had joined the world take part at its first use."""
        if "_brought" not in vars(self) or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._take_part()
        return getattr(self, name)

    def _take_part(self) -> None:
        state = vars(self).pop("_brought")
        try:
            self._restore(joined(), state)
        except BaseException:
            self._brought = state
            raise

    def _restore(self, engine: Engine, state: dict[str, Any]) -> None:
        self._take_settings(state["settings"])
        self._workers, self._synchronous = state["workers"], state["synchronous"]
        self._id, self._number = state["numbers"]
        self._hosts, self._processes = state["hosts"], state["processes"]
        self._multi_precision, self._staleness = state["multi_precision"], state["staleness"]
        servers = servers_of(engine)
        servers.stores = max(servers.stores, self._number + 1)
        self._links = servers.find_left(state["left"])
        self._begin(engine, state["replicas"])
        self._places.put(state["parts"])
        self._open(self._staleness, first=False)
        for key, (dtype, shape, sparse) in state["kinds"].items():
            self._values[key] = _nothing(np.dtype(dtype), shape, sparse=sparse)
            for part in self._places.kept([key]):
                part.link.has(
                    self._id, key, np.dtype(dtype).itemsize * int(np.prod(part.shape, dtype=np.int64))
                )
        self._ask_epoch()

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
            completed(
                [
                    (one, self._workers.submit_broadcast(array, self._name_of(one)))
                    for one, array in own.items()
                ]
            )
            new: dict[Key, tuple[Value, ArrayType]] = {}
            tickets = []
            for one, given in found:
                array, sparse = own[one], isinstance(given, RowSparse)
                self._places.add(one, array.shape, by_rows=sparse)
                if self._workers.rank == 0:
                    tickets += [
                        (one, part.link, self._first(one, part, array, sparse))
                        for part in self._places.kept([one])
                    ]
                nothing = _nothing(array.dtype, array.shape, sparse=sparse)
                new[one] = (nothing, NUMPY if sparse else array_type_of(given) or NUMPY)
            refused: KVStoreError | None = None
            for one, link, ticket in tickets:
                try:
                    self._done(one, link.wait(ticket), "init")
                except KVStoreError as error:
                    refused = refused or error
            text = self._workers.first_says("" if refused is None else str(refused), f"kv.{self._id}.init")
            if refused is not None or text:
                raise refused or KVStoreError(text)
            for one, array in own.items():
                for part in self._places.kept([one]):
                    nbytes = array.dtype.itemsize * int(np.prod(part.shape, dtype=np.int64))
                    part.link.has(self._id, one, nbytes)
            self._add(new)
            self.barrier()

    def _first(self, key: Key, part: Part, array: Array, by_rows: bool) -> Ticket:
        given = array[part.start : part.stop] if by_rows else array.reshape(-1)[part.start : part.stop]
        region = part.link.allocate(given.nbytes)
        np.copyto(part.link.array(region, given.dtype, given.shape), given)
        name, offset = array.dtype.str[1:], region.offset
        return part.link.request(
            lambda sequence: m.Init(
                sequence, self._id, part.name, part.shape, name, offset, None if part.name == key else key
            ),
            region,
            given.nbytes,
        )

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Sum arrays over this worker's devices and send the sums to the servers.

        Returns at once; the values may be overwritten afterwards.

        Args:
            key: An int or a str, or a list of one kind of these; the same key several times counts as one list.
            value: An array or a list of arrays of the key's shape; for a list of keys a list of such.
            priority: Taken for programs that give it. All work is done in the order in which it was asked for.

        Raises:
            AssertionError, TypeError, ValueError: A key or value is none.
            KVStoreError: A key was not initialised, a value has another shape than the stored one, there is no optimizer (in a
                ``dist_async`` store), or a server is lost. What a server refuses is raised by the next pull of the key.
        """
        with self._lock:
            self._push(pairs(key, value))

    def _begin_cell(self) -> None:
        """At the first push of a cell, or of an attempt of elastic training: let the workers begin with equal rounds.

        Whatever the one before has left is dropped, and a worker that was cut off meanwhile takes part again.
        """
        begun = _cells_of(context.engine("kvstore"))
        if not self._synchronous or begun == self._cells:
            return
        self._ask_epoch()  # a worker that has waited for nothing does not know yet which workers have left, or are back
        # The collectives below wait for all workers that have made the store: only if these take part, in the processes of then.
        if self._processes <= _present(context.engine("kvstore"), self._workers.ranks) and not self._closed:
            self._begin_together()
        self._cells = begun

    def _begin_together(self) -> None:
        """Let all workers begin with equal rounds, also those that count as dead since they were cut off, and are back."""
        name = f"kv.{self._id}.cell"
        left = any(ticket.answer is None for ticket in self._in_flight())
        own = [left, self._given_up, self._epoch, self._left]
        some_left, given_up, epoch, back = self._workers.largest(own, name)
        if some_left:
            given_up, epoch = given_up + 1, epoch + 1
            text = "what was pushed in a cell that did not end well is dropped"
            self._tell_all(m.EndRounds(self._id, given_up, (), CauseKind.WITHDRAWN.value, text))
        self._epoch, self._given_up = epoch, given_up
        for part in self._places.kept(self._parts):
            for ticket in part.pushed:
                part.link.wait(ticket)
            part.pushed.clear()
        if back:
            if self._left:
                self._open(self._staleness, first=False, again=True)
                self._left = False
            self._workers.barrier(name)  # no round may end without those that are back

    def _in_flight(self) -> Iterator[Ticket]:
        for part in self._places.kept(self._parts):
            yield from part.pushed

    def _ask_epoch(self) -> None:
        asked = [
            (link, link.request(functools.partial(m.StockRequest, store=self._id)))
            for link in self._places.links()
        ]
        self._left = self._closed = False
        for link, ticket in asked:
            answer = self._done(None, link.wait(ticket), "push")
            assert isinstance(answer, m.Stock)
            self._epoch = max(self._epoch, answer.epoch)
            self._given_up = max(self._given_up, answer.given_up)
            self._left, self._closed = self._left or answer.left, self._closed or answer.closed

    def _tell_all(self, message: m.EndRounds) -> None:
        for link in self._places.links():
            link.tell(message)

    def _push(self, found: list[tuple[Key, Any]]) -> None:
        self._begin_cell()
        if not self._synchronous and self._updater is None:
            raise KVStoreError(
                f"a {self.type} store applies pushes by an optimizer: call set_optimizer first"
            )
        try:
            sums = self._sums(found)
        except KVStoreError:
            if self._synchronous:
                self._refuse_elsewhere(found)
            raise
        for key, total in sums.items():
            if isinstance(total, RowSparse) and not isinstance(self._values[key], RowSparse):
                total = _as_elements(total) if len(self._parts[key]) > 1 else total
            for part in self._parts[key]:
                self._send_to_all(key, part, total)

    def _send_to_all(self, key: Key, part: Part, total: Value) -> None:
        """Push to the server of a part and to those of its copies; leave out a server that is found to be lost meanwhile."""
        lost: ServerLostError | None = None
        kept = part.kept()
        for one in kept:
            if one is not part:  # the part's own answers say what has become of it
                one.pushed = deque(ticket for ticket in one.pushed if ticket.answer is None)
            try:
                self._send(key, one, total)
            except ServerLostError as error:
                lost = error
        if lost is not None and all(one.link.lost for one in kept):
            raise lost

    def _refuse_elsewhere(self, found: list[tuple[Key, Any]]) -> None:
        """Push what servers refuse, so that the others' round of these keys fails and does not wait for this worker."""
        for key in dict.fromkeys(key for key, _ in found):
            for part in self._places.kept([key]):
                part.link.request(
                    functools.partial(
                        m.Push, store=self._id, key=part.name, dtype="", offset=0, epoch=self._epoch
                    )
                )

    def _span(
        self, kind: OpKind, key: Key, part: Part, dtype: np.dtype[Any], nbytes: int
    ) -> RequestSpan | None:
        return None if self._spans is None else self._spans.begin(kind, key, part.server, dtype, nbytes)

    def _send(self, key: Key, part: Part, total: Value) -> None:
        self._look_at_pushes(part)
        if isinstance(total, RowSparse):
            inside = (total.indices >= part.start) & (total.indices < part.stop)
            numbers, data = total.indices[inside] - part.start, total.data[inside]
            rows, nbytes = len(numbers), numbers.nbytes + data.nbytes
            span = self._span(OpKind.PUSH, key, part, data.dtype, nbytes)
            region = part.link.allocate(nbytes)
            np.copyto(part.link.array(region, _INT64, numbers.shape), numbers)
            np.copyto(part.link.array(region, data.dtype, data.shape, numbers.nbytes), data)
        else:
            data = total if len(self._parts[key]) == 1 else total.reshape(-1)[part.start : part.stop]
            rows, nbytes = -1, data.nbytes
            span = self._span(OpKind.PUSH, key, part, data.dtype, nbytes)
            region = part.link.allocate(nbytes)
            np.copyto(part.link.array(region, data.dtype, data.shape), data)
        name, offset, seen = data.dtype.str[1:], region.offset, part.seen
        ticket = part.link.request(
            lambda sequence: m.Push(sequence, self._id, part.name, name, offset, seen, rows, self._epoch),
            region,
            nbytes,
            span=span,
        )
        part.pushed.append(ticket)
        part.seen += 1

    def _look_at_pushes(self, part: Part) -> None:
        """Record the staleness of answered pushes; a failed one stays in the queue, for the next pull to raise its error."""
        pushed = part.pushed
        while pushed and isinstance(answer := pushed[0].answer, m.Done):
            pushed.popleft()
            part.version = max(part.version, answer.version)
            if not self._synchronous and self._record is not None:
                self._record("kv.staleness", answer.staleness)

    def _sum(self, key: Key, arrays: Sequence[Any]) -> Value:
        """The sum over this worker's devices, then compressed: a worker has one residual for each key."""
        if isinstance(arrays[0], RowSparse):
            return add_up_rows(arrays)
        if len(arrays) == 1 and self._compression is None:
            only: Array = arrays[0]
            return only  # it is copied to the outbox next
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

    def _takes(self, weight: np.dtype[Any], gradient: np.dtype[Any]) -> bool:
        return self._multi_precision or weight == gradient

    def _write(self, found: list[tuple[Key, Any]], ignore_sparse: bool) -> None:
        if not ignore_sparse:
            raise KVStoreError(f"a {self.type} store pulls dense values only: use row_sparse_pull")
        self._check_outputs(found, self._values)
        wanted: dict[Key, list[Any]] = {}
        for key, target in found:
            if isinstance(target, RowSparse):
                self._say_sparse(key)
            else:
                wanted.setdefault(key, []).append(target)
        by_rows = {key: wanted.pop(key) for key in tuple(wanted) if isinstance(self._values[key], RowSparse)}
        while True:
            try:
                self._pull_dense(wanted)
                break
            except ServerLostError:
                if not self._places.fail_over():
                    raise
        for key, targets in by_rows.items():
            # Servers give the rows of a row-sparse value by number, and have all of them.
            value = self._pull_rows_from_any(key, np.arange(self._values[key].shape[0], dtype=np.int64))
            for target in targets:
                write(target, value)

    def _pull_dense(self, wanted: dict[Key, list[Any]]) -> None:
        pulls = {key: [self._ask(key, part) for part in self._parts[key]] for key in wanted}
        try:
            for key, waiting in pulls.items():
                for part, ticket in waiting:
                    self._pulled_part(key, part, ticket)
            for key, targets in wanted.items():
                self._copy(key, pulls[key], targets)
        finally:
            for waiting in pulls.values():
                for part, ticket in waiting:
                    self._free(part, ticket)

    def _ask(self, key: Key, part: Part) -> _Pulled:
        dtype = self._values[key].dtype
        nbytes = dtype.itemsize * int(np.prod(part.shape, dtype=np.int64))
        span = self._span(OpKind.PULL, key, part, dtype, nbytes)
        region = part.link.allocate(nbytes)
        name, offset = dtype.str[1:], region.offset
        ticket = part.link.request(
            lambda sequence: m.Pull(sequence, self._id, part.name, name, offset),
            region,
            keeps=True,
            span=span,
        )
        return _Pulled(part, ticket)

    def _pulled_part(self, key: Key, part: Part, ticket: Ticket) -> None:
        """Wait for a pull; pushes of this worker were answered before."""
        begun = time.monotonic()
        answer = part.link.wait(ticket)
        waited = time.monotonic() - begun
        if waited > _WAITED_SECONDS and self._record is not None:
            self._record("kv.wait", waited)
        self._look_at_pushes(part)
        failed = [ticket.answer for ticket in part.pushed if isinstance(ticket.answer, m.Failed)]
        if failed:
            part.pushed = deque(ticket for ticket in part.pushed if ticket.answer is None)
            for one in failed:
                if not one.ranks or one.epoch > self._epoch:  # else another key's error has said it
                    self._done(key, one, "push")
        done = self._done(key, answer, "pull")
        assert isinstance(done, m.Done)
        if (
            self._synchronous and done.version < part.expected
        ):  # else others' pushes may still be on their way
            LOG.warning(
                "the copy of key %r lacks %d updates that the lost server had made",
                key,
                part.expected - done.version,
            )
        part.seen, part.version, part.expected = done.version + len(part.pushed), done.version, -1

    def _copy(self, key: Key, pulls: list[_Pulled], targets: list[Any]) -> None:
        stored = self._values[key]
        if len(pulls) == 1:
            part, ticket = pulls[0]
            assert ticket.region is not None
            value = part.link.array(ticket.region, stored.dtype, stored.shape)
        else:
            value = np.empty(stored.shape, stored.dtype)
            for part, ticket in pulls:
                assert ticket.region is not None
                value.reshape(-1)[part.start : part.stop] = part.link.array(
                    ticket.region, stored.dtype, part.shape
                )
        for target in targets:
            write(target, value)

    @staticmethod
    def _free(part: Part, ticket: Ticket) -> None:
        # If the wait was interrupted, the server still writes to this region later; then the answer frees it.
        if ticket.answer is None:
            ticket.keeps = False
        elif ticket.region is not None:
            part.link.free(ticket.region)

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
                target.replace(rows, self._pull_rows_from_any(one, rows))

    def _pull_rows_from_any(self, key: Key, rows: npt.NDArray[np.int64]) -> Array:
        while True:
            try:
                return self._pull_rows(key, rows)
            except ServerLostError:
                if not self._places.fail_over():
                    raise

    def _pull_rows(self, key: Key, rows: npt.NDArray[np.int64]) -> Array:
        stored = self._values[key]
        data = np.empty((len(rows), *stored.shape[1:]), stored.dtype)
        row_bytes = stored.dtype.itemsize * int(np.prod(stored.shape[1:], dtype=np.int64))
        for part in self._parts[key]:
            inside = np.flatnonzero((rows >= part.start) & (rows < part.stop))
            numbers = rows[inside] - part.start
            span = self._span(OpKind.PULL, key, part, stored.dtype, row_bytes * len(numbers))
            region = part.link.allocate(numbers.nbytes + row_bytes * len(numbers))
            np.copyto(part.link.array(region, _INT64, numbers.shape), numbers)
            message = functools.partial(
                m.Pull,
                store=self._id,
                key=part.name,
                dtype=stored.dtype.str[1:],
                offset=region.offset,
                rows=len(numbers),
            )
            ticket = part.link.request(message, region, numbers.nbytes, keeps=True, span=span)
            try:
                self._pulled_part(key, part, ticket)
                data[inside] = part.link.array(
                    region, stored.dtype, (len(numbers), *stored.shape[1:]), numbers.nbytes
                )
            finally:
                self._free(part, ticket)
        return data

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Push, then pull; for dense arrays.

        Args:
            key, value, out, priority: As in :meth:`KVStore.pushpull`.

        Raises:
            AssertionError, TypeError, ValueError: A key, value or output is none.
            KVStoreError: As :meth:`push` and :meth:`pull` do; or an array is row-sparse.
            AbortedError: A worker that this one waited for has died.
        """
        found = pairs(key, value)
        targets = found if out is None else pairs(key, out)
        for one, array in (*found, *targets):
            if isinstance(array, RowSparse):
                raise KVStoreError(f"key {one!r}: use push and row_sparse_pull for row-sparse arrays", one)
        with self._lock:
            try:
                self._check_known(targets)
                self._check_outputs(targets, self._values)
            except KVStoreError:
                if self._synchronous:
                    self._refuse_elsewhere(found)
                raise
            with contextlib.ExitStack() as links:
                for link in self._places.links():
                    links.enter_context(link.together())
                self._push(found)
                self._write(targets, ignore_sparse=True)

    # -- what happens to what is pushed -------------------------------------------------------------------------------

    def set_optimizer(self, optimizer: Any) -> None:
        """Update the stored values by what is pushed, on the servers. Every worker calls it with the same arguments.

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
            except KVStoreError as error:  # only the first worker knows
                failed = str(error)
            failed = self._workers.first_says(failed, f"kv.{self._id}.set_optimizer")
            if failed:
                raise KVStoreError(failed)
            self._multi_precision = found.multi_precision
            # Says what may be pushed, and how the learning rate is given; it is not called here.
            self._updater = Updater(restored(spec))
            self.barrier()

    def _send_optimizer(self, spec: OptimizerSpec, *, keeps_states: bool) -> None:
        """Let all servers use it, if this is the worker that says so."""
        if self._workers.rank != 0:
            return
        message = functools.partial(m.SetOptimizer, store=self._id, optimizer=spec, keeps_states=keeps_states)
        tickets = [(link, link.request(message)) for link in self._places.links()]
        for link, ticket in tickets:
            self._done(None, link.wait(ticket), "set_optimizer")

    def set_learning_rate(self, lr: float) -> None:
        """Change the learning rate on the servers; see :meth:`KVStore.set_learning_rate`. Returns when all workers have called it.

        Args:
            lr: The learning rate, before the keys' factors. What workers have pushed before is applied at the old rate; in a
                ``dist_async`` store what is still on its way may be applied at the new one.

        Raises:
            KVStoreError: The store has no optimizer, or a server is lost.
            UserWarning: The optimizer has a scheduler, which gives the rate.
            AbortedError: A worker died, failed, left or was interrupted.
        """
        with self._lock:
            optimizer = self._running_optimizer()
            optimizer.set_learning_rate(float(lr))
            # Not in an asynchronous store, where a bound on staleness may hold a push back until others have pushed more.
            pushed = self._places.kept(self._parts) if self._synchronous else []
            for part in pushed:
                for ticket in part.pushed:
                    if not part.link.lost:
                        part.link.wait(ticket)  # the next pull of the key raises what a server has refused
            self.barrier()
            self._send_optimizer(portable(optimizer, _importable()), keeps_states=True)
            self.barrier()

    def _set_updater(self, updater: UserUpdater | Updater | None) -> None:
        """Checks its argument only: an updater of one process has no part in values that are on servers."""
        self._updater_of(updater)

    def _own_updater(self, verb: str) -> Updater:
        raise AssertionError(f"Cannot {verb} states for distributed training")

    # -- workers and servers ------------------------------------------------------------------------------------------

    def _done(self, key: Key | None, answer: Answer, what: str) -> Answer:
        if not isinstance(answer, m.Failed):
            return answer
        if answer.ranks:
            self._epoch = max(self._epoch, answer.epoch)
            if answer.given_up > self._given_up:
                self._given_up = answer.given_up
                for link in self._places.links():  # the one that has given rounds up knows already
                    link.tell(m.EndRounds(self._id, answer.given_up, answer.ranks, answer.kind, answer.text))
            cause = Cause(CauseKind(answer.kind), answer.ranks, answer.text)
            raise AbortedError(
                Pending(what, f"kv.{key}", (context.engine("kvstore").rank,), answer.ranks), cause
            )
        raise KVStoreError(answer.text if key is None else f"key {key!r}: {answer.text}", key)

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
        """The processes that keep the values, with how much of this store each has; without those that are lost."""
        with self._lock:
            asked = [
                (index, link, link.request(functools.partial(m.StockRequest, store=self._id)))
                for index, link in enumerate(self._links)
                if not link.lost
            ]
            infos = []
            for index, link, ticket in asked:
                answer = self._done(None, link.wait(ticket), "servers")
                assert isinstance(answer, m.Stock)
                host = link.place.host.partition("#")[0]
                infos.append(ServerInfo(index, host, link.pid, answer.keys, answer.bytes))
            return infos

    @property
    def rank(self) -> int:
        """Number of this worker, from 0."""
        return self._workers.rank

    @property
    def local_rank(self) -> int:
        """Number of this worker among those of its host, from 0."""
        return self._workers.local_rank

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return self._workers.count

    def _name_of(self, key: Key) -> str:
        return f"kv.{self._id}.{key}"


def _importable() -> tuple[str, ...]:
    """The modules that servers have imported."""
    return context.engine("kvstore").settings.kv_optimizers


def _cells_of(engine: Engine) -> tuple[int, int]:
    """Changes on all workers with each cell, and with each attempt of elastic training."""
    return engine.cells_begun, engine.failed_cells


def _present(engine: Engine, ranks: Iterable[int]) -> frozenset[tuple[int, int]]:
    """Those of these ranks that are in the world now, each with its process."""
    wanted = set(ranks)
    return frozenset((rank, pid) for rank, _, pid in engine.processes()[1] if rank in wanted)


def _nothing(dtype: np.dtype[Any], shape: tuple[int, ...], *, sparse: bool) -> Value:
    """An array that only has the shape and type of a value, which is on the servers."""
    if sparse:
        return RowSparse(np.zeros((0, *shape[1:]), dtype), [], shape)
    empty: Array = np.broadcast_to(np.zeros((), dtype), shape)
    return empty


def _as_elements(rows: RowSparse) -> RowSparse:
    """The same of the flat array, as whose parts servers have a large dense value; a row may be on two of them."""
    size = int(np.prod(rows.shape[1:], dtype=np.int64))
    indices = (rows.indices[:, None] * size + np.arange(size)).reshape(-1)
    return RowSparse(rows.data.reshape(-1), indices, (rows.shape[0] * size,))


class KVStoreServer:
    """What MXNet's scripts turn a process into a server with. Here servers are processes of their own that start with the first
    store that needs them, so that a script needs no such part: this waits beside them.

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
        """
        if not isinstance(self.kvstore, ServerStore):
            raise KVStoreError(f"a {self.kvstore.type} store has no servers")
        over = threading.Event()
        context.engine("KVStoreServer").on_leave(lambda reason: over.set())
        over.wait()
