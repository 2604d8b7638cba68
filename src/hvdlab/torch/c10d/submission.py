"""Submits the operations of one group: gives them numbers and names, and remembers them.

All collectives of a group have *one* name in the core, the group's, and are anonymous: the coordinator compares the n-th
calls of all ranks, and finds at once if a rank has called another operation, or one with another shape, dtype, root or operator.

Messages (send, receive, and receive from any rank) have names of their own: only their two ranks submit them, without the other
ranks of the group. Messages of one direction and tag arrive in the order in which they are sent.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from hvdlab.collectives.engine.requests import Request, Result
from hvdlab.collectives.errors import AbortedError, CauseKind, HvdlabError, InvalidRequestError, MismatchError
from hvdlab.collectives.text import call_site
from hvdlab.collectives.types import OpKind
from hvdlab.torch.c10d.call_history import CallRecord
from hvdlab.torch.c10d.ddp_buckets import Buckets
from hvdlab.torch.c10d.operation_names import (
    WHOLE,
    ModelPart,
    label_in_recordings,
    name_of_group,
    sharded_module,
)
from hvdlab.torch.c10d.tensors import (
    Copy,
    array_of,
    core_dtype,
    require_dense,
    require_member,
    require_tag,
    single,
    writable_array,
)
from hvdlab.torch.c10d.work import CoalescedWork, Deliver, HvdlabWork, seconds_of
from hvdlab.torch.c10d.world import C10dWorld

_MAY_BE_SHIFTED = (
    CauseKind.CELL_ENDED, CauseKind.CELL_FAILED, CauseKind.DEADLOCK, CauseKind.TIMEOUT, CauseKind.WITHDRAWN,
)  # fmt: skip
"""The causes that an operation may end with because a rank has skipped an earlier one."""
_WRAPPERS_BEGIN_WITH = ("broadcast", "all_gather")
"""The operations that ``DistributedDataParallel`` calls itself before it reduces gradients."""

_HOME = os.path.join(os.path.dirname(__file__), "")


class Submission:
    """The requests of one operation, and where their results go.

    Attributes:
        requests: The requests for the core.
        copies: For each request, the function that copies its result to the user's tensor; ``None`` if the core writes there itself.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.copies: list[Copy | None] = []

    def add(self, request: Request, copy: Copy | None = None) -> None:
        self.requests.append(request)
        self.copies.append(copy)

    def deliver(self) -> Deliver | None:
        """Return a function that runs all copies; ``None`` if there are none."""
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
        world: The world in which the group is.
        name: Torch's name of the group.
        members: The ranks of the world that are in it, by their numbers in the group.
        seconds: Limit of each wait that gives none, in seconds.

    Attributes:
        engine: The rank's engine.
        members, world, name: As above.
        description: The name that the user gave the group, or torch's word for none.
        seconds: As above; may be changed.
        process_set: Id of the group's process set.
        name_in_core: The core's name for the group's collectives.
        name_in_mail: The group's name in mail between the ranks.
        sequence: How many operations this rank has called.
        closed: Whether the group refuses operations.
    """

    def __init__(self, world: C10dWorld, name: str, members: Sequence[int], seconds: float) -> None:
        self.world, self.engine, self.members = world, world.engine, tuple(members)
        self.name, self.description, self.seconds = name, "", seconds
        self.sequence, self.closed = 0, False
        #: The names of operations in recordings, by operation and part of the model.
        self._labels: dict[tuple[str, str], str] = {}
        self.process_set = world.process_set(members)
        self.name_in_core = world.name_in_core(name, self.members)
        #: The processes that are the group's ranks, and the last generation of the world in which they were found
        #: to be.
        self._generation, self._processes = self._present()
        # The store's space, which each init_process_group draws again, is part of the name: the calls of a group that is made again
        # are not compared with those of the former one.
        space = world.store.space if world.store is not None else ""
        self.name_in_mail = f"{space}.{self.name_in_core}"
        #: Operations for whose futures C++ may wait, where Ctrl-C has no effect: :meth:`interrupted` gives them up.
        self._with_future: weakref.WeakSet[HvdlabWork] = weakref.WeakSet()
        #: Held while an operation is added to them, or all are looked at: by a user's thread, or by the control thread.
        self._futures_lock = threading.Lock()
        #: The models that ``DistributedDataParallel`` reduces in this group.
        self._buckets = Buckets()
        #: ``works`` is, for each thread, its submissions since it began to coalesce; ``None`` if it does not coalesce.
        self._coalescing = threading.local()

    # -- the group's names and ranks ----------------------------------------------------------------------------------

    def rename(self, *, name: str | None = None, description: str | None = None) -> None:
        """Change torch's name of the group, or the user's description of it."""
        self.name = self.name if name is None else name
        self.description = self.description if description is None else description
        self._labels.clear()

    def __str__(self) -> str:
        """Return the group's name in errors."""
        return name_of_group(self.name, self.description, self.members)

    def _present(self) -> tuple[int, tuple[object, ...]]:
        """Return the world's generation, and the processes that are the group's ranks in this generation."""
        generation, processes = self.engine.processes()
        return generation, tuple(process for process in processes if process[0] in self.members)

    def has_its_ranks(self) -> bool:
        """Return whether the processes that made the group are still its ranks: ``False`` once one was lost, or replaced."""
        generation, processes = self._present()
        if processes == self._processes:
            # So that the check before each operation compares two numbers, until the world's next generation.
            self._generation = generation
            return True
        return False

    def require_usable(self, operation: str) -> None:
        """Raise ``InvalidRequestError`` if the group was destroyed, or has lost ranks."""
        if self.closed:
            raise InvalidRequestError(f"{operation}: process group {self.name} was destroyed.")
        if self.engine.generation() != self._generation and not self.has_its_ranks():
            self.engine.acknowledge_losses()  # by this error; the group that is made next is one of the ranks that live
            raise InvalidRequestError(
                f"{operation}: {self} has lost ranks since it was made. "
                'Call dist.destroy_process_group() and dist.init_process_group("hvdlab") on all ranks, and wrap models again.'
            )

    def close(self) -> None:
        """Refuse further operations. The process set stays, for later groups of the same ranks."""
        self.closed = True
        self.world.histories.forget(self.name_in_mail)

    # -- submitting ---------------------------------------------------------------------------------------------------

    def submit(
        self,
        operation: str,
        outputs: Any,
        submission: Submission,
        *,
        name: str | None = None,
        source: int | None = -1,
        opts: Any = None,
        inputs: Any = None,
    ) -> HvdlabWork:
        """Submit an operation.

        Args:
            operation: Its name in torch.
            outputs: The user's output tensors.
            submission: Its requests for the core.
            name: The core's name for a message; by default the group's, for collectives, which all members call in one order.
            source: The sender's number in the group, for a receive; ``None`` for one from any rank.
            opts: Torch's options, with the limit of a wait that gives none. If the caller waits at once according to them, that wait
                announces the operation, which is quicker.
            inputs: The tensors that profilers show, if not the outputs.

        Returns:
            The operation in flight.

        Raises:
            InvalidRequestError: The group was destroyed or has lost ranks, or an argument is wrong. Nothing was sent.
        """
        self.require_usable(operation)
        part = self.part(operation, outputs)
        work = HvdlabWork(
            self.engine,
            self,
            self.process_set,
            self.label("recv from any rank" if source is None else operation, part),
            outputs,
            submission.deliver(),
            seconds_of(getattr(opts, "timeout", None), self.seconds),
            -1 if source is None else source,
            self.members if source is None else (),
        )
        work.about = part.about
        at_once = not getattr(opts, "asyncOp", True)
        recorded_as = self.recorded_as(operation, part)
        for request in submission.requests:
            request.label, request.about = recorded_as, part.about
        profiled_as = "recvAnySource" if source is None else operation  # as torch calls it
        work.record(f"hvdlab:{profiled_as}", outputs if inputs is None else inputs)
        coalesced = getattr(self._coalescing, "works", None)
        if coalesced is not None:
            coalesced.append(work)
            # Its wait comes at the end of the block, after further operations.
            at_once = False
        site = call_site(2)
        self.begin(work, submission, name or self.name_in_core, site, at_once=at_once)
        if name is None and work.handles:  # a collective, which all members call in one order
            # After the submission: only the core knows in which generation of the world it has put the request.
            generation = work.handles[0].generation
            call = CallRecord(self.sequence, operation, site + part.about, self.world.steps.taken)
            self.world.histories.add(self.name_in_mail, generation, call)
            work.generation = generation
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
        """Submit the requests of an operation that has its number already, and give ``work`` their handles.

        If one is refused, the others are withdrawn on all ranks. Raises as ``Engine.submit`` does.
        """
        try:
            for request in submission.requests:
                request.name, request.site, request.process_set = name, site, self.process_set
                request.anonymous = True
                work.handles.append(self.engine.submit(request, announce=announce, at_once=at_once))
        except BaseException:
            # The caller gets no work that could wait for the others, and the next operation's requests would meet the
            # rest of this one on the other ranks.
            if work.handles:
                self.engine.withdraw(f"a request of {work.operation} was refused", self.process_set)
            raise

    def start_coalescing(self) -> None:
        """Gather this thread's operations of the group into one work from now on, until :meth:`end_coalescing`."""
        self._coalescing.works = []

    def end_coalescing(self) -> CoalescedWork:
        """Stop gathering; returns the operations since :meth:`start_coalescing` as one work."""
        works, self._coalescing.works = self._coalescing.works, None
        return CoalescedWork(works)

    def gather(self, work: Any) -> None:
        """Add a work that another object has begun to those that this thread coalesces, if it does."""
        coalesced = getattr(self._coalescing, "works", None)
        if coalesced is not None:
            coalesced.append(work)

    def interrupted(self) -> None:
        """Give up the operations for which C++ may be waiting, since the user interrupts this rank. Control thread."""
        if self.closed:
            return
        with self._futures_lock:
            works = list(self._with_future)
        for chosen in {work.process_set for work in works if not work.is_ended()}:
            self._withdraw(chosen)

    def future_asked_for(self, work: HvdlabWork) -> None:
        """Record that C++ may wait for this operation from now on."""
        with self._futures_lock:
            self._with_future.add(work)
        # After the addition: either the control thread finds it and withdraws it, or the interrupt is seen to be held here.
        if self.engine.interrupt_is_held():
            self._withdraw(work.process_set)

    def _withdraw(self, process_set: int) -> None:
        self.engine.withdraw(f"rank {self.engine.rank} was interrupted", process_set, CauseKind.INTERRUPTED)

    # -- the names of operations --------------------------------------------------------------------------------------

    def label(self, operation: str, part: ModelPart = WHOLE) -> str:
        """Give the next operation its number, and return its name for errors, such as ``all_reduce #17 of group dp``."""
        self.sequence += 1
        return self.name_of(operation, self.sequence, part.about)

    def name_of(self, operation: str, number: int, about: str) -> str:
        """Return the name, for errors, of the operation with this number; ``about`` is the part of a model that it is for."""
        return f"{operation} #{number} of {self}{about}"

    def recorded_as(self, operation: str, part: ModelPart = WHOLE) -> str:
        """Return an operation's name in recordings."""
        label = self._labels.get((operation, part.name))
        if label is None:
            label = label_in_recordings(operation, self.name, self.description, self.members, part.name)
            self._labels[operation, part.name] = label
        return label

    def part(self, operation: str, tensors: Any) -> ModelPart:
        """Return the part of a model that an operation is for, as far as the stack and the tensors show it."""
        if module := sharded_module():
            return ModelPart(module, f" for {module}")
        caller = _caller()
        if operation in _WRAPPERS_BEGIN_WITH:
            self._buckets.see(tensors[0] if operation == "broadcast" else None, caller)
        one = operation == "all_reduce" and len(tensors) == 1
        bucket = self._buckets.text_of(tensors[0] if one else None, caller)
        return ModelPart(bucket, f", {bucket}") if bucket else WHOLE

    def explain(self, generation: int, error: HvdlabError) -> str:
        """Return a sentence on the rank that has skipped an earlier call, if this can be why an operation failed; otherwise empty."""
        if isinstance(error, AbortedError) and error.cause.kind in _MAY_BE_SHIFTED:
            asked = error.pending.missing
        elif isinstance(error, MismatchError):
            asked = self.members
        else:
            return ""
        return self.world.histories.explain(self.name_in_mail, generation, asked)


