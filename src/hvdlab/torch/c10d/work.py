"""Operations in flight as objects of torch: ``Work`` and its future."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.engine.entries import Handle
from hvdlab.collectives.engine.requests import Limit, Result
from hvdlab.collectives.errors import CollectiveError, HvdlabError
from hvdlab.torch.c10d.operation_names import renamed
from hvdlab.torch.dynamo import untraced_methods

_profilers: Any = torch.autograd

Deliver = Callable[[Sequence[Result]], None]
"""Copies the results of an operation's requests to the user's tensors."""


def seconds_of(limit: timedelta | float | None, otherwise: float) -> float:
    """Return a limit in seconds, which torch's own groups also take as a number; ``otherwise`` if it is ``None`` or not positive."""
    seconds = limit.total_seconds() if isinstance(limit, timedelta) else float(limit or 0)
    return seconds if seconds > 0 else otherwise


@cache
def futures_threads(pid: int) -> ThreadPoolExecutor:
    """Return the threads on which futures end: their callbacks may wait for further futures, which a thread of the engine must not do.

    Each process has its own, by its ``pid``, since a forked child has none of its parent's threads.
    """
    return ThreadPoolExecutor(32, "hvdlab-c10d-futures")


@cache
def _profiling_thread(pid: int) -> ThreadPoolExecutor:
    """Return the thread on which events of profilers end. Apart from :func:`futures_threads`, all of which may be waiting for such an end."""
    return ThreadPoolExecutor(1, "hvdlab-c10d-profiling")


class WorkOwner(Protocol):
    """Owner of works: the part of a group's calls that they use."""

    def future_asked_for(self, work: HvdlabWork, /) -> None:
        """Record that C++ may wait for this operation from now on."""

    def explain(self, generation: int, error: HvdlabError, /) -> str:
        """Return a sentence on why an operation failed in a generation of the world, or an empty text. May ask other ranks."""
        ...


