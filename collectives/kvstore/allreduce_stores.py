"""Stores that sum by allreduces: ``dist_sync``, ``dist_device_sync``, ``horovod`` and ``byteps``.

In a ``dist_sync`` store every worker has the values. A push is summed over this worker's devices and submitted at once; it does not wait,
so that workers may push keys in different orders. A pull waits for this worker's own pushes of that key. With an optimizer every worker
updates its own copy of the value: sums are equal to the bit on all ranks, and so are the updates, without a server and without a second
transfer. ``horovod`` and ``byteps`` keep no values.
"""

from __future__ import annotations

import copy
import operator
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hvdlab.collectives.engine.entries import Handle
from hvdlab.collectives.errors import AbortedError, CauseKind, KVStoreError
from hvdlab.collectives.kvstore.arrays import (
    NUMPY,
    Array,
    ArrayType,
    RowSparse,
    add_up,
    add_up_rows,
    array_type_of,
    is_array,
    view_of,
    write,
)
from hvdlab.collectives.kvstore.base import INT_MAX, INT_MIN, Key, KVStoreBase, grouped, pairs, require
from hvdlab.collectives.kvstore.local_store import KVStore, UserUpdater, Value
from hvdlab.collectives.kvstore.optimizers import Optimizer, Updater, create
from hvdlab.collectives.kvstore.workers import Workers, wait_for_handles
from hvdlab.collectives.process_sets import ProcessSet


@dataclass(slots=True)
class _Pushed:
    """Push on its way: an allreduce in place in ``array``, or, without one, allgathers of the rows' numbers and of their data."""

    handles: tuple[Handle, ...]
    array: Array | None
    shape: tuple[int, ...]
    #: The user has interrupted the wait for it, which withdraws it unless it has ended by then.
    interrupted: bool = False

    def total(self) -> Value:
        """Return the sum over all workers, once all handles are done."""
        if self.array is not None:
            return self.array
        numbers, data = (handle.wait() for handle in self.handles)
        assert isinstance(numbers.output, np.ndarray)
        assert isinstance(data.output, np.ndarray)
        ends = np.cumsum([rows for (rows,) in numbers.tables])[:-1]
        parts = zip(np.split(data.output, ends), np.split(numbers.output, ends), strict=True)
        return add_up_rows([RowSparse(rows, indices, self.shape) for rows, indices in parts])