def _caller() -> FrameType | None:
    """Return the frame that called the group; ``None`` if C++ called it, on a thread without Python frames."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HOME):
        frame = frame.f_back
    return frame


class Messages:
    """Messages of one rank in a group: sends and receives. Ranks are numbers in the group.

    Args:
        calls: The group's operations.
        rank: This rank.
    """

    def __init__(self, calls: Calls, rank: int) -> None:
        self._calls, self._rank = calls, rank
        self._members = calls.members

    def send(self, tensors: Any, target: int, tag: int) -> HvdlabWork:
        """Send one tensor, which must not change until the message has been received."""
        self._require_other("send", target, tag)
        return self._submit("send", [single("send", tensors)], self._rank, target, tag)

    def receive(self, tensors: Any, source: int, tag: int) -> HvdlabWork:
        """Receive the next message with this tag from a rank, into a tensor."""
        self._require_other("recv", source, tag)
        return self._submit("recv", [single("recv", tensors)], source, self._rank, tag)

    def receive_from_any(self, tensors: Any, tag: int) -> HvdlabWork:
        """Receive the next message with this tag from any rank; the work's ``source_rank()`` is that rank, once the message has arrived."""
        require_tag("recv", tag)
        given = [single("recv", tensors)]
        submission = self._moved(given, None, self._rank, tag)
        name = self._name("any", self._rank, tag)
        return self._calls.submit("recv", given, submission, name=name, source=None)

    def require_sound(self, operation: str, tensors: Any, other: int, tag: int) -> None:
        """Raise ``InvalidRequestError`` for a message that this rank can find wrong by itself.

        Args:
            operation: ``send`` or ``recv``.
            tensors: The message's tensor, alone or in a list.
            other: The other rank.
            tag: Its tag.
        """
        self._require_other(operation, other, tag)
        require_dense(single(operation, tensors), operation)

    def _require_other(self, operation: str, other: int, tag: int) -> None:
        require_member(operation, other, len(self._members))
        require_tag(operation, tag)
        if other == self._rank:
            raise InvalidRequestError(f"{operation}: rank {other} can't send to itself.")

    def _submit(
        self, operation: str, tensors: list[torch.Tensor], source: int, target: int, tag: int
    ) -> HvdlabWork:
        submission = self._moved(tensors, source, target, tag)
        name = self._name(source, target, tag)
        return self._calls.submit(operation, tensors, submission, name=name, source=source)

    def _moved(self, tensors: list[torch.Tensor], source: int | None, target: int, tag: int) -> Submission:
        """Return the requests that send or receive tensors; the ``source`` is ``None`` for any rank."""
        submission, receiver = Submission(), self._members[target]
        ranks = (receiver,) if source is None else (self._members[source], receiver)
        sends = source == self._rank
        for tensor in tensors:
            require_dense(tensor, "send" if sends else "recv")
            array, copy = (array_of(tensor), None) if sends else writable_array(tensor)
            # As one row: a receiver's tensor may have another shape, as with torch's own backends.
            array = array.reshape(-1)
            request = Request(
                OpKind.SENDRECV,
                input=array,
                output=None if sends else array,
                dtype=core_dtype(tensor),
                root=-1 if source is None else ranks[0],
                ranks=ranks,
                channel=f"{self._calls.name_in_core}.{tag}",
            )
            submission.add(request, copy)
        return submission

    def _name(self, source: int | str, target: int, tag: int) -> str:
        """Return the core's name for messages of one direction and tag, or for a rank's receives from any rank."""
        return f"{self._calls.name_in_core}.{source}>{target}.{tag}"
