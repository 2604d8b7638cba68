"""Rank's view of a process set: its members, its pending entries, checks of requests, and the rank's use of the board.

Everything here belongs to :class:`~hvdlab.collectives.engine.rank_state.RankState`, under the engine's lock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from hvdlab.collectives.engine.entries import (
    ANNOUNCED,
    ENDED,
    EXECUTING,
    UNANNOUNCED,
    Cancellation,
    Entry,
    Zeros,
    signature_of,
)
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import Cause, CauseKind, InvalidRequestError, Pending
from hvdlab.collectives.planes.base import HOST, HostArray, HostArrays, Links, host_view, storage_type
from hvdlab.collectives.planes.shm.agreement_board import DECLINED, AgreementBoard
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.codec import pack
from hvdlab.collectives.protocol.messages import Member
from hvdlab.collectives.reduce import MANY, FoldScratch, is_direct, needs_width
from hvdlab.collectives.types import DType, OpKind, ReduceOp, Reduction

LAYOUTS = 1024
"""Layouts of requests that a rank keeps per board; names that change with each step would make them grow for ever."""
COSTLY_BYTES = 4096
"""Bytes of the largest tensor on the board if each element costs much more than a copy. Members share that work on the plane."""
LONGEST_PAUSE = 10
"""After more and more refusals in a row a rank leaves a board alone for up to 2 to the power of this requests."""

_KINDS = frozenset({OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.BARRIER})
# The multiplier of Fibonacci hashing: it spreads the small counts of operations over the whole word of a digest.
_PRIME, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1

Key = tuple[object, ...]
ReductionKey = tuple[str | None, np.dtype[Any], tuple[int, ...], ReduceOp]


class SetState:
    """State of one process set, as the coordinator configured it last on this rank.

    Attributes:
        id: Its number; 0 is the world.
        generation: The generation that was configured last, or whose abort came last.
        members: The members, by position.
        plane: Name of the data plane for tensors of the host.
        options: Options of that plane.
        device_planes: Names of the data planes of other device classes.
        shown_planes: Names to show in place of those, where the plane of this generation has chosen one itself.
        links: Connections between GPUs that the plane for CUDA tensors has found in this generation.
        chunk_bytes: Size in bytes of the chunks that the plane of this generation has measured as the best, or 0.
        ranks: Rank of each member, by position.
        index: Own position, or -1 if this rank is no member.
        configured: Whether entries can be announced in ``generation``; between an abort and the next ``Configure`` they can't.
        withdrawn: The generation that this rank has asked to end, and which has not ended yet, or -1.
        pending: Entries that have not ended, in order of submission.
        names: The named ones among the pending entries that were not given up.
        given_up: Why entries were given up for which other ranks perhaps still wait (kind, text, site), or ``None``.
        loss: Cause with which the next submission fails: a member was lost while this rank had nothing pending. ``None`` otherwise.
        lost_members: Members whose loss has ended the last generation, while the next has not begun.
        is_orphaned: Whether the coordinator was lost since the last generation began.
        board_member: This rank's use of the generation's board, or ``None`` if there is no board.
        past_board_members: Uses of the boards of former generations on which perhaps a thread still waits, by generation.
    """

    __slots__ = (
        "board_member", "chunk_bytes", "configured", "device_planes", "generation", "given_up", "id", "index",
        "is_orphaned", "links", "loss", "lost_members", "members", "names", "options", "past_board_members", "pending", "plane",
        "ranks", "shown_planes", "withdrawn",
    )  # fmt: skip

    def __init__(self, id: int) -> None:
        self.id = id
        self.generation = 0
        self.members: tuple[Member, ...] = ()
        self.ranks: tuple[int, ...] = ()
        self.index = -1
        self.plane = ""
        self.device_planes: dict[str, str] = {}
        self.shown_planes: dict[str, str] = {}
        self.links: Links = {}
        self.chunk_bytes = 0
        self.options: dict[str, str] = {}
        # Configure sets the first of these and resets the second. A request of this rank to end the generation resets the first and sets the
        # second; the abort that answers it resets both. A Configure can come before that abort, and then ends the withdrawal.
        self.configured = False
        self.withdrawn = -1
        self.given_up: tuple[CauseKind, str, str] | None = None
        self.loss: Cause | None = None
        self.lost_members: set[int] = set()
        self.is_orphaned = False
        self.pending: dict[Entry, None] = {}
        self.names: dict[str, Entry] = {}
        self.board_member: BoardMember | None = None
        self.past_board_members: dict[int, BoardMember] = {}

    def close_board(self) -> None:
        """End posting, since the generation has ended in order, or this rank leaves."""
        member, self.board_member = self.board_member, None
        # A member that still has a posted request is kept: its thread waits at that board, and an abort has to reach it there.
        if member is not None and member.close():
            self.past_board_members[member.board.generation] = member

    def abort_boards(self, generation: int) -> set[Entry | None]:
        """Abort the boards of generations up to ``generation``. Return the requests that had been agreed on them before."""
        past, member = self.past_board_members, self.board_member
        if member is not None and member.board.generation <= generation:
            past[member.board.generation], self.board_member = member, None
        return {past.pop(old).abort() for old in list(past) if old <= generation}

    def unreported_losses(self, members: Sequence[Member]) -> tuple[int, ...]:
        """Return the ranks of the present members that the next generation lacks, and whose loss no error has named yet.

        Args:
            members: Members of the next generation.
        """
        # A change in order is none: those that leave are idle then, and nothing is under way.
        if self.configured or (self.lost_members and not self.is_orphaned):
            return ()
        following = {(member.rank, member.host, member.pid) for member in members}
        return tuple(
            member.rank
            for member in self.members
            if (member.rank, member.host, member.pid) not in following
            and member.rank not in self.lost_members
        )

    def take_part(self, signature: m.Signature) -> Entry:
        """Return a new entry with zeros for a collective that other members have submitted, as this rank has joined."""
        entry = Zeros(self.id, signature)
        entry.generation = self.generation
        self.pending[entry] = None
        return entry

    def replace(self, entry: Entry, other: Entry) -> None:
        """Let ``other`` be pending, under the same name, in place of ``entry``."""
        del self.pending[entry]
        self.pending[other] = None
        if self.names.get(entry.name) is entry:
            self.names[entry.name] = other

    def validate(self) -> None:
        """Assert the invariants that hold between calls."""
        for entry in self.pending:
            assert entry.phase != ENDED
            if entry.phase == ANNOUNCED and self.withdrawn < 0:
                assert entry in entry.local.queue
        for name, entry in self.names.items():
            assert entry in self.pending
            assert entry.name == name


def pending_of(collective: m.AbortedCollective) -> Pending:
    """Return an aborted collective as errors have it."""
    sites = dict(zip(collective.waited, collective.sites, strict=False))
    kind = OpKind(collective.kind).label
    return Pending(kind, collective.name, collective.waited, collective.missing, sites)


def device_plane_names(group: SetState) -> tuple[str, ...]:
    """Return the names to show of the planes for tensors that are not on the host; an empty one stands for none."""
    return tuple(group.shown_planes.get(device, name) for device, name in group.device_planes.items())


# -- checks of requests -------------------------------------------------------------------------------------------


def check_request(group: SetState, entry: Entry) -> None:
    """Check a request against the members as they are now, and set the numbers that go along with its announcement.

    Raises:
        InvalidRequestError: It does not fit.
    """
    request = entry.request
    kind = request.kind
    if request.device != HOST:
        _fit_device(group, request)
    # Members are known only while the set is configured. A request that is held is checked again when it is announced.
    if kind is OpKind.BROADCAST and group.configured and request.root not in group.ranks:
        raise InvalidRequestError(
            f"root {request.root} is not in process set {group.id}; its ranks are {list(group.ranks)}."
        )
    if kind is OpKind.SENDRECV:
        _fit_message(group, request)
    if kind is OpKind.ALLGATHER or kind is OpKind.ALLTOALL:
        assert request.input is not None
        rows = request.input.shape[0] if request.input.shape else 1
        if kind is OpKind.ALLGATHER:
            entry.extra = (rows,)
        else:
            entry.extra = _splits(request.splits, rows, group)


def _fit_message(group: SetState, request: Request) -> None:
    if request.group is not None:
        raise InvalidRequestError("a message can't be one of a group of tensors.")
    if len(request.ranks) == 1:
        _fit_receive_from_any(group, request)
        return
    source, target = request.ranks
    for rank in request.ranks:
        if group.configured and rank not in group.ranks:
            raise InvalidRequestError(
                f"rank {rank} is not in process set {group.id}; its ranks are {list(group.ranks)}."
            )
    if source == target:
        raise InvalidRequestError(f"rank {source} can't send to itself.")
    if group.configured and group.ranks[group.index] not in request.ranks:
        raise InvalidRequestError(
            f"rank {group.ranks[group.index]} is neither rank {source}, which sends, nor rank {target}, which receives."
        )


def _fit_receive_from_any(group: SetState, request: Request) -> None:
    if not request.channel:
        raise InvalidRequestError("a receive from any rank needs a channel.")
    if group.configured and group.ranks == request.ranks:
        raise InvalidRequestError(f"process set {group.id} has no other rank that could send.")
    if group.configured and group.ranks[group.index] != request.ranks[0]:
        raise InvalidRequestError(
            f"rank {group.ranks[group.index]} can't receive in place of rank {request.ranks[0]}."
        )


def _fit_device(group: SetState, request: Request) -> None:
    """Refuse requests that no plane of the device could execute."""
    if group.configured and request.device not in group.device_planes:
        raise InvalidRequestError(
            f"process set {group.id} has no data plane for tensors on {request.device}: some of its ranks offer none. "
            "Copy the tensor to the CPU."
        )
    if request.kind is OpKind.SENDRECV:
        raise InvalidRequestError(f"messages of tensors on {request.device}: copy them to the CPU.")
    if request.reduction.op is ReduceOp.ADASUM:
        raise InvalidRequestError(f"Adasum of tensors on {request.device}: copy them to the CPU.")
    if needs_width(request.dtype, request.reduction):
        raise InvalidRequestError(
            f"an average or scaled sum of integers on {request.device}: copy them to the CPU."
        )


def _splits(splits: tuple[int, ...] | None, rows: int, group: SetState) -> tuple[int, ...]:
    members = len(group.ranks)
    if splits is None:
        if members and rows % members:
            raise InvalidRequestError(
                f"alltoall without splits needs a first dimension that {members} members divide, not {rows}; give splits."
            )
        return (rows // members,) * members if members else ()
    if members and len(splits) != members:
        # The ranks are named: if one of them has died since the caller counted them, its number is missing here.
        raise InvalidRequestError(
            f"alltoall needs one split per member, not {len(splits)}: process set {group.id} has the ranks {list(group.ranks)}."
        )
    if any(rows_to < 0 for rows_to in splits) or sum(splits) != rows:
        raise InvalidRequestError(
            f"alltoall's splits {list(splits)} must not be negative, and add up to {rows} rows."
        )
    return splits


# -- cancellations ------------------------------------------------------------------------------------------------


class Cancellations:
    """Cancellations of messages to other ranks, as this rank requests them from the coordinator.

    Args:
        sets: Process sets by id.

    Attributes:
        due: Tickets of the messages whose cancellation is to be requested, in order.
    """

    def __init__(self, sets: Mapping[int, SetState]) -> None:
        self.due: list[int] = []
        self._sets = sets
        #: Messages that this rank gives up, by ticket.
        self._given_up: dict[int, Cancellation] = {}
        #: The last ticket that was used.
        self._tickets = 0

    def cancel(self, entry: Entry, kind: CauseKind, text: str) -> bool:
        """Give up a message that waits for the other rank, and no other entry with it.

        Returns:
            Whether ``entry`` is such a message, as far as this rank knows.
        """
        group = self._sets.get(entry.request.process_set)
        if entry.request.kind is not OpKind.SENDRECV or entry.phase != ANNOUNCED or group is None:
            return False
        if not group.configured or entry.generation != group.generation or entry not in entry.local.queue:
            return False
        # Dropped here, since no answer removes one that executes or has ended otherwise.
        self._given_up = {
            t: each for t, each in self._given_up.items() if each.entry.phase in (UNANNOUNCED, ANNOUNCED)
        }
        if any(each.entry is entry for each in self._given_up.values()):
            return True  # after a second request the coordinator would remove another one
        self._tickets += 1
        self._given_up[self._tickets] = Cancellation(entry, kind, text)
        self.due.append(self._tickets)
        return True

    def messages(self) -> list[m.Message]:
        """Return the messages for :attr:`due`. They follow all announcements: entries are counted from the youngest one."""
        out: list[m.Message] = []
        for ticket in self.due:
            given_up = self._given_up.get(ticket)
            if given_up is None or given_up.asked:
                continue
            entry, kind, text = given_up.entry, given_up.kind, given_up.text
            group = self._sets.get(entry.request.process_set)
            if group is None or not group.configured or entry.generation != group.generation:
                continue  # :meth:`request_again` does so in the next generation
            # The other rank has come in the meantime: only the end of the generation can stop the message now.
            if entry.phase == EXECUTING:
                out.append(m.Withdraw(group.id, group.generation, kind.value, text, entry.site))
            elif entry.phase == ANNOUNCED and entry in entry.local.queue:
                # The coordinator has cancelled those that it was asked for before, or the generation ends.
                asked = [each.entry for each in self._given_up.values() if each.asked]
                younger = list(entry.local.queue)[entry.local.queue.index(entry) + 1 :]
                later = sum(not any(one is other for other in asked) for one in younger)
                ids = group.id, group.generation, entry.local.id, later
                out.append(m.Cancel(*ids, ticket, kind.value, text, entry.site))
                given_up.asked = True
        return out

    def request_again(self, group: SetState) -> None:
        """Request the cancellation of messages that were given up and have been announced again, in a new generation."""
        for ticket, given_up in self._given_up.items():
            if given_up.entry.phase == ANNOUNCED and given_up.entry in group.pending:
                given_up.asked = False
                self.due.append(ticket)

    def pop(self, ticket: int) -> Entry | None:
        """Remove and return the message that the coordinator has cancelled; ``None`` if it has ended otherwise."""
        given_up = self._given_up.pop(ticket, None)
        if given_up is None or given_up.entry.phase != ANNOUNCED:
            return None
        return given_up.entry


# -- the board ----------------------------------------------------------------------------------------------------


def fits(request: Request) -> bool:
    """Return whether a request can be posted: an allreduce, a broadcast or a barrier in no group.

    The results of these do not depend on which other ranks participate.
    """
    if request.kind not in _KINDS or request.group is not None:
        return False
    if request.reduction.has_nan:
        return False  # NaN equals nothing
    return request.input is None or request.input.nbytes > 0


def needs_plane(request: Request, capacity: int) -> bool:
    """Return whether the tensor is too large for the board, or on a device: the members agree on the board, and use the data plane.

    Args:
        request: The request.
        capacity: Bytes of the largest tensor that the board holds.
    """
    if request.device != HOST:
        return True
    if request.input is None or request.input.nbytes <= COSTLY_BYTES:
        return False
    return request.input.nbytes > capacity or not _reduces_quickly(request)


def _reduces_quickly(request: Request) -> bool:
    """Return whether one member reduces about as fast as it copies, so that each can do it for itself."""
    if request.kind is not OpKind.ALLREDUCE:
        return True
    if request.reduction.op is ReduceOp.ADASUM or not is_direct(request.dtype):
        return False
    return request.dtype is DType.F32 or not needs_width(request.dtype, request.reduction)


class RequestLayout:
    """Layout of a request on a board.

    Attributes:
        digest: Hash of the signature, which the members compare.
        own: This rank's place on the board, by parity, in the shape of the tensor; empty if this rank puts nothing there.
        parts: The members' tensors, by parity: a row for each member, by position.
    """

    __slots__ = ("digest", "own", "parts")

    def __init__(self, request: Request, name: str, member: BoardMember) -> None:
        board, index = member.board, member.index
        shape = () if request.input is None else request.input.shape
        encoded = pack(signature_of(request, name, shape))
        digest = int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")
        # DECLINED stands for a member that asks for nothing.
        self.digest = digest if digest != DECLINED else 1
        self.own: tuple[HostArray, ...] = ()
        self.parts: tuple[HostArrays, HostArrays] = ((), ())
        if request.input is not None and not needs_plane(request, board.capacity):
            size, storage = request.input.nbytes, storage_type(request.dtype)
            rows = tuple(board.tensors(parity, size).view(storage) for parity in (0, 1))
            if request.kind is not OpKind.BROADCAST or request.root == member.ranks[index]:
                self.own = tuple(every[index].reshape(shape) for every in rows)
            # Split into rows once for all requests of this layout, unless a fold works on the whole.
            few = len(rows[0]) < MANY
            self.parts = (tuple(rows[0]), tuple(rows[1])) if few else (rows[0], rows[1])


class BoardReduction:
    """Allreduce of one name, operator, type and shape whose tensors lie on a board. Its checks were made once for all its requests.

    Attributes:
        request: A request of this kind; in place of a tensor it has this rank's place on the board.
        name: Tensor name as the coordinator matches it.
        layout: Its layout on the board.
        postscale: Factor that makes an average of a sum; 1.0 for other operators.
    """

    __slots__ = ("_fold", "layout", "name", "postscale", "request")

    def __init__(self, request: Request, name: str, layout: RequestLayout, member: BoardMember) -> None:
        self.request = Request(
            OpKind.ALLREDUCE, request.name, layout.own[0], layout.own[0], request.dtype, request.reduction,
            process_set=member.process_set,
        )  # fmt: skip
        self.name, self.layout = name, layout
        op, _, self.postscale = request.reduction.summed(len(member.ranks))
        self._fold = member.folds.quiet(request.dtype, op)

    def reduce(self, number: int, out: HostArray) -> None:
        """Reduce the members' tensors of the ``number``-th request into ``out``."""
        self._fold(
            self.layout.parts[number & 1],
            out if out.ndim == 1 else out.reshape(-1),
            1.0,
            self.postscale,
        )

    def with_tensors(self, source: HostArray, out: HostArray) -> Request:
        """Return a request of this kind for these tensors."""
        return replace(self.request, input=source, output=out)


