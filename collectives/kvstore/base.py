"""Interface of key-value stores, the registry of classes that users add, and the checks of keys and values that users give."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np

from hvdlab.collectives.errors import KVStoreError
from hvdlab.collectives.kvstore.arrays import RowSparse, adopted, is_array, view_of, write

Key = int | str


INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def require(condition: bool, text: str) -> None:
    """Raise ``AssertionError``, as MXNet does for arguments, unless the condition holds."""
    if not condition:
        raise AssertionError(text)


def pairs(keys: Any, values: Any) -> list[tuple[Key, Any]]:
    """Return one pair for each array: a list for one key gives as many pairs. Row-sparse arrays of frameworks come as :class:`RowSparse`.

    Args:
        keys: An int, a str, or a list or tuple of these, all of one kind.
        values: For one key an array or a list of arrays; for a list of keys a list with one of these for each.

    Raises:
        AssertionError: A key is neither int nor str, kinds are mixed, counts differ, or a value is no array.
        TypeError: A value is neither an array nor a list.
        ValueError: An int key has more than 32 bits.
    """
    if isinstance(keys, list | tuple):
        require(not is_array(values) and len(keys) == len(values), f"{len(keys)} keys need as many values")
        found = [pair for key, value in zip(keys, values, strict=True) for pair in pairs(key, value)]
        require(len({type(key) for key, _ in found}) <= 1, "inconsistent types of keys detected.")
        return found
    require(isinstance(keys, int | str), f"unexpected type for keys: {type(keys)}")
    key: Key = str(keys) if isinstance(keys, str) else int(keys)
    if isinstance(key, int) and not INT_MIN <= key <= INT_MAX:
        raise ValueError(f"key {key} does not fit into 32 bits")
    if type(values) is np.ndarray:
        return [(key, values)]
    if is_array(values):
        return [(key, adopted(values))]
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        raise TypeError(
            f"the value of key {key!r} is a {type(values).__name__}, not an array or a list of arrays"
        )
    arrays = list(values)
    for value in arrays:
        require(is_array(value), f"a value of key {key!r} is a {type(value).__name__}, not an array")
    return [(key, adopted(value)) for value in arrays]


def grouped(found: list[tuple[Key, Any]], numbers: Mapping[Key, int]) -> dict[Key, list[Any]]:
    """Return the values of each key, in the order given; keys in MXNet's order: numbers by size, names in order of init."""
    if len(found) == 1:
        return {found[0][0]: [found[0][1]]}
    groups: dict[Key, list[Any]] = {}
    for key, value in found:
        groups.setdefault(key, []).append(value)
    unknown = len(numbers)
    order = sorted(groups, key=lambda key: key if isinstance(key, int) else numbers.get(key, unknown))
    return {key: groups[key] for key in order}


def unknown_key(key: Key) -> KVStoreError:
    """Return the error for a key that was never initialised."""
    text = (
        f"key {key} doesn't exist. Did you init?"
        if isinstance(key, str)
        else f"key {key} has not been inited"
    )
    return KVStoreError(text, key)


Class = TypeVar("Class", bound=type)


