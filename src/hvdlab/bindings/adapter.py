"""Adapter of a framework's tensors for the bindings.

Example:
    >>> import numpy as np
    >>> from hvdlab.numpy.adapter import ADAPTER
    >>> ADAPTER.shape(np.ones((2, 3)))
    (2, 3)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, Protocol, TypeVar

from hvdlab.collectives.planes.base import Buffer, HostArray
from hvdlab.collectives.planes.base import Tensor as CoreTensor
from hvdlab.collectives.types import DType, OpKind

T = TypeVar("T")


class FrameworkAdapter(Protocol[T]):
    """Adapter of a framework's tensors, as far as collectives use them.

    All functions are called on the thread that submits or waits, but for :meth:`empty` and :meth:`host_view`, which
    the engine's executor thread calls, too. None of them may submit a collective.

    Besides errors of its own, a function raises only ``InvalidRequestError`` and its subclass ``UnsupportedError``.
    """

    def check(self, value: Any, kind: OpKind, in_place: bool) -> T:
        """Return the tensor that a user gave to a collective.

        Args:
            value: The user's argument. A binding may accept more than tensors, such as lists.
            kind: The collective, for the error's text.
            in_place: Whether the collective will write its result to the tensor.

        Raises:
            InvalidRequestError: ``value`` is no tensor, or can't be written to.
        """
        ...

    def is_tensor(self, value: Any) -> bool:
        """Return whether a value is one tensor, as opposed to a list of tensors."""
        ...

    def dtype(self, tensor: T) -> DType:
        """Return a tensor's element type; raises ``UnsupportedError`` if the core has none for it."""
        ...

    def shape(self, tensor: T) -> tuple[int, ...]:
        """Return the dimensions of a tensor."""
        ...

    def is_direct(self, tensor: T) -> bool:
        """Return whether the core can read and write a tensor's own memory: C-contiguous and in host memory."""
        ...

    def host_view(self, tensor: T) -> HostArray:
        """Return the memory of a direct tensor, in the core's storage type; the view keeps that memory alive."""
        ...

    def stage(self, tensor: T) -> T:
        """Return a direct copy of any tensor. Raises ``UnsupportedError`` for one without plain elements."""
        ...

    def empty_like(self, tensor: T) -> T:
        """Return a direct tensor of the shape and dtype of another direct one, without gradient."""
        ...

    def empty(self, shape: tuple[int, ...], like: T) -> T:
        """Return a direct tensor of this shape, and of the dtype of the tensor ``like``. May be called on any thread."""
        ...

    def deliver(self, output: T, into: T) -> None:
        """Copy an output ``into`` a tensor that is not direct but was given in place; unseen by automatic differentiation."""
        ...

    def placed(self, output: T, like: T) -> T:
        """Return an output in host memory, where the user expects it: on the device of the staged tensor ``like``."""
        ...

    def mark_written(self, tensor: T) -> None:
        """Record that the core is about to write to this direct tensor, which automatic differentiation can't see."""
        ...

    def requires_grad(self, tensors: Sequence[Any]) -> bool:
        """Return whether a collective of these tensors must be recorded for differentiation. :meth:`check` has not seen them yet."""
        ...

    def received_splits(self, counts: tuple[int, ...]) -> Any:
        """Return the second result of an alltoall: the counts of rows that came from each member."""
        ...


class DeviceMemory(Protocol[T]):
    """Device memory of a framework: its tensors on devices, for process sets that have a data plane for these.

    For a framework without it, tensors on devices are staged through the host. The rules of :class:`FrameworkAdapter` for threads
    and errors hold here, too; work of the device that a tensor depends on need not be done when a function returns.
    """

    def device(self, tensor: T) -> str:
        """Return the device class that a tensor is on, such as ``cuda``; ``cpu`` for one of the host, or without plain elements."""
        ...

    def is_direct(self, tensor: T) -> bool:
        """Return whether a tensor of a device is C-contiguous, so that a plane can work on its own memory."""
        ...

    def view(self, tensor: T) -> Buffer:
        """Return the memory of a direct tensor; valid once all work that the calling thread has submitted for it is done."""
        ...

    def views_together(self) -> AbstractContextManager[None]:
        """Return a context in which the calling thread's views are ordered behind its work once, at the end, instead of tensor by tensor."""
        ...

    def stage(self, tensor: T) -> T:
        """Return a direct copy of a tensor, on its device."""
        ...

    def empty_like(self, tensor: T) -> T:
        """Return a direct tensor of the shape, dtype and device of another one, without gradient."""
        ...

    def empty(self, shape: tuple[int, ...], like: T) -> T:
        """Return a direct tensor of this shape, of the dtype and device of the tensor ``like``. May be called on any thread."""
        ...

    def received(self, output: T) -> T:
        """Return the tensor that the user gets for an output. Called by the user's thread; another thread may have allocated it."""
        ...


class Memory(Protocol[T]):
    """Base of :class:`HostMemory` and :class:`DeviceMemory`: the memory in which a collective works."""

    def view(self, tensor: T) -> CoreTensor:
        """Return the memory of a direct tensor, as the core knows it."""
        ...

    def empty(self, shape: tuple[int, ...], like: T) -> T:
        """Return a direct tensor of this shape, and of the dtype of the tensor ``like``. May be called on any thread."""
        ...


class HostMemory(Generic[T]):
    """Tensors in the host's memory, as an adapter knows them."""

    __slots__ = ("empty", "empty_like", "is_direct", "stage", "view")

    def __init__(self, adapter: FrameworkAdapter[T]) -> None:
        self.is_direct = adapter.is_direct
        self.view = adapter.host_view
        self.stage = adapter.stage
        self.empty_like = adapter.empty_like
        self.empty = adapter.empty