class PlaneReduction(NamedTuple):
    """Allreduce of one name, operator, type and shape whose tensors are too large for a board, and whose checks were made before.

    Attributes:
        name: Tensor name as users give it.
        dtype: Element type.
        reduction: How it reduces.
        process_set: Id of the process set.
    """

    name: str | None
    dtype: DType
    reduction: Reduction
    process_set: int

    def with_tensors(self, source: HostArray, out: HostArray) -> Request:
        """Return a request of this kind for these tensors."""
        # By position: by name it took as long again.
        return Request(
            OpKind.ALLREDUCE, self.name, source, out, self.dtype, self.reduction, -1, None, self.process_set
        )


class PostedRequest(NamedTuple):
    """Request that this rank has posted.

    Attributes:
        member: This rank's use of the board that it is on.
        number: The request's number on this board: it is this rank's ``number``-th.
        parts: The members' tensors once all have posted: a row for each, by position. Empty for a request that needs the plane.
    """

    member: BoardMember
    number: int
    parts: HostArrays


class BoardMember:
    """Member of one board: this rank's use of it. Its fields belong to :class:`RankState`, under the engine's lock, but for ``folds``.

    Attributes:
        board: The board.
        process_set: Id of its process set.
        ranks: The members' ranks, by position.
        index: This rank's position.
        folds: Scratch memory of the thread whose request is posted.
        reductions: Allreduces that this rank has posted, by name, numpy type, shape and operator.
        plane_reductions: Those that need the plane, by the same keys.
    """

    def __init__(
        self, board: AgreementBoard, process_set: int, index: int, members: Sequence[Member]
    ) -> None:
        self.board = board
        self.process_set, self.index = process_set, index
        self.ranks = tuple(member.rank for member in members)
        #: Process ids of the members, by position.
        self._pids = [member.pid for member in members]
        self.folds = FoldScratch()
        self.reductions: dict[ReductionKey, BoardReduction] = {}
        self.plane_reductions: dict[ReductionKey, PlaneReduction] = {}
        #: Layouts of requests, by signature.
        self._layouts: dict[Key, RequestLayout] = {}
        #: The request that this rank has posted and not left yet: one, of one thread, at a time.
        self._posted: Entry | None = None
        #: The number that this rank has been asked to decline as soon as it has left the one before, or 0.
        self._asked = 0
        #: Whether the generation is over: the board's memory is freed once nothing of this rank is posted.
        self._over = False
        #: Requests in a row that were not agreed.
        self._refusals = 0
        #: How many of the requests to come go to the coordinator.
        self._pause = 0
        #: The last request that would have fitted and went to the coordinator.
        self._elsewhere: Entry | None = None

    def can_post(self, entry: Entry, *, alone: bool) -> bool:
        """Return whether a request that fits can be posted now; otherwise it goes to the coordinator.

        Args:
            entry: The request.
            alone: Whether no other collective of this rank is in flight. The board bypasses the coordinator: if this request is
                a barrier, peers continue as soon as it is agreed, and would wait for an announcement that is still to be sent.
        """
        if not alone or self._over or self._posted is not None or self._pause or not self.board.vacant:
            self._pause = max(0, self._pause - 1)
            self._elsewhere = entry
            return False
        return True

    def post(self, entry: Entry, operations: int) -> PostedRequest:
        """Post a request for which :meth:`can_post` has returned true.

        Args:
            entry: The request.
            operations: For a request that needs the plane: how many operations this member has begun there. It goes into the digest,
                since only if all members have begun as many is this request the next one on all of them.
        """
        layout, board, request = self._layout(entry), self.board, entry.request
        digest = layout.digest
        self._posted = entry
        if layout.own:
            assert request.input is not None
            # In the half of the next number's parity: members that are one request behind still read the other half.
            np.copyto(layout.own[board.number + 1 & 1], host_view(request.input))
        elif needs_plane(request, board.capacity):
            # Never 0, which is the digest of a member that declines.
            digest = (digest ^ operations * _PRIME) & _WORD or 1
        number = board.post(digest, None)
        return PostedRequest(self, number, layout.parts[number & 1])

    @property
    def is_free(self) -> bool:
        """Return whether a request could be posted now, if no other collective of this rank is in flight."""
        return not (self._over or self._posted is not None or self._pause) and self.board.vacant

    def post_reduction(self, entry: Entry, reduction: BoardReduction, source: HostArray) -> int:
        """Post an allreduce of :attr:`reductions` while this member :meth:`is_free`. Return its number."""
        layout, board = reduction.layout, self.board
        self._posted = entry
        # In the half of the next number's parity, as in post().
        layout.own[board.number + 1 & 1][...] = source
        return board.post(layout.digest, None)

    def replace_posted(self, entry: Entry, other: Entry) -> None:
        """Let ``other`` be posted in place of ``entry``, if that is posted."""
        if self._posted is entry:
            self._posted = other

    def _layout(self, entry: Entry) -> RequestLayout:
        request = entry.request
        shape = None if request.input is None else request.input.shape
        key: Key = (
            entry.name, request.kind, shape, request.dtype, request.reduction, request.root, request.device,
        )  # fmt: skip
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= LAYOUTS:
                self._forget_layouts()  # rare, and cheaper than an order of use
            layout = self._layouts[key] = RequestLayout(request, entry.name, self)
            self._keep_reduction(request, entry.name, layout)
        return layout

    def _keep_reduction(self, request: Request, name: str, layout: RequestLayout) -> None:
        """Keep an allreduce whose next requests need no checks, as its type and operator need no more than a fold."""
        op = request.reduction.op
        if request.kind is not OpKind.ALLREDUCE or request.device != HOST or op is ReduceOp.ADASUM:
            return
        # bfloat16 has no numpy type of its own: its bits would stand under the key of integers.
        if request.dtype is DType.BF16 or request.reduction.is_scaled:
            return
        if needs_width(request.dtype, request.reduction) or type(request.name) not in (str, type(None)):
            return
        assert request.input is not None
        key = request.name, storage_type(request.dtype), request.input.shape, op
        if layout.own:
            self.reductions[key] = BoardReduction(request, name, layout, self)
        else:
            self.plane_reductions[key] = PlaneReduction(
                request.name, request.dtype, request.reduction, self.process_set
            )

    def _forget_layouts(self) -> None:
        self._layouts.clear()
        self.reductions.clear()
        self.plane_reductions.clear()

    def unpost(self, *, agreed: bool) -> None:
        """Remove the posted request: this rank has read the other members' data from the board, or needs none."""
        self._posted = None
        if agreed:
            self._refusals = 0
        else:
            self._refused()
        # close() has left this to the thread whose request was still posted: it could be agreed until now.
        if self._over:
            self.board.retire()
            self._release()
        elif self._asked > self.board.number:
            self._decline()

    def asked_to_decline(self, number: int) -> None:
        """Decline this rank's ``number``-th request, now or after the posted one: another member has waited long for it."""
        # The second: this rank has posted or declined that request by now.
        if self._over or number <= self.board.number:
            return
        if self._posted is not None:
            self._asked = number
        else:
            self._decline()

    def _decline(self) -> None:
        self.board.decline()
        self._refused()
        if self._elsewhere is None or self._elsewhere.phase == ENDED:
            # The others announce their request to the coordinator; this rank's next one is the same, unless programs differ, so it
            # goes there as well.
            self._pause += 1

    def _refused(self) -> None:
        self._refusals += 1
        if self._refusals > 2:
            self._pause = max(self._pause, 1 << min(self._refusals - 2, LONGEST_PAUSE))

    def close(self) -> bool:
        """End posting, since the generation ends in order. A request that is posted already can still be agreed.

        Returns:
            Whether a request is posted.
        """
        self._over = True
        if self._posted is not None:
            return True
        self.board.retire()
        self._release()
        return False

    def mark_departed(self, pids: Sequence[int]) -> None:
        """Mark the members without a process in ``pids`` as departed, so that no rank waits for them: they have ended or have no board."""
        if self._posted is not None or not self._over:  # otherwise the board's memory is freed already
            gone = [index for index, pid in enumerate(self._pids) if pid not in pids]
            self.board.mark_departed(gone)

    def abort(self) -> Entry | None:
        """Abort the board, since the generation ends at once: a thread that waits there gets ``PlaneAborted``.

        Returns:
            The posted request, if all members had agreed on it before and all its data is on the board: its thread completes it.
            Other ranks have perhaps completed it, and a later step of theirs has ended the generation. Otherwise ``None``.
        """
        self._over = True
        self.board.abort()
        if self._posted is None:
            self._release()
            return None
        number, entry = self.board.number, self._posted
        agreed = self.board.complete(number) and self.board.agreed(number)
        # A request for the plane has no data on the board. Its operation ends with the plane, and the request with it.
        if not agreed or entry.given_up or needs_plane(entry.request, self.board.capacity):
            return None
        return entry

    def _release(self) -> None:
        self._forget_layouts()
        self.board.close()
