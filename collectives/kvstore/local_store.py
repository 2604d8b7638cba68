"""Stores of one process, ``local`` and ``device``: values by key, with updaters and gradient compression.

Compression keeps the error of a push for the next one, by MXNet's formulas: ``r += g``; ``q`` is sent in place of ``r``; ``r -= q``. All
in float32.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.errors import KVStoreError
from hvdlab.collectives.kvstore.arrays import (
    NUMPY,
    Array,
    ArrayType,
    RowSparse,
    add_up,
    add_up_rows,
    array_type_named,
    array_type_of,
    checked_rows,
    rows_of,
    view_of,
    write,
)
from hvdlab.collectives.kvstore.base import (
    Key,
    KVStoreBase,
    grouped,
    pairs,
    require,
    unknown_capability,
    unknown_key,
)
from hvdlab.collectives.kvstore.optimizer_state import write_file
from hvdlab.collectives.kvstore.optimizers import Optimizer, Updater, create

_LOG = logging.getLogger("hvdlab")


Value = Array | RowSparse


UserUpdater = Callable[[Any, Any, Any], None]


Floats = npt.NDArray[np.float32]


Bytes = npt.NDArray[np.uint8]


COMPRESSION_TYPES = ("2bit", "1bit")


_COMPRESSED_AT_ONCE = 1 << 15
"""Elements that are worked on at once, so that they stay in the cache."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Process that keeps values of a store.

    Attributes:
        index: Number of the server, from 0.
        host: Name of its host.
        pid: Its process id on that host.
        keys: How many keys, or parts of keys, it keeps.
        bytes: Size of their values.
    """

    index: int
    host: str
    pid: int
    keys: int
    bytes: int


class KVStore(KVStoreBase):
    """Store of values by key, to which arrays are pushed and from which they are pulled. Made by :func:`hvdlab.kvstore.create`.

    Keys are ints of 32 bits or strings; a store holds one kind, fixed by its first use. A value is an array of numpy, torch or
    another framework, or a list of arrays, one per device, which are summed. Values are copied in and out: a pulled value never
    shares memory with the store. After any error the store is as it was before.

    Args:
        name: The value of ``type``.
        on_devices: Add the arrays of a push from left to right, and allow gradient compression; otherwise add by groups of four.
    """

    def __init__(self, name: str = "local", *, on_devices: bool = False) -> None:
        self._name = name
        self._on_devices = on_devices
        # Reentrant: `pushpull()` and `broadcast()` call other methods that acquire it.
        self._lock = threading.RLock()
        #: The stored values. An array in here is never shared with a user and is replaced, not written to.
        self._values: dict[Key, Value] = {}
        #: For each dense value an array of its size, to which the next sum may be written.
        self._spare: dict[Key, Array] = {}
        #: The kind of array that each key was initialised with, which a user's updater gets.
        self._array_types: dict[Key, ArrayType] = {}
        #: Keys by order of initialisation, in which MXNet works off a call with several strings.
        self._numbers: dict[Key, int] = {}
        #: Updates a stored value by a sum; None if sums replace values.
        self._updater: Callable[[Key, Value, Array], None] | None = None
        self._compression: GradientCompression | None = None
        #: Error that compression keeps for the next push, by key and place in the pushed list.
        self._residuals: dict[tuple[Key, int], Array] = {}
        #: The warning about row-sparse outputs was logged, which is done once.
        self._warned_sparse = False

    # -- values -------------------------------------------------------------------------------------------------------

    def init(self, key: Any, value: Any) -> None:
        """Give keys their first values, once.

        Args:
            key: An int or a str, or a list of one kind of these.
            value: An array, or for a list of keys a list of arrays.

        Raises:
            AssertionError, TypeError, ValueError: A key or value is none.
            KVStoreError: A key was initialised before, or is of the other kind than the store's keys.
        """
        with self._lock:
            found = pairs(key, value)
            self._check_kind(found)
            new: dict[Key, tuple[Value, ArrayType]] = {}
            for one, given in found:
                if one in self._values or one in new:
                    raise KVStoreError(f"duplicate init of key {one}", one)
                new[one] = (_copied(given), array_type_of(given) or NUMPY)
            self._add(new)

    def _add(self, new: dict[Key, tuple[Value, ArrayType]]) -> None:
        for key, (value, array_type) in new.items():
            self._values[key], self._array_types[key] = value, array_type
            self._numbers[key] = len(self._numbers)

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Sum the arrays given for each key and store the sum, or give it to the updater.

        Without an updater the sum replaces the stored value; it is not added to it.

        Args:
            key: An int or a str, or a list of one kind of these; the same key several times counts as one list.
            value: An array or a list of arrays of the key's shape; for a list of keys a list of such.
            priority: Accepted for programs that give it. All work is done in the order in which it was asked for.

        Raises:
            AssertionError, TypeError, ValueError: A key or value is none.
            KVStoreError: A key was not initialised, or a value has another shape than the stored one.
            Exception: The updater's exception; the stored values, and the rests that compression keeps, are unchanged.
        """
        with self._lock:
            found = pairs(key, value)
            residuals = self._residuals_before(found)
            try:
                self._store(self._sums(found))
            except BaseException:
                # Nothing was stored: the next push must not send a rest of this one.
                self._residuals = residuals
                raise

    def _residuals_before(self, found: list[tuple[Key, Any]]) -> dict[tuple[Key, int], Array]:
        """Return the residuals for the case that the updater raises, with copies of those that a push of these keys changes."""
        if self._compression is None or self._updater is None:
            return self._residuals
        keys = {key for key, _ in found}
        return {
            place: residual.copy() if place[0] in keys else residual
            for place, residual in self._residuals.items()
        }

    def _sums(self, found: list[tuple[Key, Any]]) -> dict[Key, Value]:
        """Return one new array for each key: the sum of the given arrays, compressed if compression is on."""
        self._check_known(found)
        groups = grouped(found, self._numbers)
        seen = {key: [_viewed(array) for array in arrays] for key, arrays in groups.items()}
        # All keys are checked before the first sum: compression changes residuals, which a push that is refused must leave as they
        # are.
        for key, arrays in seen.items():
            self._check_arrays(key, arrays)
        return {key: self._sum(key, arrays) for key, arrays in seen.items()}

    def _check_arrays(self, key: Key, arrays: Sequence[Value]) -> None:
        stored = self._values[key]
        if len({isinstance(array, RowSparse) for array in arrays}) > 1:
            raise KVStoreError(f"key {key!r} was given dense and row-sparse arrays in one push", key)
        if len({array.dtype for array in arrays}) > 1:
            types = ", ".join(sorted({str(array.dtype) for array in arrays}))
            raise KVStoreError(f"key {key!r} was given arrays of several types in one push: {types}", key)
        for array in arrays:
            if tuple(array.shape) != tuple(stored.shape):
                raise KVStoreError(
                    f"key {key!r} has shape {tuple(stored.shape)}, but an array of shape {tuple(array.shape)} was pushed",
                    key,
                )
            if isinstance(self._updater, Updater) and not self._accepts_gradient(stored.dtype, array.dtype):
                raise KVStoreError(
                    f"the weight of key {key!r} is {stored.dtype}, but its gradient {array.dtype}; they need one type",
                    key,
                )
            if self._compression is not None and (isinstance(array, RowSparse) or array.dtype != np.float32):
                raise KVStoreError(
                    f"gradient compression takes dense float32 arrays only; key {key!r} was given "
                    f"{'row-sparse ' if isinstance(array, RowSparse) else ''}{array.dtype}",
                    key,
                )

    def _accepts_gradient(self, weight: np.dtype[Any], gradient: np.dtype[Any]) -> bool:
        """Return whether the optimizer can apply a gradient of this type to a weight of that type."""
        return weight == gradient

    def _sum(self, key: Key, arrays: Sequence[Any]) -> Value:
        if isinstance(arrays[0], RowSparse):
            return add_up_rows(arrays)
        if self._compression is not None:
            arrays = [self._quantized(key, place, array) for place, array in enumerate(arrays)]
        total = self._buffer(key, arrays[0])
        add_up(arrays, total, on_devices=self._on_devices)
        return total

    def _buffer(self, key: Key, like: Array) -> Array:
        # Removed here, since the sum in it can become the stored value, which is never written to.
        spare = self._spare.pop(key, None)
        if spare is not None and spare.shape == like.shape and spare.dtype == like.dtype:
            return spare
        return np.empty(like.shape, like.dtype)

    def _quantized(self, key: Key, place: int, gradient: Array) -> Array:
        assert self._compression is not None
        residual = self._residuals.get((key, place))
        if residual is None:
            residual = self._residuals[key, place] = np.zeros(gradient.size, np.float32)
        sent = np.empty(gradient.size, np.float32)
        self._compression.quantize(np.ascontiguousarray(gradient).reshape(-1), residual, sent)
        return sent.reshape(gradient.shape)

    def _store(self, sums: dict[Key, Value]) -> None:
        """Replace stored values, or update them: all values of the call or, if an updater raises, none."""
        new = (
            sums if self._updater is None else {key: self._updated(key, total) for key, total in sums.items()}
        )
        for key, value in new.items():
            old, self._values[key] = self._values[key], value
            # The array that is not stored: the old value where the sum replaces it, the sum where an updater has made a new value.
            spare = old if value is sums[key] else sums[key]
            if isinstance(spare, np.ndarray):
                self._spare[key] = spare

    def _updated(self, key: Key, total: Value) -> Value:
        assert self._updater is not None
        stored = self._values[key]
        if isinstance(stored, np.ndarray):
            # If an updater raises, no value of the call may have changed.
            weight = stored.copy()
            self._updater(key, total, weight)
            return weight
        if len(stored.indices) != stored.shape[0]:
            raise KVStoreError(f"key {key!r} can't be updated: only some of its rows are stored", key)
        rows = stored.data.copy()
        self._updater(key, total, rows)
        return RowSparse(rows, stored.indices, stored.shape)

    def pull(self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy stored values to arrays, casting to their types as C does.

        Args:
            key: An int or a str, or a list of one kind of these.
            out: An array or a list of arrays of the key's shape; for a list of keys a list of such.
            priority: Accepted for programs that give it. All work is done in the order in which it was asked for.
            ignore_sparse: Leave row-sparse outputs alone; otherwise fill them. Dense outputs are always filled, those of row-sparse values
                with zeros for the rows that are not stored.

        Raises:
            AssertionError, TypeError, ValueError: A key or output is none.
            KVStoreError: A key was not initialised, or an output has another shape.
        """
        if out is None:
            raise AssertionError("pull needs out, the arrays to write to")
        with self._lock:
            found = pairs(key, out)
            self._check_known(found)
            self._write(found, ignore_sparse)

    def _check_outputs(self, found: list[tuple[Key, Any]], values: Mapping[Key, Value]) -> None:
        for key, target in found:
            if key not in values:
                raise unknown_key(key)
            shape, wanted = tuple(_viewed(target).shape), tuple(values[key].shape)
            if shape != wanted:
                raise KVStoreError(f"key {key!r} has shape {wanted}, but its output has {shape}", key)

    def _write(self, found: list[tuple[Key, Any]], ignore_sparse: bool) -> None:
        self._check_outputs(found, self._values)
        for key, target in found:
            stored = self._values[key]
            if ignore_sparse and isinstance(target, RowSparse):
                self._warn_sparse(key)
            elif isinstance(target, RowSparse):
                sparse = stored if isinstance(stored, RowSparse) else _as_rows(stored)
                target.replace(sparse.indices, sparse.data)
            else:
                write(
                    target, stored.todense() if isinstance(stored, RowSparse) else self._pulled(key, stored)
                )

    def _pulled(self, key: Key, stored: Array) -> Array:
        return stored

    def _warn_sparse(self, key: Key) -> None:
        if not self._warned_sparse:
            self._warned_sparse = True
            _LOG.warning(
                "pull leaves row-sparse outputs alone, such as that of key %r: use row_sparse_pull", key
            )

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Push, then pull.

        Args:
            key: An int or a str, or a list of one kind of these.
            value: An array or a list of arrays; for a list of keys a list of such.
            out: Where the stored values go, as in :meth:`pull`; ``None`` for all arrays of ``value``, which are overwritten.
            priority: Accepted for programs that give it. All work is done in the order in which it was asked for.

        Raises:
            AssertionError, TypeError, ValueError: A key, value or output is none.
            KVStoreError: As :meth:`push` and :meth:`pull` do. If the push was refused nothing is pulled.
        """
        with self._lock:
            targets = pairs(key, value if out is None else out)
            self._check_known(targets)
            self._check_outputs(targets, self._values)
            # All outputs were checked before this: a push can't be taken back.
            self.push(key, value, priority)
            self._write(targets, ignore_sparse=True)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Give keys their first values, rank 0's, and copy them to ``out``: :meth:`init`, then :meth:`pull`.

        Args:
            key: An int or a str, or a list of one kind of these, not initialised yet.
            value: As in :meth:`init`.
            out: As in :meth:`pull`.
            priority: Accepted for programs that give it. All work is done in the order in which it was asked for.

        Raises:
            AssertionError, TypeError, ValueError: A key, value or output is none; ``out`` must be given.
            KVStoreError: As :meth:`init` and :meth:`pull` do.
        """
        if out is None:
            raise TypeError("broadcast needs out, the arrays to write to")
        with self._lock:
            targets = pairs(key, out)
            self._check_outputs(targets, {one: _viewed(given) for one, given in pairs(key, value)})
            self.init(key, value)
            self.pull(key, out, priority)

    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """Copy some rows of row-sparse values; all other rows of the outputs become zero.

        Args:
            key: An int or a str, or a list of one kind of these.
            out: A :class:`RowSparse` or a list of them; for a list of keys a list of such. Each is changed in place: its
                indices become the rows asked for, increasing, once each.
            priority: Accepted for programs that give it. All work is done in the order in which it was asked for.
            row_ids: Row numbers, an array of any shape; one for all outputs, or a list with one for each. For a list of keys also a
                list of lists, like that of the outputs.

        Raises:
            AssertionError: ``out`` or ``row_ids`` is missing, or there are not as many of these as outputs, or not in the same lists.
            KVStoreError: A key was not initialised, a value or output is not row-sparse, or a row is out of range.
        """
        if out is None or row_ids is None:
            raise AssertionError("row_sparse_pull needs out and row_ids")
        with self._lock:
            found = pairs(key, out)
            self._check_known(found)
            wanted = row_ids_of(key, row_ids, found)
            # All outputs and rows are checked before the first output is changed.
            for (one, target), rows in zip(found, wanted, strict=True):
                self._check_sparse(one, target)
                try:
                    checked_rows(rows, self._values[one].shape[0])
                except ValueError as error:
                    raise KVStoreError(f"row_sparse_pull of key {one!r}: {error}", one) from None
            for (one, target), rows in zip(found, wanted, strict=True):
                stored = self._values[one]
                assert isinstance(stored, RowSparse)
                numbers = np.unique(rows).astype(np.int64)
                assert isinstance(target, RowSparse)
                target.replace(numbers, rows_of(stored, numbers))

    def _check_sparse(self, key: Key, target: Any) -> None:
        stored = self._values[key]
        if not isinstance(target, RowSparse) or not isinstance(stored, RowSparse):
            what = "output" if isinstance(stored, RowSparse) else "value"
            raise KVStoreError(
                f"row_sparse_pull needs row-sparse arrays, but the {what} of key {key!r} is dense", key
            )
        if target.shape != stored.shape:
            raise KVStoreError(
                f"key {key!r} has shape {stored.shape}, but its output has {target.shape}", key
            )

    def _check_kind(self, found: list[tuple[Key, Any]]) -> None:
        kind = type(next(iter(self._values), found[0][0] if found else 0))  # all stored ones have one
        if any(type(key) is not kind for key, _ in found):
            key = found[0][0]
            raise KVStoreError(
                f"Mixed key types are not allowed: key {key!r} is of another kind than the store's", key
            )

    def _check_known(self, found: list[tuple[Key, Any]]) -> None:
        self._check_kind(found)
        for key, _ in found:
            if key not in self._values:
                raise unknown_key(key)

    # -- updates and compression --------------------------------------------------------------------------------------

    def set_gradient_compression(self, compression_params: Any) -> None:
        """Compress pushes from now on; there is no way back. Set it before :meth:`init`.

        Args:
            compression_params: ``{"type": "2bit" or "1bit", "threshold": 0.5}``; the threshold is positive.

        Raises:
            AssertionError: It is no dict.
            KVStoreError: Stores of this type have no compression, the type is missing or unknown, or the threshold is wrong.
        """
        if not self._on_devices and "dist" not in self._name:
            raise KVStoreError("Gradient compression is not supported for this type of kvstore")
        with self._lock:
            self._compression = GradientCompression.from_params(compression_params)

    def set_optimizer(self, optimizer: Any) -> None:
        """Update the stored values by the pushed gradients.

        Args:
            optimizer: An optimizer of :mod:`hvdlab.kvstore`'s ``optimizer``, its name, or a function
                ``optimizer(key, gradient, weight)`` that changes the weight in place.

        Raises:
            TypeError: It is none of these.
            ValueError: There is no optimizer of this name.
        """
        found = create(optimizer) if isinstance(optimizer, str) else optimizer
        with self._lock:
            self._updater = self._updater_of(Updater(found) if isinstance(found, Optimizer) else found)

    def set_learning_rate(self, lr: float) -> None:
        """Change the learning rate of the optimizer from the next push on. Its states stay; :meth:`set_optimizer` resets them.

        In stores with workers every worker calls it with the same rate, between the same pushes.

        Args:
            lr: The learning rate, before the keys' factors.

        Raises:
            KVStoreError: The store has no optimizer.
            UserWarning: The optimizer has a scheduler, which gives the rate.
        """
        with self._lock:
            self._running_optimizer().set_learning_rate(float(lr))

    def _running_optimizer(self) -> Any:
        updater = self._updater.updater if isinstance(self._updater, _ForUser) else self._updater
        optimizer = getattr(updater, "optimizer", None)
        if not hasattr(optimizer, "set_learning_rate"):
            raise KVStoreError(
                "the store has no optimizer whose learning rate could be set: call set_optimizer"
            )
        return optimizer

    def _updater_of(self, updater: Any) -> Callable[[Key, Value, Array], None] | None:
        if updater is None or isinstance(updater, Updater):
            return updater
        if not callable(updater):
            raise TypeError(
                f"a {type(updater).__name__} is no optimizer, no name of one, and can't be called"
            )
        return _ForUser(updater, self._array_types)

    def _set_updater(self, updater: UserUpdater | Updater | None) -> None:
        """Call ``updater(key, received, stored)`` once for each pushed key, with the sum of the pushed values.

        It changes ``stored`` in place. Both are arrays of the framework that the key was initialised with. The push raises its exceptions,
        and no value has changed then. ``None`` removes it.
        """
        with self._lock:
            self._updater = self._updater_of(updater)

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return whether the store runs optimizers: true for ``optimizer`` in any case.

        Args:
            capability: The name, in any case.

        Raises:
            ValueError: It is another word.
        """
        if capability.lower() == KVStoreBase.OPTIMIZER:
            return True
        unknown_capability(capability)

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the states of the optimizer to a file, without pickle.

        Args:
            fname: Its path.
            dump_optimizer: Also write the optimizer's settings and counts, so that training goes on exactly.

        Raises:
            AssertionError: There is no optimizer, or it does not run in this process.
            OSError: The file can't be written; one that was there before is as it was.
        """
        updater = self._own_updater("save")
        with self._lock:
            states = updater.get_states(dump_optimizer)
        # Without the lock: pushes do not wait for the disk.
        write_file(fname, states)

    def load_optimizer_states(self, fname: str) -> None:
        """Load the states that :meth:`save_optimizer_states` wrote.

        Args:
            fname: The path of the file.

        Raises:
            AssertionError: There is no optimizer, or it does not run in this process.
            OSError: The file can't be read.
            KVStoreError: It is no such file; nothing has changed.
        """
        updater = self._own_updater("load")
        with open(fname, "rb") as file:
            data = file.read()
        with self._lock:
            try:
                updater.set_states(data)
            except KVStoreError as error:
                raise KVStoreError(f"{fname}: {error}") from error

    def _finish_pushes(self) -> None:
        """Wait for this worker's pushes and apply them; a store of one process has none that wait."""

    def _own_updater(self, verb: str) -> Updater:
        self._finish_pushes()
        updater = self._updater
        require(isinstance(updater, Updater), f"Cannot {verb} states for distributed training")
        assert isinstance(updater, Updater)
        return updater

    # -- workers and servers ------------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        """Return the settings for a restarted worker, without values and without objects that are this process's own."""
        updater = self._updater
        return {
            "name": self._name,
            "on_devices": self._on_devices,
            "array_types": {key: array_type.name for key, array_type in self._array_types.items()},
            "numbers": self._numbers,
            "updater": updater.updater if isinstance(updater, _ForUser) else updater,
            "compression": self._compression,
        }

    def _restore_settings(self, settings: Mapping[str, Any]) -> None:
        KVStore.__init__(self, settings["name"], on_devices=settings["on_devices"])
        self._array_types = {key: array_type_named(name) for key, name in settings["array_types"].items()}
        self._numbers, self._compression = dict(settings["numbers"]), settings["compression"]
        self._updater = self._updater_of(settings["updater"])

    @contextlib.contextmanager
    def _unused(self) -> Iterator[None]:
        """Hold the lock, but do not wait for it: the thread that holds it may, in the end, wait for the caller.

        Raises:
            KVStoreError: Another thread uses the store.
        """
        if not self._lock.acquire(blocking=False):
            raise KVStoreError("another thread uses the store")
        try:
            yield
        finally:
            self._lock.release()

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a store can't be copied: make another by create")

    @property
    def type(self) -> str:
        """Return the name that the store was made with, in lower case."""
        return self._name

    @property
    def rank(self) -> int:
        """Return the number of this worker, from 0."""
        return 0

    @property
    def local_rank(self) -> int:
        """Return the number of this worker among those of its host, from 0."""
        return 0

    @property
    def num_workers(self) -> int:
        """Return the number of workers."""
        return 1

    def barrier(self) -> None:
        """Wait until all workers have called it. That others' pushes are stored is only certain after they have pulled."""

    def _barrier(self) -> None:
        self.barrier()

    def _send_command_to_servers(self, head: int, body: str) -> None:
        """Do nothing: this store has no servers."""

    def servers(self) -> list[ServerInfo]:
        """Return the processes that keep the values; empty if the workers themselves keep them."""
        return []

    def __repr__(self) -> str:
        return f"<KVStore {self.type}: worker {self.rank} of {self.num_workers}, {len(self._values)} keys>"


class _ForUser:
    """Updater of the user, which gets arrays of the user's framework."""

    def __init__(self, updater: UserUpdater, array_types: dict[Key, ArrayType]) -> None:
        self.updater, self._array_types = updater, array_types

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's updater: MXNet's programs read its optimizer and its states."""
        # An object that is being unpickled or copied has no `updater` yet: the lookup of it would come here
        # without end.
        if name.startswith("_") or name == "updater":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.updater, name)

    def __call__(self, key: Key, received: Value, stored: Array) -> None:
        array_type = self._array_types[key]
        weight = array_type.wrap(stored)
        wrap_rows, wrap = array_type.wrap_rows, array_type.wrap
        gradient = wrap_rows(received) if isinstance(received, RowSparse) else wrap(received)
        self.updater(key, gradient, weight)
        changed = array_type.view(weight)
        # The framework may have given the updater a copy.
        if not np.shares_memory(changed, stored):
            np.copyto(stored, changed)


def _viewed(value: Any) -> Value:
    return value if isinstance(value, RowSparse) else view_of(value)


def _copied(value: Any) -> Value:
    if isinstance(value, RowSparse):
        return RowSparse(value.data, value.indices, value.shape)
    return view_of(value).copy(order="C")


def _as_rows(dense: Array) -> RowSparse:
    rows = np.flatnonzero(dense.reshape(len(dense), -1).any(axis=1))
    return RowSparse(dense[rows], rows, dense.shape)


def row_ids_of(key: Any, row_ids: Any, outs: list[tuple[Key, Any]]) -> list[Array]:
    """Return one flat array of row numbers for each output.

    Args:
        key: As the user gave it.
        row_ids: An array for all outputs, a list with one for each, or for several keys a list of lists like that of the outputs.
        outs: The outputs, each with its key.

    Raises:
        AssertionError: There are not as many as outputs, or not in the same lists.
        TypeError: Some are no array.
    """
    given = row_ids if isinstance(row_ids, list | tuple) else [row_ids]
    if any(isinstance(one, list | tuple) for one in given):
        nested = pairs(key, row_ids)
        require(
            [one for one, _ in nested] == [one for one, _ in outs],
            f"{len(nested)} row_ids were given for {len(outs)} outputs, or in other lists than these",
        )
        return [view_of(rows).reshape(-1) for _, rows in nested]
    found = [view_of(rows).reshape(-1) for rows in given]
    if len(found) == 1:
        return found * len(outs)
    require(len(found) == len(outs), f"{len(found)} row_ids were given for {len(outs)} outputs")
    return found


@dataclass(frozen=True, slots=True)
class GradientCompression:
    """Formulas by which gradients are compressed.

    Attributes:
        type: ``2bit`` sends ``+threshold`` where the residual reaches it, ``-threshold`` where it reaches ``-threshold``, otherwise 0;
            ``1bit`` sends +1 where the residual is above the threshold, otherwise -1.
        threshold: Positive for ``2bit``.
    """

    type: str
    threshold: float = 0.5

    @classmethod
    def from_params(cls, params: Any) -> GradientCompression:
        """Make one from a dict with ``type`` and ``threshold`` (default 0.5); other entries are ignored, and values may be text.

        Raises:
            AssertionError: It is no dict.
            KVStoreError: There is no ``type``, or type or threshold are wrong.
        """
        require(isinstance(params, Mapping), f"unexpected type for compression_params: {type(params)}")
        texts = {str(name): str(value) for name, value in params.items()}
        if "type" not in texts:
            raise KVStoreError(f"gradient compression needs a type, one of {', '.join(COMPRESSION_TYPES)}")
        if texts["type"] not in COMPRESSION_TYPES:
            raise KVStoreError(
                f"Unknown type for gradient compression {texts['type']}; known are {', '.join(COMPRESSION_TYPES)}"
            )
        try:
            threshold = float(texts.get("threshold", "0.5"))
        except ValueError:
            raise KVStoreError(f"threshold must be a number, not {texts['threshold']!r}") from None
        if texts["type"] == "2bit" and not threshold > 0:
            raise KVStoreError(f"threshold must be greater than 0, not {threshold:g}")
        return cls(texts["type"], threshold)

    def quantize(self, gradient: Floats, residual: Floats, out: Floats) -> None:
        """Compress a gradient: write the part to send to ``out``, and keep the rest for the next one.

        Args:
            gradient: The gradient, flat and contiguous, float32.
            residual: The rest that earlier calls have not sent, of the same size, zeros at first; changed in place.
            out: Gets the values that are sent, of the same size; may be ``gradient``.
        """
        t = np.float32(self.threshold)
        high, low = np.empty((2, min(_COMPRESSED_AT_ONCE, gradient.size)), np.bool_)
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, gradient.size, _COMPRESSED_AT_ONCE):
                r, q = residual[start : start + _COMPRESSED_AT_ONCE], out[start : start + _COMPRESSED_AT_ONCE]
                above, below = high[: r.size], low[: r.size]
                np.add(r, gradient[start : start + _COMPRESSED_AT_ONCE], out=r)
                if self.type == "2bit":
                    # The difference of two comparisons is 1, -1 or 0; its product with the threshold is exact.
                    np.greater_equal(r, t, out=above)
                    np.less_equal(r, -t, out=below)
                    signs = above.view(np.int8)
                    np.subtract(signs, below.view(np.int8), out=signs)
                    np.copyto(q, signs)
                    np.multiply(q, t, out=q)
                else:
                    np.greater(r, t, out=above)
                    np.copyto(q, above)
                    np.multiply(q, np.float32(2), out=q)
                    np.subtract(q, np.float32(1), out=q)
                np.subtract(r, q, out=r)

    def pack(self, quantized: Floats) -> Bytes:
        """Pack the output of :meth:`quantize` into bits in MXNet's layout: the first value in the top bits of byte 0.

        ``2bit``: 11 plus, 10 minus, 00 zero, in whole float32 words of 16 values. ``1bit``: 1 plus, 0 minus, in words of 32.
        """
        if self.type == "1bit":
            bits = np.zeros(-(-quantized.size // 32) * 32, np.uint8)
            bits[: quantized.size] = quantized > 0
            return np.packbits(bits)
        bits = np.zeros((-(-quantized.size // 16) * 16, 2), np.uint8)
        bits[: quantized.size, 0] = quantized != 0
        bits[: quantized.size, 1] = quantized > 0
        return np.packbits(bits)

    def unpack(self, packed: Bytes, size: int) -> Floats:
        """Reverse :meth:`pack`, for ``size`` values."""
        bits = np.unpackbits(packed)
        if self.type == "1bit":
            return np.where(bits[:size] == 1, np.float32(1), np.float32(-1))
        sent, plus = bits.reshape(-1, 2)[:size].T
        values = np.where(plus == 1, np.float32(self.threshold), np.float32(-self.threshold))
        return np.where(sent == 1, values, np.float32(0))