class DistSyncStore(KVStore):
    """Store of values that all workers share: a round of a key ends when every worker has pushed it. Made by ``create``.

    Making one is collective: every worker makes its stores in the same order.

    Args:
        name: The value of ``type``.
        on_devices: Add the arrays of one worker from left to right; otherwise by groups of four.
        process_set: The process set whose ranks are the workers; ``None`` for all ranks.
    """

    _made: ClassVar[int] = 0

    def __init__(self, name: str, *, on_devices: bool, process_set: ProcessSet | None = None) -> None:
        super().__init__(name, on_devices=on_devices)
        self._workers = Workers(process_set)
        #: Number of this store, the same on all workers, also where one of them was restarted and has made fewer.
        self._id = DistSyncStore._made = self._workers.largest([DistSyncStore._made + 1], "kv.create")[0]
        #: Pushes of each key whose sum was not stored yet, oldest first.
        self._pending: dict[Key, deque[_Pushed]] = {}
        #: Element types of values that are kept in float32 (``multi_precision``).
        self._outside: dict[Key, np.dtype[Any]] = {}
        self._multi_precision = False
        #: Whether an optimizer makes the updates, rather than a function of the user's or none.
        self._has_optimizer = False
        #: How often the user's function failed on each key's sum, on this worker.
        self._failed_updates: dict[Key, int] = {}

    def init(self, key: Any, value: Any) -> None:
        """Give keys rank 0's values. Every worker calls it, and it returns when all have.

        Args:
            key: An int or a str, or a list of one kind of these, not initialised yet.
            value: An array, or for a list of keys a list of arrays; of the same shapes and types on all workers.

        Raises:
            AssertionError, TypeError, ValueError: A key or value is none.
            KVStoreError: A key was initialised before, is of the other kind than the store's keys, or has another shape or
                type on another worker (raised on all).
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
            for one, given in found:
                array = own[one]
                self._outside[one] = array.dtype
                if isinstance(given, RowSparse):  # all of its rows are stored from now on
                    rows = RowSparse(array, np.arange(given.shape[0]), given.shape)
                    new[one] = (rows, array_type_of(given) or NUMPY)
                else:
                    array_type = array_type_of(given) or NUMPY
                    new[one] = (self._as_computed(array, array.dtype), array_type)
            self._add(new)
            self.barrier()

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Sum arrays over this worker's devices, then over all workers; the sum is stored, or given to the optimizer.

        Returns at once; the values may be overwritten afterwards. Every worker pushes each key as often.

        Args:
            key: An int or a str, or a list of one kind of these; the same key several times counts as one list.
            value: An array or a list of arrays of the key's shape; for a list of keys a list of such.
            priority: Accepted for programs that give it. All work is done in the order in which it was asked for.

        Raises:
            AssertionError, TypeError, ValueError: A key or value is none.
            KVStoreError: A key was not initialised; or a value has another shape than the stored one (on all workers: on the
                others by this push's pull).
            AbortedError: The coordinator is lost. Other failures of a sum are raised by the next pull of its key.
        """
        with self._lock:
            for one in self._push(pairs(key, value), at_once=False):
                self._store_arrived(one)

    def _push(self, found: list[tuple[Key, Any]], *, at_once: bool) -> Iterable[Key]:
        try:
            sums = self._sums(found)
        except KVStoreError:
            self._fail_elsewhere(found)
            raise
        for one, total in sums.items():
            self._pending.setdefault(one, deque()).append(self._submitted(one, total, at_once))
        return sums

    def _submitted(self, key: Key, total: Value, at_once: bool) -> _Pushed:
        name = self._name_of(key)
        if isinstance(total, RowSparse):
            if not isinstance(
                self._values[key], RowSparse
            ):  # rows are computed in the type of the weight that they change
                total = RowSparse(
                    self._as_computed(total.data, self._outside[key]), total.indices, total.shape
                )
            numbers = self._workers.submit_gather(total.indices, f"{name}.rows")
            return _Pushed(
                (numbers, self._workers.submit_gather(total.data, f"{name}.data")), None, total.shape
            )
        array = self._as_computed(total, self._outside[key])
        return _Pushed((self._workers.submit_sum(array, name, at_once=at_once),), array, array.shape)

    def _check_arrays(self, key: Key, arrays: Sequence[Value]) -> None:
        super()._check_arrays(key, arrays)
        sparse, stored = isinstance(arrays[0], RowSparse), isinstance(self._values[key], RowSparse)
        if sparse != stored and (stored or self._updater is None):
            kinds = "row-sparse" if stored else "dense", "row-sparse" if sparse else "dense"
            raise KVStoreError(f"key {key!r} is {kinds[0]}, but was given a {kinds[1]} array", key)

    def _sum(self, key: Key, arrays: Sequence[Any]) -> Value:
        """Sum over this worker's devices, then compress: a worker has one residual for each key."""
        if isinstance(arrays[0], RowSparse):
            return add_up_rows(arrays)
        total = self._buffer(key, arrays[0])
        add_up(arrays, total, on_devices=self._on_devices)
        return total if self._compression is None else self._quantized(key, 0, total)

    def _fail_elsewhere(self, found: list[tuple[Key, Any]]) -> None:
        """Do this worker's part in a push that it refuses, so that the other workers get an error and don't wait for it."""
        handles = []
        for key, arrays in grouped(found, self._numbers).items():
            if key not in self._values:
                continue
            parts = (".rows", ".data") if isinstance(arrays[0], RowSparse) else ("",)
            # No array of this store is an empty one of bytes with this shape: the ranks disagree.
            wrong = np.zeros((0, 1, len(arrays)), np.uint8)
            handles += [(key, self._workers.submit_sum(wrong, self._name_of(key) + part)) for part in parts]
        for key, handle in handles:
            try:
                wait_for_handles([(key, handle)])
            except KVStoreError:
                continue  # the mismatch that this was meant to cause

    def _store_arrived(self, key: Key) -> None:
        """Store the sums that have come, so that they do not pile up on a worker that never pulls.

        Sums whose storing could raise wait for a pull: every worker has to raise the error there, however fast its sums come.
        """
        if self._updater is not None and not isinstance(self._updater, Updater):
            return
        pending = self._pending.get(key, ())
        while pending and all(handle.done() and handle.outcome()[1] is None for handle in pending[0].handles):
            self._store_oldest(key)

    def _store_oldest(self, key: Key) -> None:
        # It stays in the queue while this waits: after an interrupt the next pull has to wait for the same push.
        pushed = self._pending[key][0]
        try:
            wait_for_handles([(key, handle) for handle in pushed.handles])
        except KeyboardInterrupt:
            pushed.interrupted = (
                True  # whether that withdrew it is known later, and then the user knows of it already
            )
            raise
        except Exception as error:
            # It has ended: the next pull must not wait for it again.
            self._pending[key].popleft()
            withdrawn = isinstance(error, AbortedError) and error.cause.kind is CauseKind.INTERRUPTED
            if pushed.interrupted and withdrawn:
                return
            raise
        # Before it is stored: an update that raises has had its sum, and must not get it a second time.
        self._pending[key].popleft()
        try:
            self._store({key: pushed.total()})
        except Exception:
            if not isinstance(self._updater, Updater):
                self._failed_updates[key] = self._failed_updates.get(key, 0) + 1
            raise

    def _store_pushed(self, keys: Iterable[Key]) -> None:
        for key in keys:
            while self._pending.get(key):
                self._store_oldest(key)

    def _write(self, found: list[tuple[Key, Any]], ignore_sparse: bool) -> None:
        if not ignore_sparse:
            raise KVStoreError(f"a {self.type} store pulls dense values only: use row_sparse_pull")
        self._store_pushed(dict.fromkeys(key for key, _ in found))
        super()._write(found, ignore_sparse)

    def _pulled(self, key: Key, stored: Array) -> Array:
        return stored.astype(self._outside[key], copy=False)

    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """Copy some rows of row-sparse values, after this worker's pushes of them; see :meth:`KVStore.row_sparse_pull`."""
        with self._lock:
            if out is not None:
                self._store_pushed(dict.fromkeys(one for one, _ in pairs(key, out)))
            super().row_sparse_pull(key, out, priority, row_ids)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Push, then pull; for dense arrays.

        Args:
            key, value, out, priority: As in :meth:`KVStore.pushpull`.

        Raises:
            AssertionError, TypeError, ValueError: A key, value or output is none.
            KVStoreError: As :meth:`push` and :meth:`pull` do; or an array is row-sparse.
            AbortedError: A worker died, failed, left or was interrupted.
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
                self._fail_elsewhere(found)
                raise
            self._push(found, at_once=True)
            self._write(targets, ignore_sparse=True)

    def set_optimizer(self, optimizer: Any) -> None:
        """Let this optimizer update the stored values from the pushed gradients. Every worker calls it with the same arguments, before :meth:`init`.

        The store copies the optimizer: later changes of it have no effect.

        Args:
            optimizer: An optimizer of :mod:`hvdlab.kvstore`'s ``optimizer``, its name, or a function
                ``optimizer(key, gradient, weight)`` that changes the weight in place, alike on all workers. The pull
                raises its exceptions, the weight is as before, and the store goes on. If it raises on some workers only, their
                weights differ, and the next round of that key is refused on all.

        Raises:
            TypeError: It is none of these.
            ValueError: There is no optimizer of this name.
        """
        found = create(optimizer) if isinstance(optimizer, str) else optimizer
        with self._lock:
            # The sums of earlier pushes belong to the optimizer before.
            self._store_pushed(self._pending)
            if isinstance(found, Optimizer):
                found = copy.deepcopy(found)
                self._multi_precision = found.multi_precision
            super().set_optimizer(found)
            self._has_optimizer = hasattr(self._updater, "optimizer")
            self._values = {
                key: value if isinstance(value, RowSparse) else self._as_computed(value, self._outside[key])
                for key, value in self._values.items()
            }

    def set_learning_rate(self, lr: float) -> None:
        """Change the learning rate of this worker's copy of the optimizer from the next push on; see :meth:`KVStore.set_learning_rate`."""
        with self._lock:
            self._store_pushed(self._pending)
            super().set_learning_rate(lr)

    def _accepts_gradient(self, weight: np.dtype[Any], gradient: np.dtype[Any]) -> bool:
        masters = self._has_optimizer and gradient == np.float16 and weight == np.float32
        return self._multi_precision or weight == gradient or masters

    def _as_computed(self, array: Array, outside: np.dtype[Any]) -> Array:
        """Return a value or a gradient in the type in which workers sum and update it.

        As on MXNet's servers an optimizer works on float32 masters of float16 weights, with ``multi_precision`` or without.
        """
        masters = self._multi_precision or (self._has_optimizer and outside == np.float16)
        return _float32(array) if masters else array

    def _set_updater(self, updater: UserUpdater | Updater | None) -> None:
        """Check the argument only: an updater of one process has no part in values that all workers share.

        Use :meth:`set_optimizer`, which takes functions, too.
        """
        self._updater_of(updater)

    def _finish_pushes(self) -> None:
        with self._lock:
            self._store_pushed(self._pending)

    def barrier(self) -> None:
        """Wait until all workers have called it. It orders calls, not pushes that are still on their way."""
        self._workers.barrier(f"kv.{self._id}")

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

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a restarted worker, which takes part from then on: values and states of the last complete rounds.

        Raises:
            KVStoreError: A push of this worker is on its way.
        """
        with self._unused():
            for key, pending in self._pending.items():
                # Sums that have come belong to the values that the restarted worker gets.
                self._store_arrived(key)
                if any(
                    not handle.done() or handle.outcome()[1] is None
                    for one in pending
                    for handle in one.handles
                ):
                    raise KVStoreError(f"a push of key {key!r} is on its way: pull it first", key)
            return {
                "settings": self._settings(),
                "workers": self._workers,
                "id": self._id,
                "values": self._values,
                "outside": self._outside,
                "multi_precision": self._multi_precision,
                "has_optimizer": self._has_optimizer,
                "failed_updates": self._failed_updates,
            }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._restore_settings(state["settings"])
        self._workers, self._id = state["workers"], state["id"]
        DistSyncStore._made = max(DistSyncStore._made, self._id)
        self._values, self._outside = state["values"], state["outside"]
        self._multi_precision, self._failed_updates = state["multi_precision"], state["failed_updates"]
        self._has_optimizer = state["has_optimizer"]
        self._pending = {}

    def _name_of(self, key: Key) -> str:
        name, failed = f"kv.{self._id}.{key}", self._failed_updates.get(key)
        # Where a function failed on some workers only, their values differ from then on. Under different names their pushes
        # never meet, and the error that ends their waits names both.
        return name if not failed else f"{name} (failed updates: {failed})"


class RankStore(KVStoreBase):
    """Base of ``horovod`` and ``byteps`` stores: their workers.

    Args:
        process_set: The process set whose ranks are the workers; ``None`` for all ranks.
    """

    def __init__(self, process_set: ProcessSet | None = None) -> None:
        self._workers = Workers(process_set)

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return false for every capability: nothing is stored here that an optimizer could run on."""
        return False

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


