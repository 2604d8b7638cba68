"""Handles of collectives in flight: ``poll`` and ``synchronize``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from hvdlab.bindings.adapter import Memory
from hvdlab.collectives.engine.requests import CompletionHook, Result
from hvdlab.collectives.errors import CollectiveError, DuplicateNameError, InvalidRequestError
from hvdlab.collectives.planes.base import Tensor
from hvdlab.collectives.text import LOG
from hvdlab.collectives.time_limits import Deadline

T = TypeVar("T")

FAILURES = (CollectiveError, DuplicateNameError)
"""The errors that a collective in flight may end with: it failed, or a rank used its name a second time.

``DuplicateNameError`` is no ``CollectiveError``: elastic training would begin again for ever, instead of showing it.
"""

Deliver = Callable[[T], T]
"""Takes the output in host memory to its place, and returns what the user gets."""


class CoreHandle(Protocol):
    """Handle of the core, as far as a binding uses it."""

    def done(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> Result: ...

    def add_hook(self, hook: CompletionHook) -> bool:
        """Have ``hook`` called when the collective ends; returns ``False``, without calling it, if it has ended already.

        At most one hook for each handle. The same hook may be given again, after an interrupt.
        """
        ...

    def tell_blocked(self, seconds: float) -> None:
        """Record that the user's code has waited for it for ``seconds``, on a thread that does not call :meth:`wait`."""
        ...

    def tell_unblocked(self) -> None:
        """Record that the user's code waits no more."""
        ...


class OutputAllocator(Generic[T]):
    """Allocator of a collective's output as a tensor, once its shape is known.

    The core calls it, on its executor thread.
    """

    __slots__ = ("_like", "_memory", "_tensor")

    def __init__(self, memory: Memory[T], like: T) -> None:
        self._memory = memory
        self._like = like
        self._tensor: T | None = None

    def __call__(self, shape: tuple[int, ...]) -> Tensor:
        tensor = self._tensor = self._memory.empty(shape, self._like)
        return self._memory.view(tensor)

    @property
    def allocated(self) -> T:
        """Return the output; only after the collective is complete."""
        assert self._tensor is not None, "the core completed a collective without asking for its output"
        return self._tensor


class Part(Generic[T]):
    """One tensor of a handle.

    It holds on to the user's tensor and to the memory the core works on for as long as the collective may run.
    """

    __slots__ = ("_core", "_deliver", "_delivered", "_output", "_result")

    def __init__(self, core: CoreHandle, output: T | OutputAllocator[T], deliver: Deliver[T] | None) -> None:
        self._core = core
        self._output = output
        self._deliver = deliver
        self._result: Result | None = None
        #: The result of :meth:`delivered`, in a tuple of its own: a framework's tensors can be falsy, or ``None``.
        self._delivered: tuple[T] | None = None

    @property
    def result(self) -> Result:
        """Return the core's result; only after :meth:`wait`."""
        assert self._result is not None
        return self._result

    def done(self) -> bool:
        """Return whether :meth:`wait` would return, or raise, without waiting for another rank."""
        return self._core.done()

    def add_hook(self, hook: CompletionHook) -> bool:
        """See :meth:`CoreHandle.add_hook`."""
        return self._core.add_hook(hook)

    def tell_blocked(self, seconds: float) -> Callable[[], None]:
        """See :meth:`Handle.tell_blocked`."""
        self._core.tell_blocked(seconds)
        return self._core.tell_unblocked

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the output is complete. Raises the same errors as the core's handle."""
        self._result = self._core.wait(timeout)

    def delivered(self) -> T:
        """Return the output, delivered to where the user expects it; only after :meth:`wait`, and by one thread at a time."""
        if self._delivered is None:
            self._delivered = (delivered(self._output, self._deliver),)
        return self._delivered[0]


def delivered(output: T | OutputAllocator[T], deliver: Deliver[T] | None) -> T:
    """Return the output of a collective that is complete, where the user expects it."""
    tensor: Any = output.allocated if isinstance(output, OutputAllocator) else output
    given: T = tensor if deliver is None else deliver(tensor)
    return given


Finish = Callable[[list[T], Sequence[Part[T]]], Any]
"""Makes what ``synchronize`` returns of the outputs."""


