"""The stores ``horovod`` and ``byteps``: sums over ranks, and no stored values."""

from __future__ import annotations

import operator
from typing import Any

from hvdlab.collectives.engine.handles import Handle
from hvdlab.collectives.errors import KVStoreError
from hvdlab.collectives.kvstore.arrays import Array, RowSparse, is_array, view_of, write
from hvdlab.collectives.kvstore.base import KVStoreBase
from hvdlab.collectives.kvstore.collectives import Workers, completed
from hvdlab.collectives.kvstore.keys import INT_MAX, INT_MIN, Key, pairs, require
from hvdlab.collectives.process_sets import ProcessSet


class RankStore(KVStoreBase):
    """Base of both stores: what they know of the workers.

    Args:
        process_set: The process set whose ranks are the workers; ``None`` for all ranks.
    """

    def __init__(self, process_set: ProcessSet | None = None) -> None:
        self._workers = Workers(process_set)

    @staticmethod
    def is_capable(capability: str) -> bool:
        """False for every capability: nothing is stored here that an optimizer could run on."""
        return False

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
            priority: Taken for programs that give it. All work is done in the order in which it was asked for.

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
            priority: Taken for programs that give it. All work is done in the order in which it was asked for.

        Raises:
            AssertionError, TypeError: An argument is no key or no array, or there are not as many outputs as values.
            KVStoreError: Shapes or types differ between ranks, or that of ``out``.
            AbortedError: A rank died, failed, left or was interrupted; outputs are unchanged.
        """
        _pushpull(self._workers, "horovod", key, value, out)

    def set_optimizer(self, optimizer: Any) -> None:
        """Does nothing: workers run their own optimizers."""

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Does nothing: there are no states here."""

    def load_optimizer_states(self, fname: str) -> None:
        """Does nothing: there are no states here."""

    @property
    def type(self) -> str:
        """``horovod``."""
        return "horovod"


class PushPull:
    """A sum in flight. Made by :meth:`BytePS.pushpull_async`.

    Attributes:
        key: The key under which it was pushed.
    """

    def __init__(self, key: Key, handles: list[Handle], total: Array, targets: list[Any]) -> None:
        self.key = key
        self._handles = handles
        self._total = total
        self._targets = targets

    def done(self) -> bool:
        """Whether it has ended, well or badly. Never blocks."""
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
        completed([(self.key, handle) for handle in self._handles])
        for target in self._targets:
            write(target, self._total)
        self._targets = []


@KVStoreBase.register
class BytePS(RankStore):
    """Sums and broadcasts by the names of BytePS; joins the world when it is made. Nothing is stored."""

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Copy rank 0's value to ``out`` on all ranks. Every rank calls it.

        Args:
            key: An int or a str, the same on all ranks.
            value: An array or a list of one; only rank 0's matters, but shapes and types must be equal.
            out: An array or a list of arrays, which all get the value; ``None`` for ``value``, which is overwritten.
            priority: Taken for programs that give it. All work is done in the order in which it was asked for.

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
            priority: Taken for programs that give it. All work is done in the order in which it was asked for.

        Raises:
            AssertionError, TypeError: An argument is no key or no array, or ``value`` is a list of several.
            KVStoreError: Shapes or types differ between ranks, or that of ``out``.
            AbortedError: A rank died, failed, left or was interrupted; ``out`` is unchanged.
        """
        single = _only(key, value)
        targets = _outputs(key, single if out is None else out)
        total = _contiguous(single)
        _check_shapes(key, total, targets)
        completed([(key, self._workers.submit_sum(total, f"kv.byteps.{key}"))])
        for target in targets:
            write(target, total)

    def pushpull_async(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> PushPull:
        """Begin to sum an array over all ranks, and return at once. Every rank calls it, in any order of keys.

        Of all arrays that are summed so and are ready on all ranks the one with the highest priority goes first, and a large one is summed
        in parts (``BYTEPS_PARTITION_BYTES``), between which a more urgent one may go. So if gradients are pushed as a backward pass
        computes them, with the negative number of their layer as priority, that of the first layer does not have to wait for those that
        were ready before it. ``HVDLAB_SCHEDULING_CREDIT`` says how many bytes of them are executed at a time.

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
        """``byteps``."""
        return "byteps"


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
    completed([(key, workers.submit_broadcast(array, f"kv.{store}.{key}"))])
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
    completed(handles)
    for (_, target), array in zip(targets, arrays, strict=True):
        write(target, array)