@KVStoreBase.register
class Horovod(RankStore):
    """Allreduce and broadcast by the names of a key-value store; joins the world when it is made.

    Nothing is stored: a key names a tensor, as in ``hvd.allreduce``, and may be used any number of times.
    """

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Copy rank 0's value to ``out`` on all ranks. Every rank calls it.

        Args:
            key: An int or a str, the same on all ranks.
            value: An array; only rank 0's matters, but shapes and types must be equal. It is left alone.
            out: An array or a list of arrays, which all get the value.
            priority: Accepted for programs that give it. All work is done in the order in which it was asked for.

        Raises:
            AssertionError, TypeError: An argument is no key or no array.
            KVStoreError: Shapes or types differ between ranks, or that of ``out``.
            AbortedError: A rank died, failed, left or was interrupted; ``out`` is unchanged.
        """
        if out is None:
            raise TypeError("broadcast needs out, the array to write to")
        _broadcast(self._workers, "horovod", key, value, out)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Sum arrays over all ranks. Every rank calls it.

        Args:
            key: An int or a str, the same on all ranks; or a list of these.
            value: An array, or a list of arrays, each of which is summed over the ranks by itself (they are not added to
                each other); for a list of keys a list of such.
            out: As many arrays of the same shapes; ``None`` for ``value`` itself, which is overwritten.
            priority: Accepted for programs that give it. All work is done in the order in which it was asked for.

        Raises:
            AssertionError, TypeError: An argument is no key or no array, or there are not as many outputs as values.
            KVStoreError: Shapes or types differ between ranks, or that of ``out``.
            AbortedError: A rank died, failed, left or was interrupted; outputs are unchanged.
        """
        _pushpull(self._workers, "horovod", key, value, out)

    def set_optimizer(self, optimizer: Any) -> None:
        """Do nothing: workers run their own optimizers."""

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Do nothing: there are no states here."""

    def load_optimizer_states(self, fname: str) -> None:
        """Do nothing: there are no states here."""

    @property
    def type(self) -> str:
        """Return ``horovod``."""
        return "horovod"


class PushPull:
    """Sum in flight. Made by :meth:`BytePS.pushpull_async`.

    Args:
        key: The key under which it was pushed.
        handles: Handles of the collectives.
        total: Gets the sum.
        targets: Arrays that the sum is copied to.
    """

    def __init__(self, key: Key, handles: list[Handle], total: Array, targets: list[Any]) -> None:
        self.key = key
        self._handles = handles
        self._total = total
        self._targets = targets

    def done(self) -> bool:
        """Return whether it has ended, well or badly. Never blocks."""
        return all(handle.done() for handle in self._handles)

    def wait(self) -> None:
        """Wait for the sum and write it to the outputs. Called again it does nothing, or raises the same error.

        If the sum fails, outputs are unchanged.

        Raises:
            KVStoreError: The ranks gave arrays of different shapes or types. Where these are summed in parts, this ends the sums of other
                keys that are in flight as well, with an ``AbortedError``.
            AbortedError: A rank died, failed, left or was interrupted.
            TypeError: An output is read-only, or can't be written to otherwise.
        """
        wait_for_handles([(self.key, handle) for handle in self._handles])
        for target in self._targets:
            write(target, self._total)
        # The user can write to the outputs from now on: a second call must not overwrite that.
        self._targets = []


@KVStoreBase.register
class BytePS(RankStore):
    """Store with sums and broadcasts by the names of BytePS; joins the world when it is made. Nothing is stored."""

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Copy rank 0's value to ``out`` on all ranks. Every rank calls it.

        Args:
            key: An int or a str, the same on all ranks.
            value: An array or a list of one; only rank 0's matters, but shapes and types must be equal.
            out: An array or a list of arrays, which all get the value; ``None`` for ``value``, which is overwritten.
            priority: Accepted for programs that give it. All work is done in the order in which it was asked for.

        Raises:
            AssertionError, TypeError: An argument is no key or no array, or ``value`` is a list of several.
            KVStoreError: Shapes or types differ between ranks, or that of ``out``.
            AbortedError: A rank died, failed, left or was interrupted; ``out`` is unchanged.
        """
        single = _only(key, value)
        _broadcast(self._workers, "byteps", key, single, single if out is None else out)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Sum an array over all ranks. Every rank calls it.

        Args:
            key: An int or a str, the same on all ranks.
            value: An array or a list of one.
            out: An array or a list of arrays, which all get the sum; ``None`` for ``value``, which is overwritten.
            priority: Accepted for programs that give it. All work is done in the order in which it was asked for.

        Raises:
            AssertionError, TypeError: An argument is no key or no array, or ``value`` is a list of several.
            KVStoreError: Shapes or types differ between ranks, or that of ``out``.
            AbortedError: A rank died, failed, left or was interrupted; ``out`` is unchanged.
        """
        single = _only(key, value)
        targets = _outputs(key, single if out is None else out)
        total = _contiguous(single)
        _check_shapes(key, total, targets)
        wait_for_handles([(key, self._workers.submit_sum(total, f"kv.byteps.{key}"))])
        for target in targets:
            write(target, total)

    def pushpull_async(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> PushPull:
        """Begin to sum an array over all ranks, and return at once. Every rank calls it, in any order of keys.

        Of all arrays that are summed so and are ready on all ranks the one with the highest priority goes first. A large one is summed
        in parts (``BYTEPS_PARTITION_BYTES``), between which a more urgent one may go. So gradients can be pushed as a backward pass
        computes them, with the negative number of their layer as priority: that of the first layer does not have to wait for earlier ones.
        ``HVDLAB_SCHEDULING_CREDIT`` limits the bytes of them that are executed at a time.

        Args:
            key: An int or a str, the same on all ranks. It may be pushed again before the first sum is there.
            value: An array or a list of one. It is copied, and may be overwritten at once.
            out: An array or a list of arrays, which all get the sum when :meth:`PushPull.wait` returns, and are left alone before that;
                ``None`` for ``value``.
            priority: The larger the more urgent. It changes when a sum is there, and never its value.

        Returns:
            The sum in flight. Its end has to be waited for before the cell or the script ends.

        Raises:
            AssertionError, TypeError, ValueError: An argument is no key or no array, ``value`` is a list of several, or the priority is no
                number of 32 bits.
            KVStoreError: ``out`` has another shape.
            AbortedError: The coordinator is lost. Other failures are raised by :meth:`PushPull.wait`.
        """
        single = _only(key, value)
        targets = _outputs(key, single if out is None else out)
        total = _contiguous(single)
        _check_shapes(key, total, targets)
        handles = self._workers.submit_sum_in_parts(total, f"kv.byteps.{key}", _priority(priority))
        return PushPull(key, handles, total, targets)

    @property
    def type(self) -> str:
        """Return ``byteps``."""
        return "byteps"


def _float32(array: Array) -> Array:
    return array.astype(np.float32, copy=False)


def _only(key: Any, value: Any) -> Any:
    require(isinstance(key, int | str), f"unexpected type for key: {type(key)}")
    found = pairs(key, value)
    require(len(found) == 1, f"key {key!r} was given {len(found)} arrays, but a push has one")
    return found[0][1]


def _priority(given: Any) -> int:
    priority = operator.index(given)
    if not INT_MIN <= priority <= INT_MAX:
        raise ValueError(f"priority {priority} does not fit into 32 bits")
    return priority


def _contiguous(value: Any) -> Array:
    if isinstance(value, RowSparse):
        raise TypeError("row-sparse arrays can't be summed over ranks here; use todense()")
    return view_of(value).copy(order="C")


def _outputs(key: Key, out: Any) -> list[Any]:
    return [target for _, target in pairs(key, out)]


def _check_shapes(key: Key, array: Array, targets: list[Any]) -> None:
    for target in targets:
        if isinstance(target, RowSparse):
            raise TypeError(f"the output of key {key!r} is row-sparse")
        shape = view_of(target).shape
        if shape != array.shape:
            raise KVStoreError(f"the value of key {key!r} has shape {array.shape}, its output {shape}", key)


def _broadcast(workers: Workers, store: str, key: Any, value: Any, out: Any) -> None:
    require(is_array(value), f"the value of key {key!r} is a {type(value).__name__}, not an array")
    targets = _outputs(key, out)
    array = _contiguous(value)
    _check_shapes(key, array, targets)
    wait_for_handles([(key, workers.submit_broadcast(array, f"kv.{store}.{key}"))])
    for target in targets:
        write(target, array)


def _pushpull(workers: Workers, store: str, key: Any, value: Any, out: Any) -> None:
    found = pairs(key, value)
    targets = pairs(key, value if out is None else out)
    if [one for one, _ in found] != [one for one, _ in targets]:
        raise AssertionError(f"{len(found)} values of key {key!r} need as many outputs, not {len(targets)}")
    arrays = [_contiguous(array) for _, array in found]
    for (one, target), array in zip(targets, arrays, strict=True):
        _check_shapes(one, array, [target])
    seen: dict[Key, int] = {}
    handles = []
    for (one, _), array in zip(found, arrays, strict=True):
        place = seen[one] = seen.get(one, -1) + 1
        name = f"kv.{store}.{one}" if place == 0 else f"kv.{store}.{one}.{place}"
        handles.append((one, workers.submit_sum(array, name)))
    wait_for_handles(handles)
    for (_, target), array in zip(targets, arrays, strict=True):
        write(target, array)
