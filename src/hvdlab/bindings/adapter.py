"""What a framework tells the bindings of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from hvdlab.collectives.dtypes import DType, OpKind
from hvdlab.collectives.planes.buffers import HostArray

T = TypeVar("T")


class Adapter(Protocol[T]):
    """A framework's tensors, as far as collectives care.

    All functions are called on the thread that submits or waits, but for :meth:`empty` and :meth:`host_view`, which
    the engine's executor thread calls, too. None of them may submit a collective.

    Besides errors of its own, a function raises only ``InvalidRequestError`` and its subclass ``UnsupportedError``.
    """

    def check(self, value: Any, kind: OpKind, in_place: bool) -> T:
        """The tensor that a user gave to a collective.

        Args:
            value: What the user gave. A binding may take more than tensors, such as lists.
            kind: The collective, for the error's text.
            in_place: Whether the result is to be written to it.

        Raises:
            InvalidRequestError: It is none, or can't be written to.
        """
        ...

    def is_tensor(self, value: Any) -> bool:
        """Whether this is one tensor, as opposed to a list of tensors."""
        ...

    def dtype(self, tensor: T) -> DType:
        """Its element type; raises ``UnsupportedError`` if the core has none for it."""
        ...

    def shape(self, tensor: T) -> tuple[int, ...]:
        """Its dimensions."""
        ...

    def is_direct(self, tensor: T) -> bool:
        """Whether the core can read and write its own memory: C-contiguous and in host memory."""
        ...

    def host_view(self, tensor: T) -> HostArray:
        """The memory of a direct tensor, in the core's storage type; the view keeps that memory alive."""
        ...

    def stage(self, tensor: T) -> T:
        """A direct copy of any tensor. Raises ``UnsupportedError`` for one without plain elements."""
        ...

    def empty_like(self, tensor: T) -> T:
        """A direct tensor of the shape and dtype of another direct one, without gradient."""
        ...

    def empty(self, shape: tuple[int, ...], like: T) -> T:
        """A direct tensor of this shape, and of the dtype of another one. May be called on any thread."""
        ...

    def deliver(self, output: T, into: T) -> None:
        """Copy a result to a tensor that is not direct but was given in place; unseen by automatic differentiation."""
        ...

    def placed(self, output: T, like: T) -> T:
        """A result in host memory, where the user expects it: on the device of the tensor that was staged."""
        ...

    def mark_written(self, tensor: T) -> None:
        """The core is about to write to this direct tensor, which automatic differentiation can't see."""
        ...

    def requires_grad(self, tensors: Sequence[Any]) -> bool:
        """Whether a collective of these is to be recorded for differentiation. They were not checked yet."""
        ...

    def received_splits(self, counts: tuple[int, ...]) -> Any:
        """What an alltoall returns besides its output: how many rows came from each member."""
        ...
