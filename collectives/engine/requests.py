"""Requests of users to the engine, and their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from hvdlab.collectives.planes.base import HOST, Tensor
from hvdlab.collectives.types import SUM, DType, OpKind, Reduction

Allocate = Callable[[tuple[int, ...]], Tensor]


@dataclass(frozen=True, slots=True)
class Limit:
    """Limit of the time of a wait.

    Attributes:
        seconds: From the begin of the wait.
        text: Cause that all ranks read when the limit has passed, and the collective is given up.
    """

    seconds: float
    text: str


class CompletionHook(Protocol):
    """Function of the user that the engine calls when a request is finished.

    Exactly once for each request that :meth:`Engine.submit` (``submit_group``, ``run``) accepted, whether it succeeded, failed,
    was aborted or withdrawn, or the engine was closed. Not if the submission itself raised; only if that was a
    ``KeyboardInterrupt`` is it unknown whether the request was accepted, and the hook is called at most once.

    The hook runs on the thread of the engine that finished the request: one that executes, or the control thread. A user's thread
    that waits, and executes meanwhile, leaves it to the control thread, since Ctrl-C can strike there at any moment.
    :meth:`Engine.close` calls the hooks that are left on the thread that closes. No lock of the engine is held. Hooks
    of several requests can run in any order and at the same time; a wait for the handle can return before or after.

    A hook may submit, flush and withdraw collectives, and ask :meth:`Handle.done` and the properties of groups. It must be
    quick, since other operations, or the coordinator's messages, wait for the thread. It must not wait for a collective nor
    close the engine (both raise :class:`InvalidRequestError`). An exception of it is logged with the request's name, and has
    no other effect.
    """

    def __call__(self, result: Result | None, error: Exception | None, /) -> None:
        """Handle the end of the request.

        Args:
            result: The outcome, or ``None`` if it failed.
            error: Why it failed, as :meth:`Handle.wait` raises it, or ``None``. Output buffers are undefined then.
        """


@dataclass(slots=True)
class Request:
    """Request for one collective on one tensor.

    Attributes:
        kind: Kind of the collective.
        name: Tensor name, equal on all ranks; ``None`` for an anonymous one, which is matched in order.
        input: C-contiguous array in storage type, or buffer of ``device``, of any shape; ``None`` for a barrier. It must not
            change until the handle is done.
        output: Memory for the result, of the same kind as ``input``, which it may be (in place). ``None``: the
            engine asks ``allocate``, or makes a new array or buffer. A message has one on the rank that receives it alone,
            where it is also the ``input``.
        dtype: Element type.
        reduction: How an allreduce or a reducescatter reduces.
        root: *Rank* that a broadcast or a message comes from; -1 for a receive from any rank.
        splits: Rows (of dimension 0) for each member of an alltoall; ``None`` for even ones.
        process_set: Id of the process set.
        group: Name of the group of tensors that this one is executed together with, and how many they are.
        allocate: Makes the output once its shape is known (allgather, alltoall, reducescatter).
        site: Call site; found by walking the stack if ``None``.
        device: Device class of the tensors, equal on all ranks. Any but ``cpu`` needs a data plane for it, see
            :meth:`Engine.device_plane`; where there is none, the caller stages tensors through the host.
        anonymous: Whether several of this name can be in flight; true by itself if ``name`` is ``None``.
        ranks: To add a process set, its ranks; of a message, the rank that sends and the rank that receives; of a receive from any rank,
            this rank alone.
        channel: Of a message, the name of the receiver's receives from any rank that can get it. Such a receive gets the oldest message of
            its channel, unless a receive that names the sender waits for that. Empty for none.
        on_done: Called once when the request is finished; see :class:`CompletionHook`.
        label: Its name in recordings, if that is another one. There should be few different ones, since recordings keep them all.
        priority: Of the allreduces that have one, the highest is executed first among those that are ready and have not begun.
            Collectives without a priority, barriers included, go before them. ``None``: in the order of becoming ready.
        internal: Whether a thread of hvdlab's submits it, and not the user's program: the loss of a member is left for that to learn.
        about: Text behind the call site in errors and stall lines, on all ranks, such as `` for layers.3``. There should be few different
            ones, since each is defined once.
    """

    kind: OpKind
    name: str | None = None
    input: Tensor | None = None
    output: Tensor | None = None
    dtype: DType = DType.U8
    reduction: Reduction = SUM
    root: int = -1
    splits: tuple[int, ...] | None = None
    process_set: int = 0
    group: tuple[str, int] | None = None
    allocate: Allocate | None = None
    site: str | None = None
    device: str = HOST
    anonymous: bool = False
    ranks: tuple[int, ...] = ()
    channel: str = ""
    on_done: CompletionHook | None = None
    label: str = ""
    about: str = ""
    priority: int | None = None
    internal: bool = False


@dataclass(slots=True)
class Result:
    """Outcome of a collective.

    Attributes:
        output: The result, an array or a buffer of the request's device; ``None`` for a barrier.
        received_splits: Rows received from each member (alltoall), otherwise ``None``.
        tables: The numbers each member announced, by position (allgather: first dimensions; alltoall: splits).
        process_set: Id of the set that was added, otherwise -1.
        last_joined: The rank that joined last (join), otherwise -1.
        source: The rank that has sent a message, on the rank that received it; otherwise -1.
    """

    output: Tensor | None = None
    received_splits: tuple[int, ...] | None = None
    tables: tuple[tuple[int, ...], ...] = ()
    process_set: int = -1
    last_joined: int = -1
    source: int = -1


@dataclass(frozen=True, slots=True)
class PendingCollective:
    """Collective in flight on this rank, as :meth:`Engine.pending` lists it.

    Attributes:
        name: Tensor name.
        kind: Collective in words, such as ``allreduce``.
        site: Call site.
        seconds: Time since it was submitted.
        executing: Whether it has left negotiation.
        process_set: Id of its process set.
    """

    name: str
    kind: str
    site: str
    seconds: float
    executing: bool = False
    process_set: int = field(default=0)
