"""Operations in flight in a watched group, and the inner groups that they are handed over to."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from hvdlab.collectives.engine.entries import Handle
from hvdlab.collectives.errors import CollectiveError, HvdlabError
from hvdlab.collectives.protocol.messages import Abort
from hvdlab.torch.c10d.inner_groups import InnerGroup
from hvdlab.torch.c10d.launch_ring import LaunchSlot, Verdict
from hvdlab.torch.c10d.tensors import CopyBack
from hvdlab.torch.c10d.work import futures_threads, seconds_of
from hvdlab.torch.dynamo import untraced_methods


class WorkSupervisor(Protocol):
    """Supervisor of works: the part of a watched group that they use.

    Attributes:
        on_device: Whether its tensors are those of a GPU, where a wait of torch's lets the stream wait and not the thread.
    """

    on_device: bool

    def report_failed(self, work: WatchedWork, /) -> None:
        """Have the ranks compare their launches, since torch's backend has failed one. Any thread."""

    def give_up(self, work: WatchedWork, seconds: float, /) -> None:
        """Have all ranks give up the launches in flight, since a wait has exceeded its limit."""

    def withdraw_interrupted(self) -> None:
        """Have all ranks give up the launches in flight, since the user interrupts this rank."""

    def error_of(self, work: WatchedWork, /) -> Exception:
        """Return the error with which a work of an inner group that has ended ends."""
        ...

    def future_asked_for(self) -> None:
        """Give up the launches in flight if an interrupt is held."""

    def passed_to_native(self, error: CollectiveError, /) -> None:
        """Keep an error that native code gets."""


class EndRequest(NamedTuple):
    """Request of this rank to the coordinator to end a generation, since a wait was given up: its text, and when it was sent last (monotonic)."""

    text: str
    sent: float