class Handle:
    """A collective, or a group of them, in flight. Made by the ``*_async`` functions.

    Its tensors are kept alive until it is done. Like the functions that accept it, it may be used from any thread.

    Args:
        parts: The tensors in flight.
        finish: Makes the result of the outputs.

    Attributes:
        tables: Once it is done: for each tensor the numbers that each member announced, by position (for an
            allgather its rows, for an alltoall its splits).
    """

    __slots__ = ("_completion", "_failure", "_finish", "_lock", "_parts", "_result", "_settled", "tables")

    def __init__(self, parts: Sequence[Part[Any]], finish: Finish[Any]) -> None:
        self._parts = parts
        self._finish = finish
        self._result: Any = None
        self.tables: list[tuple[tuple[int, ...], ...]] = []
        self._failure: CollectiveError | DuplicateNameError | None = None
        #: Whether result or failure are there. Set last, since :meth:`wait` reads it without the lock.
        self._settled = False
        #: Held while outputs are delivered and while the handle is settled, never during a wait. Two threads may wait, one
        #: of them in a callback; delivering a second time would overwrite an output that the user may be changing already.
        self._lock = threading.Lock()
        #: Made by the first :meth:`add_done_callback`: most handles do without, and cost the engine no hook.
        self._completion: _Completion | None = None

    def done(self) -> bool:
        """Return whether :meth:`wait` would return (or raise) at once."""
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
            # The same object is raised each time: with its last traceback it would keep the frames of that
            # call alive.
            raise self._failure.with_traceback(None)
        return self._result

    def tell_blocked(self, seconds: float) -> Callable[[], None] | None:
        """Let the other ranks know that the user's code can't go on before this has ended, so that deadlocks are found.

        :meth:`wait` reports the wait by itself; this is for a framework that waits otherwise.

        Args:
            seconds: For how long it has waited.

        Returns:
            A function to call when it waits no more; ``None`` if the collective has ended, and no wait was reported.
        """
        part = next((part for part in self._parts if not part.done()), None)
        return None if part is None else part.tell_blocked(seconds)

    def __call__(self) -> Any:
        """Wait as :meth:`wait` does: the result of Horovod's ``sparse_allreduce_async`` is called, not synchronized."""
        return self.wait()

    def add_done_callback(self, callback: Callable[[Handle], object]) -> None:
        """Have ``callback(handle)`` called once the collective is finished, for a group: all its tensors.

        It is called once, however the collective ends: with a result, with an error, after an abort or Ctrl-C, or
        because hvdlab was shut down. Inside, ``handle.wait()`` (or ``hvd.synchronize(handle)``) returns the result, or
        raises the error, without waiting. Several callbacks are called in the order in which they were added.
        If Ctrl-C strikes within ``add_done_callback`` itself, the callback is called once or not at all.

        Args:
            callback: Called with this handle. If the collective is finished already, it is called at once, on this
                thread; otherwise on a thread of hvdlab's, on which other collectives and messages wait meanwhile, and
                perhaps after ``synchronize`` has returned on another. So it must be quick, and safe to be called on
                any thread. It may submit further collectives, but must not wait for them (which raises
                ``InvalidRequestError`` on hvdlab's threads) and must not call ``hvd.shutdown()``. An exception that it
                raises is logged, and has no effect on the collective or on other callbacks.
        """
        with self._lock:
            if self._completion is None:
                # A handle that has ended has no parts: its completion counts none, and add() calls at once.
                self._completion = _Completion(self, self._parts)
            completion = self._completion
        # Before the hooks: the last part can end while they are added, and the thread of its end calls those
        # callbacks that it finds.
        completion.add(callback, self)
        completion.add_hooks()

    def _settle(self, timeout: float | None) -> None:
        deadline = None if timeout is None else Deadline(timeout)
        parts = self._parts
        failure: CollectiveError | DuplicateNameError | None = None
        for part in parts:
            try:
                part.wait(None if deadline is None else deadline.remaining())
            except FAILURES as error:
                failure = failure or error
            else:
                with self._lock:
                    # As soon as it is there: the copy to the user's tensor is made while other tensors are
                    # still on their way.
                    part.delivered()
        with self._lock:
            if self._settled:  # by another thread
                return
            if failure is None:
                self.tables = [part.result.tables for part in parts]
                self._result = self._finish([part.delivered() for part in parts], parts)
            # In this order: wait() looks at ``_settled`` without the lock, and then reads the failure and the
            # result.
            self._failure, self._settled = failure, True
            self._parts = ()  # let go of the tensors