@untraced_methods
class HvdlabWork(dist.Work):
    """An operation in flight.

    Args:
        engine: The rank's engine.
        owner: Learns that torch or the user has asked for its future, and explains its failure.
        process_set: Id of the group's process set.
        operation: Its name in errors.
        outputs: The user's output tensors, which are the future's value.
        deliver: Copies results to the outputs; ``None`` if the core writes to the outputs themselves.
        seconds: Limit of a wait that gives none.
        source: The sender's number in the group, for a receive; -1 for other operations.
        members: For a receive from any rank: the group's ranks, as ranks of the world. The sender is known once the message is there.
    """

    def __init__(
        self,
        engine: Engine,
        owner: WorkOwner,
        process_set: int,
        operation: str,
        outputs: Any,
        deliver: Deliver | None,
        seconds: float,
        source: int = -1,
        members: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self._owner = owner
        self._engine, self._process_set = engine, process_set
        self.operation, self._outputs, self._deliver = operation, outputs, deliver
        self._seconds, self._source, self._members = seconds, source, members
        #: The core's handles, one for each request; :meth:`Calls.begin` appends them as it submits the requests.
        self.handles: list[Handle] = []
        #: How it has failed, as the user gets it; the same object each time.
        self._error: Exception | None = None
        #: Whether the outputs are delivered, or never will be.
        self._over = False
        #: The part of a model that it is for, as the operation's name ends with it; may be empty.
        self.about = ""
        #: The generation of the world in which the core has put a collective, once that is known: then the owner can explain its error.
        self.generation: int | None = None
        #: The profiler's event, which ends when the operation has.
        self._event: Any = None
        #: Guards delivery and the futures: :meth:`wait` and a thread of the engine may both end it.
        self._lock = threading.Lock()
        #: The future that is set at the end, and the one that torch gets, which makes the value or the error.
        self._root: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None
        #: How many handles have not ended, once there is a future.
        self._left = 0

    @property
    def process_set(self) -> int:
        """Return the id of the group's process set."""
        return self._process_set

    def record(self, name: str, tensors: Any) -> None:
        """Show the operation in torch's profiler, if one runs: an event from now to its end, with the shapes of the tensors."""
        if _profilers._profiler_enabled():
            flat = [each for each in tree_leaves(tensors) if isinstance(each, torch.Tensor)]
            self._event = _profilers._record_function_with_args_enter(name, *flat)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | float = timedelta(0)) -> bool:
        """Wait until the outputs are there.

        Args:
            timeout: Limit, as a number in seconds; by default that of the group. When it expires, all ranks give the operation up.

        Returns:
            ``True``.

        Raises:
            MismatchError: The ranks disagree about the operation; the group goes on.
            AbortedError: It can't complete; the group goes on. The outputs are undefined.
            KeyboardInterrupt: The user interrupted; all ranks then give the operation up.
        """
        seconds = seconds_of(timeout, self._seconds)
        text = f"it was given up on rank {self._engine.rank} after {seconds:g} s, the timeout of the process group"
        self._complete(Limit(seconds, text))
        self._end_future()
        return True

    def _complete(self, limit: Limit | None) -> None:
        """Wait for the core, deliver the results, and raise the operation's error if it failed."""
        results: list[Result] = []
        if not self._over:
            failed: Exception | None = None
            for handle in self.handles:
                try:
                    results.append(handle.wait() if limit is None else handle.wait_or_withdraw(limit))
                except HvdlabError as error:
                    # The other requests are waited for all the same: no tensor may be written to once the
                    # user has the error.
                    if failed is None:
                        # Outside the lock, which a thread of the engine takes: explain() waits for other ranks.
                        generation = self.generation
                        why = "" if generation is None else self._owner.explain(generation, error)
                        failed = renamed(error, self.operation, why, self.about)
            with self._lock:
                # Once more, under the lock: another thread may have delivered, or kept its error, while this one waited for the core.
                if not self._over:
                    self._error = failed
                    if self._error is None:
                        self._deliver_results(results)
                self._over = True
                # It refers to memory as large as the outputs, which a work that the user keeps would keep alive.
                self._deliver = None
                # Under the lock, so that one thread ends it.
                event, self._event = self._event, None
            if event is not None:
                # End it on another thread than the one that began it: the profiler then takes it for asynchronous.
                end = _profiling_thread(os.getpid()).submit(_profilers._record_function_with_args_exit, event)
                end.result()
        if self._error is not None:
            # The same object is raised each time: with its last traceback it would keep the frames of that call alive.
            raise self._error.with_traceback(None)

    def _deliver_results(self, results: Sequence[Result]) -> None:
        """Deliver the results to the outputs, and keep the error if that fails. The caller holds the lock."""
        if self._members:
            self._source = self._members.index(results[0].source)
        if self._deliver is not None:
            try:
                with torch.no_grad():
                    self._deliver(results)
            except HvdlabError as error:
                self._error = error

    def is_ended(self) -> bool:
        """Return whether the core is done with the operation. Any thread; never blocks, and delivers nothing."""
        return all(handle.done() for handle in self.handles)

    def is_completed(self) -> bool:
        """Return whether the operation has ended. If it ended well, its outputs are there then. Does not wait for the operation."""
        if not self.is_ended():
            return False
        with contextlib.suppress(HvdlabError):
            self._complete(None)
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error if self.is_completed() else None

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> Any:
        return self._outputs

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    # -- the future ---------------------------------------------------------------------------------------------------

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future whose value is the list of outputs. It raises an error as a ``RuntimeError`` with hvdlab's text."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._root = torch.futures.Future()
            # A callback has to raise the error: C++ takes the exception of Future.set_exception for a value, on which DDP crashes.
            self._future = self._root.then(self._value)
            # Before any hook is added: each counts this down, perhaps at once and on another thread.
            self._left = len(self.handles)
        self._engine.flush()  # submit() may have left the announcement to a wait that does not come now
        self._owner.future_asked_for(self)
        for handle in self.handles:
            if not handle.add_hook(self._one_ended):
                self._one_ended(None, None)
        if not self.handles:
            self._end_future()
        return self._future

    def _value(self, _: object) -> Any:
        try:
            self._complete(None)
        except CollectiveError as error:
            # The kept error must not be the raised one: its frames would keep the operation, and the data plane that has failed.
            raised = copy.copy(error)
            self._engine.sent_through_native.append(error.with_traceback(None))
        else:
            return self._outputs
        raise raised

    def _one_ended(self, result: Result | None, error: Exception | None, /) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        futures_threads(os.getpid()).submit(self._end_future)

    def _end_future(self) -> None:
        """End the future, if there is one. :meth:`wait` calls this, too, so that C++ then gets the future's value without waiting."""
        with self._lock:
            root, self._root = self._root, None
        if root is not None:
            # Outside the lock: callbacks run in this call, and deliver the outputs under it.
            root.set_result(None)


@untraced_methods
class CoalescedWork(dist.Work):
    """Several operations in flight as one work, which has ended when all of them have.

    Args:
        works: The operations, in the order in which they were submitted.
    """

    def __init__(self, works: Sequence[HvdlabWork]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta | float = timedelta(0)) -> bool:
        """Wait for all operations; if some fail, raise the error of the first of these, once none is in flight.

        Args:
            timeout: Limit of the wait for each operation; by default that of the group.
        """
        first: BaseException | None = None
        for work in self._works:
            try:
                work.wait(timeout)
            except HvdlabError as error:
                first = first or error
        if first is not None:
            raise first
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Exception | None:
        return next(filter(None, [work.exception() for work in self._works]), None)

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> Any:
        return [work.result() for work in self._works]

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future whose value is a list with the outputs of each operation."""
        whole = torch.futures.collect_all([work.get_future() for work in self._works])
        return whole.then(lambda ended: [each.value() for each in ended.value()])