class KVStoreBase:
    """Base of all stores. A subclass that is registered is made by ``create`` with its name.

    Attributes:
        OPTIMIZER: Name of the capability to run an optimizer on the values.
        kv_registry: Registered classes by lower-cased name.
    """

    OPTIMIZER = "optimizer"
    kv_registry: ClassVar[dict[str, type]] = {}

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Bring rank 0's value to ``out`` on all ranks. See the subclass.

        Args:
            key: An integer or a string, or a list of these.
            value: An array, or a list of arrays.
            out: Arrays that get the result, of the same shapes.
            priority: More urgent collectives have a higher one.
        """
        raise NotImplementedError(f"{type(self).__name__} has no broadcast")

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Sum ``value`` over all ranks and write the result to ``out``. See the subclass.

        Args:
            key: An integer or a string, or a list of these.
            value: An array, or a list of arrays.
            out: Arrays that get the result; by default ``value``.
            priority: More urgent collectives have a higher one.
        """
        raise NotImplementedError(f"{type(self).__name__} has no pushpull")

    def set_optimizer(self, optimizer: Any) -> None:
        """Run an optimizer on the values. See the subclass."""
        raise NotImplementedError(f"{type(self).__name__} has no set_optimizer")

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return whether the store has this capability. See the subclass."""
        raise NotImplementedError("is_capable")

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the states of the optimizer to the file ``fname``, with ``dump_optimizer`` also the optimizer. See the subclass."""
        raise NotImplementedError(f"{type(self).__name__} has no save_optimizer_states")

    def load_optimizer_states(self, fname: str) -> None:
        """Read the states of the optimizer from the file ``fname``. See the subclass."""
        raise NotImplementedError(f"{type(self).__name__} has no load_optimizer_states")

    @property
    def type(self) -> str:
        """Return the name of the kind of store."""
        raise NotImplementedError(f"{type(self).__name__} has no type")

    @property
    def rank(self) -> int:
        """Return the number of this worker, from 0."""
        raise NotImplementedError(f"{type(self).__name__} has no rank")

    @property
    def num_workers(self) -> int:
        """Return the number of workers."""
        raise NotImplementedError(f"{type(self).__name__} has no num_workers")

    @staticmethod
    def register(klass: Class) -> Class:
        """Let ``create`` make stores of this class by its lower-cased name. A decorator.

        An older class of the name is replaced, with a warning.

        Args:
            klass: The class, a subclass of :class:`KVStoreBase`.

        Returns:
            The class itself.

        Raises:
            AssertionError: It is no class.
        """
        require(isinstance(klass, type), f"only classes can be registered, not {klass!r}")
        name = klass.__name__.lower()
        if name in KVStoreBase.kv_registry:
            warnings.warn(
                f"{klass.__module__}.{klass.__name__} replaces the store {name!r} that was registered before",
                stacklevel=2,
            )
        KVStoreBase.kv_registry[name] = klass
        return klass


def unknown_capability(capability: Any) -> NoReturn:
    """Raise ``ValueError`` for the name of a capability that does not exist."""
    raise ValueError(f"Unknown capability: {capability}")


def write_dense(key: Key, target: Any, source: Any) -> None:
    """Copy a dense array into another of the same shape, of any framework.

    Raises:
        KVStoreError: The shapes differ, or the target is row-sparse.
    """
    if isinstance(target, RowSparse):
        raise KVStoreError(f"the output of key {key!r} is row-sparse, its value is dense", key)
    shape = view_of(target).shape
    if shape != source.shape:
        raise KVStoreError(f"the value of key {key!r} has shape {source.shape}, its output {shape}", key)
    write(target, source)


@KVStoreBase.register
class TestStore(KVStoreBase):
    """Store of one process that keeps nothing: the pattern for stores of one's own."""

    __test__: ClassVar[bool] = False  # pytest takes classes of this name for its own

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Copy ``value`` to ``out``, or to each array of it.

        Args:
            key: An int or a str; it names the value and is not remembered.
            value: An array.
            out: An array or a list of arrays, of the same shape.
            priority: Changes nothing.

        Raises:
            AssertionError, TypeError: An argument is no key or no array.
            KVStoreError: The shapes differ.
        """
        source = view_of(value)
        for found, target in pairs(key, out):
            write_dense(found, target, source)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Sum a list of arrays and write the sum to ``out``, or to all of ``value``.

        Args:
            key: An int or a str.
            value: An array or a list of arrays of one shape.
            out: An array or a list of arrays; ``None`` for ``value`` itself.
            priority: Changes nothing.

        Raises:
            AssertionError, TypeError: An argument is no key or no array.
            KVStoreError: The shapes differ.
        """
        arrays = [view_of(array) for _, array in pairs(key, value)]
        total = arrays[0].copy()
        for array in arrays[1:]:
            if array.shape != total.shape:
                raise KVStoreError(
                    f"key {key!r} was given arrays of shapes {total.shape} and {array.shape}", key
                )
            total += array
        for found, target in pairs(key, value if out is None else out):
            write_dense(found, target, total)

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return false for ``optimizer``; raise ``ValueError`` for any other name."""
        if capability.lower() == KVStoreBase.OPTIMIZER:
            return False
        unknown_capability(capability)

    @property
    def type(self) -> str:
        """Return ``teststore``."""
        return "teststore"

    @property
    def rank(self) -> int:
        """Return 0."""
        return 0

    @property
    def num_workers(self) -> int:
        """Return 1."""
        return 1