class Generation:
    """One inner group of a watched group, from the end of the one before to its own.

    Attributes:
        number: The generation of the process set in which it begins; equal on all ranks.
        inner: The inner group, once it is connected.
        connecting: The inner group from before it connects on.
        lock, begun: Whether a thread makes it, or has, and the lock around that.
        made: Set once it is made, could not be made, or has ended.
        error: Why it could not be made, or ``None``.
        counts: How many launches there were, by channel.
        flying: Launches that had not ended at the last inspection, in order.
        wanted: For each channel the number up to which launches get a stand-in.
        stand_ins: The stand-ins' handles, by channel and number.
        verdicts: The last verdict on each launch.
        judged: Launches with a verdict since they were reported last, by channel and number.
        failed_cell: The last cell that has failed on another rank; empty if none has.
        end_request: This rank's request for its end, until it has ended.
        split: Autograd's numbers of the backward passes in which the former generations have given up operations.
        ended: The end of its generation, once it has ended.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.inner: InnerGroup | None = None
        self.connecting: InnerGroup | None = None
        self.lock, self.begun = threading.Lock(), False
        self.made = threading.Event()
        self.error: Exception | None = None
        self.counts: dict[str, int] = {}
        self.flying: deque[WatchedWork] = deque()
        self.wanted: dict[str, int] = {}
        self.stand_ins: dict[tuple[str, int], Handle] = {}
        self.verdicts: dict[tuple[str, int], Verdict] = {}
        self.judged: set[tuple[str, int]] = set()
        self.failed_cell = ""
        self.end_request: EndRequest | None = None
        self.split: frozenset[int] = frozenset()
        self.ended: Abort | None = None


@untraced_methods
class WatchedWork(dist.Work):
    """An operation that was handed over to the inner group.

    Args:
        group: The outer group.
        generation: The inner group's.
        slot: The launch, as the ring keeps it.
        seconds: Limit of a wait that gives none, if the launch's options have none either.
    """

    def __init__(
        self, group: WorkSupervisor, generation: Generation, slot: LaunchSlot, seconds: float
    ) -> None:
        super().__init__()
        self._group, self.generation, self.slot = group, generation, slot
        # The inner group's own limit of the call may end it first. That wakes no wait: the ranks compare before, and may wait for one.
        self.seconds = seconds_of(getattr(slot.options, "timeout", None), seconds)
        self.began = time.monotonic()
        #: Autograd's number of the backward pass that has launched it; -1 outside of one.
        self.backward: int = torch._C._current_graph_task_id()
        #: When this rank reported it as late, or as failed; 0 for not yet.
        self.reported = 0.0
        #: The comparers that it was reported to since the last verdict.
        self.asked: set[int] = set()
        #: Whether a thread of the user's waits for it in Python, and whether C++ may wait for its future.
        self.waiting = self.has_future = False
        #: How torch's backend has failed, if it has.
        self.failure = ""
        #: The inner group's own object of the operation, once it is launched.
        self._inner: Any = None
        #: Copies the results to the user's tensors, if torch's backend works in copies of them.
        self._back: CopyBack | None = None
        #: Set once it has ended, well or badly.
        self._over = threading.Event()
        #: Guards the error and the futures: torch's threads and the user's may both end it.
        self._lock = threading.Lock()
        #: The outputs, and the error as the user gets it, which is the same object each time.
        self._value: Any = None
        self._error: Exception | None = None
        #: The future that is set at the end, with ``None``, and the one that torch gets, which makes the
        #: value or the error.
        self._root: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None

    # -- the end, as the inner group shows it -------------------------------------------------------------------------

    def begun(self, inner: Any, outputs: Any, back: CopyBack | None = None) -> None:
        """Watch the inner group's own object of the operation.

        Args:
            inner: That object.
            outputs: The user's tensors, for an operation that does not return them.
            back: Copies the results to the user's tensors, if torch's backend works in copies of them.
        """
        # Before the callbacks, in which a thread of torch's reads it.
        self._inner, self._back = inner, back
        if self._group.on_device:
            return  # its end is seen by looking: an event of the device has no callback
        try:
            future = inner.get_future()
        except RuntimeError:  # Gloo's messages, and some of its collectives, have none
            self._value = outputs if isinstance(outputs, list) else [outputs]
            futures_threads(os.getpid()).submit(self._wait_inner)
        else:
            future.add_done_callback(self._inner_done)

    def _inner_done(self, future: torch.futures.Future[Any]) -> None:
        """Read the result. A thread of torch's."""
        try:
            self._value = future.value()
            self._copy_back()
        except Exception as error:  # noqa: BLE001  (kept, and judged by the ranks together)
            self.failed(error)
        else:
            self._end()

    def _wait_inner(self) -> None:
        """Wait in C++ for an operation that has no future."""
        try:
            self._inner.wait()
            self._copy_back()
        except Exception as error:  # noqa: BLE001  (as above)
            self.failed(error)
        else:
            self._end()

    def _copy_back(self) -> None:
        """Copy the results to the user's tensors, and make these the value. Before the end, which a user's thread waits for."""
        # One that has ended was given up, and the user may have other values in the tensors by now.
        # Read once: another thread that ends it drops the copies.
        back = self._back
        if back is not None and not self._over.is_set():
            self._value = back.copy()

    def failed(self, error: Exception) -> None:
        """Record that torch's backend has failed it. The work ends with the inner group, whose end has the reason."""
        self.failure = str(error).partition("\n")[0] or type(error).__name__
        # Stored before the look at the generation, whose end is set before it looks for failures: one of the
        # two threads ends the work.
        if self.generation.ended is not None:
            self._end()
        else:
            self._group.report_failed(self)

    def end_failed(self) -> None:
        """End it if torch's backend has failed it, since its inner group has ended."""
        if self.failure:
            self._end()

    def end_stuck(self) -> None:
        """End it although torch's backend has not, long after its inner group was aborted. Any thread; does not wait."""
        # Without the lock, which a thread of the user's holds while it asks torch for the future. A success that comes between is lost:
        # the outputs of an operation that was given up are undefined in any case.
        if not self._over.is_set():
            self.failure = self.failure or "torch's backend did not end it after the abort"
            self._end()

    def _end(self) -> None:
        self._over.set()
        self._back = None  # a work that the user keeps is not to keep the copies
        # After `_over` is set: `get_future` makes the future first and looks at `_over` then, so one of the two sees the other.
        if self._root is not None:
            futures_threads(os.getpid()).submit(self._end_future)

    def is_over(self) -> bool:
        """Return whether it has ended, well or badly. Any thread; never blocks."""
        if (
            self._group.on_device
            and not self._over.is_set()
            and self._inner is not None
            and self._inner.is_completed()
        ):
            self._over.set()
        return self._over.is_set()

    # -- torch's interface of a work ----------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | float = timedelta(0)) -> bool:
        """Wait until the outputs are there; on a GPU, let the current stream wait for that.

        Args:
            timeout: Limit, as a number in seconds; by default that of the group. When it expires, all ranks give the operation up.

        Raises:
            MismatchError: The ranks disagree about the operation; the group goes on.
            AbortedError: It can't complete; the group goes on. The outputs are undefined.
            KeyboardInterrupt: The user interrupted; all ranks then give up all that is in flight in the group.
        """
        seconds = seconds_of(timeout, self.seconds)
        if self._group.on_device:
            if self.generation.ended is None and self._inner is not None:
                self._inner.wait()
        elif not self._over.is_set():
            self._wait_on_host(seconds)
        self._end_future()
        self._raise_error()
        return True

    def _wait_on_host(self, seconds: float) -> None:
        self.seconds, self.waiting = seconds, True
        try:
            if not self._over.wait(seconds):
                self._group.give_up(self, seconds)
                self._over.wait()  # for the end of the generation, for which give_up() has asked
        except KeyboardInterrupt:
            self._group.withdraw_interrupted()
            raise
        finally:
            self.waiting = False

    def _raise_error(self) -> None:
        with self._lock:
            if (
                self._error is None
                and (self.failure or self._group.on_device)
                and self.generation.ended is not None
            ):
                self._error = self._group.error_of(self)
        if self._error is not None:
            raise self._error.with_traceback(None)

    def is_completed(self) -> bool:
        return self.is_over()

    def is_success(self) -> bool:
        return self.is_over() and not self.failure

    def exception(self) -> Exception | None:
        if not self.is_over():
            return None
        try:
            self._raise_error()
        except HvdlabError as error:
            return error
        return None

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> Any:
        # Gloo ends the future first, and refuses its result until a thread of its own has marked the work.
        seen = self._over.is_set() and not self._group.on_device
        return self._value if seen or self._inner is None else self._inner.result()

    def source_rank(self) -> int:
        return int(self._inner._source_rank())

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the outputs. It raises an error as a ``RuntimeError`` with hvdlab's text."""
        if self._group.on_device:
            return self._inner.get_future()  # type: ignore[no-any-return]
        with self._lock:
            if self._future is not None:
                return self._future
            self._root = torch.futures.Future()
            # A callback has to raise the error: C++ takes the exception of Future.set_exception for a value, on which DDP crashes.
            self._future = self._root.then(self._value_or_raise)
        # Before the question about an interrupt: either the control thread finds the future, or this thread
        # finds the interrupt.
        self.has_future = True
        if self._over.is_set():
            self._end_future()
        self._group.future_asked_for()
        return self._future

    def _value_or_raise(self, _: object) -> Any:
        try:
            self._raise_error()
        except CollectiveError as error:
            self._group.passed_to_native(error)
            raised: Exception = error
        else:
            return self._value
        raise type(raised)(*raised.args) from None

    def _end_future(self) -> None:
        with self._lock:
            root, self._root = self._root, None
        if root is not None:
            # Outside the lock: callbacks run in this call, and ask for the error under it.
            root.set_result(None)
