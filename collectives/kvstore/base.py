"""What all key-value stores have in common, and the registry of those that are classes of their own."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, NoReturn, TypeVar

from hvdlab.collectives.errors import KVStoreError
from hvdlab.collectives.kvstore.arrays import RowSparse, view_of, write
from hvdlab.collectives.kvstore.keys import Key, pairs, require

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
        """Bring rank 0's value to ``out`` on all ranks. See the subclass."""
        raise NotImplementedError(f"{type(self).__name__} has no broadcast")

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Sum ``value`` over all ranks and write the result to ``out``. See the subclass."""
        raise NotImplementedError(f"{type(self).__name__} has no pushpull")

    def set_optimizer(self, optimizer: Any) -> None:
        """Run an optimizer on the values. See the subclass."""
        raise NotImplementedError(f"{type(self).__name__} has no set_optimizer")

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Whether the store can do what ``capability`` names. See the subclass."""
        raise NotImplementedError("is_capable")

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the states of the optimizer to a file. See the subclass."""
        raise NotImplementedError(f"{type(self).__name__} has no save_optimizer_states")

    def load_optimizer_states(self, fname: str) -> None:
        """Read the states of the optimizer from a file. See the subclass."""
        raise NotImplementedError(f"{type(self).__name__} has no load_optimizer_states")

    @property
    def type(self) -> str:
        """The name of the kind of store."""
        raise NotImplementedError(f"{type(self).__name__} has no type")

    @property
    def rank(self) -> int:
        """Number of this worker, from 0."""
        raise NotImplementedError(f"{type(self).__name__} has no rank")

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        raise NotImplementedError(f"{type(self).__name__} has no num_workers")

    @staticmethod
    def register(klass: Class) -> Class:
        """Let ``create`` make stores of this class by its lower-cased name. A decorator.

        An older class of the name is replaced, with a warning.

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
    """A store of one process that keeps nothing: the pattern for stores of one's own."""

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
        """False for ``optimizer``; ``ValueError`` for any other name."""
        if capability.lower() == KVStoreBase.OPTIMIZER:
            return False
        unknown_capability(capability)

    @property
    def type(self) -> str:
        """``teststore``."""
        return "teststore"

    @property
    def rank(self) -> int:
        """0."""
        return 0

    @property
    def num_workers(self) -> int:
        """1."""
        return 1
