"""How a rank uses the board of a process set: what it has posted, and which requests it sends to the coordinator instead."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from hvdlab.collectives.arrays import storage_type
from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.engine.entry import ENDED, Entry, signature_of
from hvdlab.collectives.engine.request import Request
from hvdlab.collectives.engine.small import BYTES, Folds
from hvdlab.collectives.planes.buffers import HOST, HostArray, host_view
from hvdlab.collectives.planes.shm.agreement_board import DECLINED, AgreementBoard
from hvdlab.collectives.protocol.messages import Member

PLANS = 1024
"""Plans (see :class:`Plan`) that a rank keeps per board."""
LONGEST_PAUSE = 10
"""After more and more refusals in a row a rank leaves a board alone for up to 2 to the power of this requests."""

_KINDS = frozenset({OpKind.ALLREDUCE, OpKind.BROADCAST, OpKind.BARRIER})
_BYTE = np.dtype(np.uint8)
_NO_PARTS: HostArray = np.empty((0, 0), _BYTE)
_PRIME, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1

Key = tuple[object, ...]


def fits(request: Request) -> bool:
    """Whether a request may be posted: an allreduce, a broadcast or a barrier in no group, whose result does not depend on which
    other ranks take part.
    """
    if request.kind not in _KINDS or request.group is not None:
        return False
    if request.prescale != request.prescale or request.postscale != request.postscale:
        return False  # NaN equals nothing
    return request.input is None or request.input.nbytes > 0


def needs_plane(request: Request) -> bool:
    """Whether the tensor is too large for the board, or on a device: the members agree on the board, and then meet on the data plane."""
    return request.device != HOST or (request.input is not None and request.input.nbytes > BYTES)


class Plan:
    """What a request looks like on a board.

    Attributes:
        digest: What the members compare.
        parts: The members' tensors, by parity: a row for each member, by position.
    """

    __slots__ = ("digest", "parts")

    def __init__(self, request: Request, name: str, board: AgreementBoard) -> None:
        shape = () if request.input is None else request.input.shape
        encoded = msgspec.msgpack.encode(signature_of(request, name, shape))
        digest = int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")
        self.digest = digest if digest != DECLINED else 1
        self.parts = (_NO_PARTS, _NO_PARTS)
        if request.input is not None and not needs_plane(request):
            size, storage = request.input.nbytes, storage_type(request.dtype)
            self.parts = (board.tensors(0, size).view(storage), board.tensors(1, size).view(storage))


class Posting(NamedTuple):
    """A request that this rank has posted.

    Attributes:
        seat: This rank's use of the board that it is on.
        number: The request's number on this board: it is this rank's ``number``-th.
        parts: The members' tensors once all have posted: a row for each, by position. Empty for a request that needs the plane.
    """

    seat: Seat
    number: int
    parts: HostArray


class Seat:
    """This rank's use of one board. Its fields belong to :class:`RankState`, under the engine's lock, but for ``folds``.

    Attributes:
        board: The board.
        process_set: Id of its process set.
        ranks: The members' ranks, by position.
        index: This rank's position.
        folds: Scratch memory of the thread whose request is posted.
    """

    def __init__(
        self, board: AgreementBoard, process_set: int, index: int, members: Sequence[Member]
    ) -> None:
        self.board = board
        self.process_set, self.index = process_set, index
        self.ranks = tuple(member.rank for member in members)
        self._pids = [member.pid for member in members]
        self.folds: Folds = {}
        self._plans: dict[Key, Plan] = {}
        #: The request that this rank has posted and not left yet: one, of one thread, at a time.
        self._posted: Entry | None = None
        #: The number that this rank has been asked to decline as soon as it has left the one before, or 0.
        self._asked = 0
        #: Whether the epoch is over: the board's memory is freed once nothing of this rank is posted.
        self._over = False
        #: Requests in a row that were not agreed.
        self._refusals = 0
        #: How many of the requests to come go to the coordinator.
        self._pause = 0
        #: The last request that would have fitted and went to the coordinator.
        self._elsewhere: Entry | None = None

    def takes(self, entry: Entry, *, alone: bool) -> bool:
        """Whether a request that fits may be posted; else it goes to the coordinator.

        Args:
            entry: The request.
            alone: Whether this rank has nothing else in flight. An announcement may not have reached the coordinator yet, and must
                have before other ranks go on from this request, as from a barrier.
        """
        if not alone or self._over or self._posted is not None or self._pause or not self.board.vacant:
            self._pause = max(0, self._pause - 1)
            self._elsewhere = entry
            return False
        return True

    def post(self, entry: Entry, operations: int) -> Posting:
        """Post a request that the seat takes.

        Args:
            entry: The request.
            operations: For a request that needs the plane: how many operations this member has begun there. It goes into the digest,
                since only if all members have begun as many is this request the next one on all of them.
        """
        plan = self._plan(entry)
        source, tensor = entry.request.input, None
        digest = plan.digest
        if needs_plane(entry.request):
            digest = (digest ^ operations * _PRIME) & _WORD or 1
        elif source is not None:
            tensor = host_view(source).reshape(-1).view(_BYTE)
        self._posted = entry
        number = self.board.post(digest, tensor)
        return Posting(self, number, plan.parts[number & 1])

    def _plan(self, entry: Entry) -> Plan:
        request = entry.request
        shape = None if request.input is None else request.input.shape
        key: Key = (
            entry.name, request.kind, shape, request.dtype, request.op, request.prescale, request.postscale, request.root,
            request.device,
        )  # fmt: skip
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= PLANS:
                self._plans.clear()
            plan = self._plans[key] = Plan(request, entry.name, self.board)
        return plan

    def leave(self, *, agreed: bool) -> None:
        """The request that was posted last is over for this rank: it has read what it needed from the board."""
        self._posted = None
        if agreed:
            self._refusals = 0
        else:
            self._refused()
        if self._over:
            self.board.retire()
            self._close()
        elif self._asked > self.board.number:
            self._decline()

    def asked_to_decline(self, number: int) -> None:
        """Another member has waited long at the board for this rank's ``number``-th request: decline it, now or after the posted one."""
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

    def retire(self) -> bool:
        """The epoch ends in order: nothing more is posted. What is posted already may still be agreed.

        Returns:
            Whether something is posted.
        """
        self._over = True
        if self._posted is not None:
            return True
        self.board.retire()
        self._close()
        return False

    def count_out(self, pids: Sequence[int]) -> None:
        """Only these of the members' processes post anything: do not wait for the others, which have ended or have no board."""
        if self._posted is not None or not self._over:  # else the board's memory is freed already
            gone = [index for index, pid in enumerate(self._pids) if pid not in pids]
            self.board.mark_departed(gone)

    def abort(self) -> Entry | None:
        """The epoch ends at once: a thread that waits at the board gets ``PlaneAborted``.

        Returns:
            The posted request, if all members had agreed on it before and all it needs is on the board: it goes on to its end.
            Other ranks may have completed it, and what they did after that may be why the epoch ends. Otherwise ``None``.
        """
        self._over = True
        self.board.abort()
        if self._posted is None:
            self._close()
            return None
        number, entry = self.board.number, self._posted
        agreed = self.board.complete(number) and self.board.agreed(number)
        return entry if agreed and not entry.given_up and not needs_plane(entry.request) else None

    def _close(self) -> None:
        self._plans.clear()
        self.board.close()
