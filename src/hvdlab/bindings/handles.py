"""Handles of collectives in flight: ``poll`` and ``synchronize``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from hvdlab.bindings.adapter import Adapter
from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.engine.request import Result
from hvdlab.collectives.errors import CollectiveError, DuplicateNameError, InvalidRequestError
from hvdlab.collectives.planes.buffers import HostArray

T = TypeVar("T")

FAILURES = (CollectiveError, DuplicateNameError)
"""What a collective in flight may end with: it failed, or a rank used its name a second time.

``DuplicateNameError`` is no ``CollectiveError``: elastic training would begin again for ever, instead of showing it.
"""

Deliver = Callable[[T], T]
"""Takes the output in host memory to its place, and returns what the user gets."""


class CoreHandle(Protocol):
    """What a binding needs from a handle of the core."""

    def done(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> Result: ...


class OutputAllocator(Generic[T]):
    """Allocates the output of a collective as a tensor, once its shape is known.

    The core calls it, on its executor thread.
    """

    __slots__ = ("_adapter", "_like", "_tensor")

    def __init__(self, adapter: Adapter[T], like: T) -> None:
        self._adapter = adapter
        self._like = like
        self._tensor: T | None = None

    def __call__(self, shape: tuple[int, ...]) -> HostArray:
        tensor = self._tensor = self._adapter.empty(shape, self._like)
        return self._adapter.host_view(tensor)

    @property
    def allocated(self) -> T:
        """The output; only after the collective is complete."""
        assert self._tensor is not None, "the core completed a collective without asking for its output"
        return self._tensor


class Part(Generic[T]):
    """One tensor of a handle.

    It holds on to the user's tensor and to the memory the core works on for as long as the collective may run.
    """

    __slots__ = ("_core", "_deliver", "_output", "_result")

    def __init__(self, core: CoreHandle, output: T | OutputAllocator[T], deliver: Deliver[T] | None) -> None:
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
        """Whether :meth:`wait` would return, or raise, without waiting for another rank."""
        return self._core.done()

    def wait(self, timeout: float | None = None) -> T:
        """The output, delivered to where the user expects it. Raises what the core's handle raises."""
        self._result = self._core.wait(timeout)
        return delivered(self._output, self._deliver)


def delivered(output: T | OutputAllocator[T], deliver: Deliver[T] | None) -> T:
    """The output of a collective that is complete, where the user expects it."""
    tensor: Any = output.allocated if isinstance(output, OutputAllocator) else output
    given: T = tensor if deliver is None else deliver(tensor)
    return given


Finish = Callable[[list[T], Sequence[Part[T]]], Any]
"""Makes what ``synchronize`` returns of the outputs."""


class Handle:
    """A collective, or a group of them, in flight. Made by the ``*_async`` functions.

    Its tensors are kept alive until it is done. Like the functions that take it, it may be used from any thread,
    but by one at a time.

    Attributes:
        tables: Once it is done: for each tensor the numbers that each member announced, by position (for an
            allgather its rows, for an alltoall its splits).
    """

    __slots__ = ("_failure", "_finish", "_parts", "_result", "_settled", "tables")

    def __init__(self, parts: Sequence[Part[Any]], finish: Finish[Any]) -> None:
        self._parts = parts
        self._finish = finish
        self._result: Any = None
        self.tables: list[tuple[tuple[int, ...], ...]] = []
        self._failure: CollectiveError | DuplicateNameError | None = None
        self._settled = False

    def done(self) -> bool:
        """Whether :meth:`wait` would return (or raise) at once."""
        return self._settled or all(part.done() for part in self._parts)

    def wait(self, timeout: float | None = None) -> Any:
        """Wait, and return the result; the same one each time.

        Args:
            timeout: Seconds for all tensors together, or ``None`` for ever.

        Raises:
            CollectiveError, DuplicateNameError: The first error, once *all* tensors are settled, so that none is
                written to afterwards; outputs are undefined then.
            TimeoutError: It is still in flight, and may be waited for again.
            KeyboardInterrupt: The user interrupted; the handle stays valid.
        """
        if not self._settled:
            self._settle(timeout)
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        return self._result

    def __call__(self) -> Any:
        """The same as :meth:`wait`: what Horovod's ``sparse_allreduce_async`` returns is called, not synchronized."""
        return self.wait()

    def _settle(self, timeout: float | None) -> None:
        deadline = None if timeout is None else Deadline(timeout)
        outputs: list[Any] = []
        failure: CollectiveError | DuplicateNameError | None = None
        for part in self._parts:
            try:
                outputs.append(part.wait(None if deadline is None else deadline.remaining()))
            except FAILURES as error:
                failure = failure or error
        if failure is None:
            self.tables = [part.result.tables for part in self._parts]
            self._result = self._finish(outputs, self._parts)
        self._failure, self._settled = failure, True
        self._parts = ()  # let go of the tensors


def only(outputs: list[T], parts: Sequence[Part[T]]) -> T:
    """Finish a handle of one tensor."""
    return outputs[0]


def every(outputs: list[T], parts: Sequence[Part[T]]) -> list[T]:
    """Finish a handle of a group."""
    return outputs


def poll(handle: Handle) -> bool:
    """Whether ``synchronize(handle)`` would return, or raise, without waiting.

    Raises:
        InvalidRequestError: ``handle`` is none.
    """
    return checked(handle).done()


def synchronize(handle: Handle, timeout: float | None = None) -> Any:
    """Wait for an asynchronous collective and return its result; see :meth:`Handle.wait`."""
    return checked(handle).wait(timeout)


def checked(handle: Handle) -> Handle:
    """A user's handle; raises ``InvalidRequestError`` if it is something else."""
    if not isinstance(handle, Handle):
        raise InvalidRequestError(
            f"Expected the handle that an *_async function returned, not {type(handle).__name__}."
        )
    return handle