class _Completion:
    """The callbacks of a handle, and the completion hooks of its parts, which count those that have ended.

    Args:
        handle: The handle, which is kept alive until the callbacks have been called.
        parts: Its parts.
    """

    __slots__ = ("_callbacks", "_handle", "_left", "_lock", "_unhooked")

    def __init__(self, handle: Handle, parts: Sequence[Part[Any]]) -> None:
        self._handle: Handle | None = handle
        #: The numbers of the parts that have not ended. Not a count: after an interrupt a part can be counted twice.
        self._left = set(range(len(parts)))
        #: The parts that have no hook yet, each with its hook, by number.
        self._unhooked: dict[int, tuple[Part[Any], CompletionHook]] = {
            number: (part, partial(self._ended, number)) for number, part in enumerate(parts)
        }
        #: The callbacks to call when the last part ends.
        self._callbacks: list[Callable[[Handle], object]] = []
        #: Guards the numbers and the callbacks: parts end on the engine's threads while a user's thread adds
        #: callbacks.
        self._lock = threading.Lock()

    def add(self, callback: Callable[[Handle], object], handle: Handle) -> None:
        """Call ``callback`` when the last part ends, or now if it has ended."""
        with self._lock:
            if self._left:
                self._callbacks.append(callback)
                return
        # Outside the lock: the callback can add another one to this handle.
        _call(callback, handle)

    def add_hooks(self) -> None:
        """Add hooks to the parts that have none, also to those that an interrupt has kept from it in an earlier call."""
        for number, (part, hook) in tuple(self._unhooked.items()):
            # An interrupt may have struck after the engine had refused the hook: then only the mark shows that the part has ended.
            if not part.add_hook(hook) or part.done():
                hook(None, None)
            # Last: until then, the next call does all of this again.
            self._unhooked.pop(number, None)

    def _ended(self, number: int, result: Result | None, error: Exception | None, /) -> None:
        """Count a part that has ended; after the last one, have the callbacks called."""
        with self._lock:
            self._left.discard(number)
            if self._left or self._handle is None:
                return
            handle, self._handle = self._handle, None  # the parts refer to this object, and so to the tensors
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            _call(callback, handle)


def _call(callback: Callable[[Handle], object], handle: Handle) -> None:
    try:
        callback(handle)
    except (
        BaseException
    ) as error:  # the thread may be the engine's, and the other callbacks must be called, too
        if threading.current_thread() is threading.main_thread() and not isinstance(error, Exception):
            raise  # Ctrl-C
        LOG.exception(
            "a callback of a collective's handle failed; the collective itself did not: %r", callback
        )


def only(outputs: list[T], parts: Sequence[Part[T]]) -> T:
    """Finish a handle of one tensor."""
    return outputs[0]


def every(outputs: list[T], parts: Sequence[Part[T]]) -> list[T]:
    """Finish a handle of a group."""
    return outputs


def wait_for_all(handles: Sequence[Handle]) -> list[Any]:
    """Wait for several collectives, and return their results in order.

    Raises:
        CollectiveError, DuplicateNameError: The first error, once all of them have ended: no tensor is written to afterwards.
        KeyboardInterrupt: The user interrupted; the handles stay valid.
    """
    results: list[Any] = []
    failure: CollectiveError | DuplicateNameError | None = None
    for handle in handles:
        try:
            results.append(handle.wait())
        except (CollectiveError, DuplicateNameError) as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return results


def poll(handle: Handle) -> bool:
    """Return whether ``synchronize(handle)`` would return, or raise, without waiting.

    Raises:
        InvalidRequestError: ``handle`` is no handle of an ``*_async`` function.
    """
    return checked(handle).done()


def synchronize(handle: Handle, timeout: float | None = None) -> Any:
    """Wait for an asynchronous collective and return its result.

    Args:
        handle: The handle that an ``*_async`` function returned.
        timeout: Seconds for all its tensors together; ``None`` waits for ever.

    Returns:
        The result; the same one each time.

    Raises:
        InvalidRequestError: ``handle`` is no handle.
        CollectiveError, DuplicateNameError: As for :meth:`Handle.wait`; outputs are undefined then.
        TimeoutError: It is still in flight, and may be waited for again.
    """
    return checked(handle).wait(timeout)


def checked(handle: Handle) -> Handle:
    """Return a user's handle; raises ``InvalidRequestError`` for any other object."""
    if not isinstance(handle, Handle):
        raise InvalidRequestError(
            f"Expected the handle that an *_async function returned, not {type(handle).__name__}."
        )
    return handle
