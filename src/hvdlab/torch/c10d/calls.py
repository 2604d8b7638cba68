"""The operations of one group as they are submitted: their numbers, what they are called, and what is remembered of them.

All collectives of a group have *one* name in the core, the group's, and are anonymous: the coordinator compares the n-th
call of each rank, and finds another operation, shape, dtype, root or operator at once. Messages have names of their own.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

from hvdlab.collectives.engine.request import Request, Result
from hvdlab.collectives.errors import (
    AbortedError,
    CauseKind,
    HvdlabError,
    InvalidRequestError,
    MismatchError,
)
from hvdlab.collectives.sites import call_site
from hvdlab.torch.c10d.buckets import Buckets
from hvdlab.torch.c10d.history import Call
from hvdlab.torch.c10d.naming import WHOLE, Part, label_in_recordings, name_of_group, sharded_module
from hvdlab.torch.c10d.tensors import Copy
from hvdlab.torch.c10d.work import CoalescedWork, Deliver, HvdlabWork
from hvdlab.torch.c10d.world import World

_MAY_BE_SHIFTED = (
    CauseKind.CELL_ENDED, CauseKind.CELL_FAILED, CauseKind.DEADLOCK, CauseKind.TIMEOUT, CauseKind.WITHDRAWN,
)  # fmt: skip
"""Why an operation may have ended if a rank had skipped an earlier one."""
_WRAPPERS_BEGIN_WITH = ("broadcast", "all_gather")
"""What ``DistributedDataParallel`` calls by itself, before it reduces gradients."""

_HOME = os.path.join(os.path.dirname(__file__), "")


class Submission:
    """Requests of one operation, and what is to be done with their results."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        #: For each request what takes its result to the user's tensors.
        self.copies: list[Copy | None] = []

    def add(self, request: Request, copy: Copy | None = None) -> None:
        self.requests.append(request)
        self.copies.append(copy)

    def deliver(self) -> Deliver | None:
        """What takes all results to their places; ``None`` if they are there."""
        copies = self.copies
        if not any(copies):
            return None

        def deliver(results: Sequence[Result]) -> None:
            for copy, result in zip(copies, results, strict=True):
                if copy is not None:
                    copy(result)

        return deliver


