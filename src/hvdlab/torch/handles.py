"""Handles of collectives in flight: ``poll`` and ``synchronize``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from hvdlab.collectives.engine.request import Result
from hvdlab.collectives.errors import CollectiveError, DuplicateNameError, InvalidRequestError
from hvdlab.torch.compiling import untraced
from hvdlab.torch.conversion import OutputAllocator

FAILURES = (CollectiveError, DuplicateNameError)
"""What a collective in flight may end with: it failed, or a rank used its name a second time."""

Deliver = Callable[[torch.Tensor], torch.Tensor]
"""Takes the output in host memory to its place: into a staged tensor, or to another device."""


Finish = Callable[[list[torch.Tensor], Sequence["Part"]], Any]
"""Makes what ``synchronize`` returns of the outputs."""


class CoreHandle(Protocol):
    """What a binding needs from a handle of the core."""

    def done(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> Result: ...


class Part:
    """One tensor of a handle.

    It holds on to the user's tensor and to the memory the core works on for as long as the collective may run.
    """

    __slots__ = ("_core", "_deliver", "_output", "_result")

    def __init__(
        self, core: CoreHandle, output: torch.Tensor | OutputAllocator, deliver: Deliver | None
    ) -> None:
        self._core = core
        self._output = output
        self._deliver = deliver
        self._result: Result | None = None

    @property
    def result(self) -> Result:
        """What the core said of it; only after :meth:`wait`."""
        assert self._result is not None
        return self._result

    def done(self) -> bool:
        return self._core.done()

    def wait(self) -> torch.Tensor:
        """The output, delivered to where the user expects it."""
        self._result = self._core.wait()
        output = self._output
        if isinstance(output, OutputAllocator):
            output = output.allocated
        return output if self._deliver is None else self._deliver(output)


class Handle:
    """A collective, or a group of them, in flight. Made by the ``*_async`` functions.

    Its tensors are kept alive until it is done. Like the functions that take it, it may be used from any thread,
    but by one at a time.

    Attributes:
        tables: Once it is done: for each tensor the numbers that each member announced, by position (for an
            allgather its rows, for an alltoall its splits).
    """

    __slots__ = ("_failure", "_finish", "_parts", "_result", "_settled", "tables")

    def __init__(self, parts: Sequence[Part], finish: Finish) -> None:
        self._parts = parts
        self._finish = finish
        self._result: Any = None
        self.tables: list[tuple[tuple[int, ...], ...]] = []
        self._failure: CollectiveError | DuplicateNameError | None = None
        self._settled = False

    def done(self) -> bool:
        """Whether :meth:`wait` would return (or raise) at once."""
        return self._settled or all(part.done() for part in self._parts)

    def wait(self) -> Any:
        """Wait, and return the result; the same one each time.

        Raises the first error once *all* tensors are settled, so that none is written to afterwards; outputs are
        undefined then. ``KeyboardInterrupt`` leaves the handle pending.
        """
        if not self._settled:
            self._settle()
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        return self._result

    def __call__(self) -> Any:
        """The same as :meth:`wait`: what Horovod's ``sparse_allreduce_async`` returns is called, not synchronized."""
        return self.wait()

    def _settle(self) -> None:
        outputs: list[torch.Tensor] = []
        failure: CollectiveError | DuplicateNameError | None = None
        for part in self._parts:
            try:
                outputs.append(part.wait())
            except FAILURES as error:
                failure = failure or error
        if failure is None:
            self.tables = [part.result.tables for part in self._parts]
            self._result = self._finish(outputs, self._parts)
        self._failure, self._settled = failure, True
        self._parts = ()  # let go of the tensors


def only(outputs: list[torch.Tensor], parts: Sequence[Part]) -> torch.Tensor:
    """Finish a handle of one tensor."""
    return outputs[0]


def every(outputs: list[torch.Tensor], parts: Sequence[Part]) -> list[torch.Tensor]:
    """Finish a handle of a group."""
    return outputs


def with_splits(outputs: list[torch.Tensor], parts: Sequence[Part]) -> tuple[torch.Tensor, torch.Tensor]:
    """Finish an alltoall: the output, and how many of its rows came from each member."""
    return outputs[0], received_splits(parts[0].result)


def received_splits(result: Result) -> torch.Tensor:
    """What ``alltoall`` returns besides its output: int32, one number for each member."""
    return torch.tensor(result.received_splits or (), dtype=torch.int32)


@untraced
def poll(handle: Handle) -> bool:
    """Whether ``synchronize(handle)`` would return, or raise, without waiting."""
    return _checked(handle).done()


@untraced
def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous collective and return its result.

    Args:
        handle: What an ``*_async`` function returned.

    Returns:
        The output tensor (the given one for in-place functions); for a grouped function the list of outputs; for
        ``alltoall_async`` the pair of the output and the received splits. Asking again gives the same.

    Raises:
        MismatchError: The ranks disagree about the collective.
        AbortedError: It can't complete (a rank failed, left, was interrupted, ...); the group goes on.
        DuplicateNameError: Another rank submitted its name twice.

    After an error the outputs, and tensors given in place, are undefined.
    """
    return _checked(handle).wait()


def _checked(handle: Handle) -> Handle:
    if not isinstance(handle, Handle):
        raise InvalidRequestError(
            f"Expected the handle that an *_async function returned, not {type(handle).__name__}."
        )
    return handle