class Calls:
    """The operations that this rank calls in one group.

    Args:
        world: Where the group lives.
        name: Torch's name of the group.
        members: The ranks of the world that are in it, by their numbers in the group.
        seconds: Limit of each wait that gives none.

    Attributes:
        engine, members, world, name: As above.
        description: What the user calls the group, or torch's word for none.
        seconds: As above; may be changed.
        process_set: Id of the group's process set.
        name_in_core: What the core calls the group's collectives.
        counted_as: By which the ranks know the group in mail between them.
        sequence: How many operations this rank has called.
        closed: Whether the group takes no more operations.
    """

    def __init__(self, world: World, name: str, members: Sequence[int], seconds: float) -> None:
        self.world, self.engine, self.members = world, world.engine, tuple(members)
        self.name, self.description, self.seconds = name, "", seconds
        self.sequence, self.closed = 0, False
        #: What recordings call operations.
        self._labels: dict[tuple[str, str], str] = {}
        self.process_set = world.process_set(members)
        self.name_in_core = world.name_in_core(name, self.members)
        self._epoch, self._processes = self._present()
        # Ranks that were replaced have sent nothing yet, so a group that is made anew counts from the beginning.
        space = world.store.space if world.store is not None else ""
        self.counted_as = f"{space}.{self.name_in_core}"
        #: Operations whose futures C++ may wait for, without the GIL, so that Ctrl-C is not seen there.
        self._with_future: weakref.WeakSet[HvdlabWork] = weakref.WeakSet()
        #: The models that ``DistributedDataParallel`` reduces in this group.
        self._buckets = Buckets()
        #: For each thread ``works``: what it has submitted since it began to coalesce, or ``None``.
        self._coalescing = threading.local()

    # -- the group's names and ranks ----------------------------------------------------------------------------------

    def rename(self, *, name: str | None = None, description: str | None = None) -> None:
        """Torch or the user calls the group otherwise from now on."""
        self.name = self.name if name is None else name
        self.description = self.description if description is None else description
        self._labels.clear()

    def __str__(self) -> str:
        """What errors call the group."""
        return name_of_group(self.name, self.description, self.members)

    def _present(self) -> tuple[int, tuple[object, ...]]:
        """The world's epoch, and the processes that are the group's ranks in it."""
        epoch, processes = self.engine.processes()
        return epoch, tuple(process for process in processes if process[0] in self.members)

    def has_its_ranks(self) -> bool:
        """Whether the processes that made the group are still its ranks: not if one was lost, or replaced."""
        epoch, processes = self._present()
        if processes == self._processes:
            self._epoch = epoch
            return True
        return False

    def require_usable(self, operation: str) -> None:
        """Raise ``InvalidRequestError`` if the group was destroyed, or has lost ranks."""
        if self.closed:
            raise InvalidRequestError(f"{operation}: process group {self.name} was destroyed.")
        if self.engine.epoch() != self._epoch and not self.has_its_ranks():
            raise InvalidRequestError(
                f"{operation}: {self} has lost ranks since it was made. "
                'Call dist.destroy_process_group() and dist.init_process_group("hvdlab") on all ranks, and wrap models again.'
            )

    def close(self) -> None:
        """Take no more operations. The process set stays, for groups of the same ranks."""
        self.closed = True
        self.world.histories.forget(self.counted_as)

    # -- submitting ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        operation: str,
        outputs: Any,
        submission: Submission,
        *,
        name: str | None = None,
        source: int = -1,
        opts: Any = None,
        inputs: Any = None,
    ) -> HvdlabWork:
        """Submit an operation.

        Args:
            operation: Its name in torch.
            outputs: The user's output tensors.
            submission: What the core is asked for.
            name: The core's name for it, of a message; by default the group's, which all members call in one order.
            source: The sender's number in the group, of a receive.
            opts: Torch's options. If they say that the caller waits at once, that wait announces it, which is quicker.
            inputs: What profilers show, if that is not the outputs.
        """
        self.require_usable(operation)
        part = self._part(operation, outputs)
        work = HvdlabWork(
            self.engine,
            self.process_set,
            self.label(operation, part),
            outputs,
            submission.deliver(),
            self.seconds,
            source,
            self._has_future,
        )
        work.about = part.about
        at_once = not getattr(opts, "asyncOp", True)
        recorded_as = self.recorded_as(operation, part)
        for request in submission.requests:
            request.label, request.about = recorded_as, part.about
        work.record(f"hvdlab:{operation}", outputs if inputs is None else inputs)
        coalesced = getattr(self._coalescing, "works", None)
        if coalesced is not None:
            coalesced.append(work)
            at_once = False
        site = call_site(2)
        self.begin(work, submission, name or self.name_in_core, site, at_once=at_once)
        if name is None and work.handles:  # what all members call, in one order
            epoch = work.handles[0].epoch
            call = Call(self.sequence, operation, site + part.about, self.world.steps.taken)
            self.world.histories.add(self.counted_as, epoch, call)
            work.explain = functools.partial(self._explain, epoch)
        return work

    def begin(
        self,
        work: HvdlabWork,
        submission: Submission,
        name: str,
        site: str,
        *,
        announce: bool = True,
        at_once: bool = False,
    ) -> None:
        """Submit the requests of an operation that has its number."""
        for request in submission.requests:
            request.name, request.site, request.process_set = name, site, self.process_set
            request.anonymous = True
            work.handles.append(self.engine.submit(request, announce=announce, at_once=at_once))

    def start_coalescing(self) -> None:
        """From now on to :meth:`end_coalescing` this thread's operations of the group make one work."""
        self._coalescing.works = []

    def end_coalescing(self) -> CoalescedWork:
        """The operations since :meth:`start_coalescing`, as one work."""
        works, self._coalescing.works = self._coalescing.works, None
        return CoalescedWork(works)

    def interrupted(self) -> None:
        """The user interrupts this rank: give up what C++ may be waiting for. On the control thread."""
        if self.closed:
            return
        for chosen in {work.process_set for work in list(self._with_future) if not work.is_ended()}:
            self._withdraw(chosen)

    def _has_future(self, work: HvdlabWork) -> None:
        """C++ may wait for this operation from now on."""
        self._with_future.add(work)
        # After the addition: either the control thread finds it and withdraws it, or the interrupt is seen to be held here.
        if self.engine.interrupt_is_held():
            self._withdraw(work.process_set)

    def _withdraw(self, process_set: int) -> None:
        self.engine.withdraw(f"rank {self.engine.rank} was interrupted", process_set, CauseKind.INTERRUPTED)

    # -- what operations are called -----------------------------------------------------------------------------------

    def label(self, operation: str, part: Part = WHOLE) -> str:
        """What errors call the next operation, which gets its number by that."""
        self.sequence += 1
        return f"{operation} #{self.sequence} of {self}{part.about}"

    def recorded_as(self, operation: str, part: Part = WHOLE) -> str:
        """What recordings call an operation."""
        label = self._labels.get((operation, part.name))
        if label is None:
            label = label_in_recordings(operation, self.name, self.description, self.members, part.name)
            self._labels[operation, part.name] = label
        return label

    def _part(self, operation: str, tensors: Any) -> Part:
        """The part of a model that an operation is for."""
        if module := sharded_module():
            return Part(module, f" for {module}")
        caller = _caller()
        if operation in _WRAPPERS_BEGIN_WITH:
            self._buckets.see(tensors[0] if operation == "broadcast" else None, caller)
        one = operation == "all_reduce" and len(tensors) == 1
        bucket = self._buckets.text_of(tensors[0] if one else None, caller)
        return Part(bucket, f", {bucket}") if bucket else WHOLE

    def _explain(self, epoch: int, error: HvdlabError) -> str:
        """Whether a rank has skipped an earlier call, if that may be why an operation could not complete."""
        if isinstance(error, AbortedError) and error.cause.kind in _MAY_BE_SHIFTED:
            asked = error.pending.missing
        elif isinstance(error, MismatchError):
            asked = self.members
        else:
            return ""
        return self.world.histories.explain(self.counted_as, epoch, asked)


def _caller() -> FrameType | None:
    """The frame that called the group; ``None`` on a thread of C++."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HOME):
        frame = frame.f_back
    return frame
