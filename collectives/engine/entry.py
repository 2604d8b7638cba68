"""One submitted collective and the small tables that the rank's state keeps of them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.engine.request import Request
from hvdlab.collectives.errors import CauseKind
from hvdlab.collectives.planes.links import Links
from hvdlab.collectives.protocol.messages import Definition, Member, Signature

if TYPE_CHECKING:
    from hvdlab.collectives.engine.posting import Seat

HELD, ANNOUNCED, EXECUTING, ENDED, POSTED = range(5)

Key = tuple[object, ...]


class Entry:
    """A submitted collective. Its fields belong to :class:`RankState`, under the engine's lock.

    Attributes:
        request: What the user asked for.
        name: Tensor name as the coordinator matches it (anonymous ones of a kind have a common one).
        site: Call site.
        submitted: When it was submitted, in nanoseconds of ``time.monotonic_ns``.
        received: When ``Execute`` came, in the same nanoseconds, or 0.
        phase: ``HELD`` (not announced yet), ``ANNOUNCED``, ``EXECUTING``, ``ENDED`` or ``POSTED`` (on the board of its epoch).
        epoch: Epoch that it is (or, if held, at the earliest will be) announced in.
        local: The local id that it is announced as.
        extra: Numbers that go along with the announcement and may differ between ranks (allgather: rows; alltoall: splits).
        given_up: Whether this rank has withdrawn it: it ends with its epoch.
        waited: Seconds that the user's thread has waited for it, as this rank told the coordinator, or 0.
    """

    __slots__ = (
        "epoch", "extra", "given_up", "local", "name", "phase", "received", "request", "site", "submitted",
        "waited",
    )  # fmt: skip

    def __init__(self, request: Request, site: str, submitted: int) -> None:
        self.request = request
        self.site = site
        self.submitted = submitted
        self.received = 0
        self.name = ""
        self.phase = HELD
        self.epoch = 0
        self.local: Local = NO_LOCAL
        self.extra: tuple[int, ...] = ()
        self.given_up = False
        self.waited = 0.0


class Local:
    """A local id: a signature and call site as an integer.

    Attributes:
        id: The integer.
        key: What it stands for.
        queue: Entries that were announced under this id and not decided yet, oldest first.
        priority: As in :class:`Request`.
        defined: Whether this rank has sent the coordinator the definition.
    """

    __slots__ = ("defined", "id", "key", "priority", "queue", "signature", "site")

    def __init__(
        self, id: int, key: Key, signature: Signature, site: str, priority: int | None = None
    ) -> None:
        self.id = id
        self.key = key
        self.signature = signature
        self.site = site
        self.priority = priority
        self.queue: deque[Entry] = deque()
        self.defined = False

    def definition(self) -> Definition:
        """What tells the coordinator what the id stands for, which is sent once."""
        self.defined = True
        return Definition(self.id, self.signature, self.site, self.priority)


NO_LOCAL = Local(-1, (), Signature(0, "", 0, 0, ()), "")


class SetState:
    """What a rank knows of one process set.

    Attributes:
        id, epoch, members, plane, options, device_planes: As configured last.
        links: What the data of CUDA tensors goes over in this epoch, as far as the plane for them has found out.
        chunk_bytes: The size of chunks that the plane of this epoch has measured to suit the machine, or 0.
        ranks: Rank of each member, by position.
        index: Own position, or -1 if this rank is no member.
        configured: Whether ``epoch`` may be announced in; between an abort and the next ``Configure`` it may not.
        withdrawn: The epoch that this rank has asked to end, and which has not ended yet, or -1.
        pending: Entries that have not ended, in order of submission.
        names: The named ones among the pending entries that were not given up.
        given_up: Why entries were given up for which other ranks may still wait (kind, text, site), or ``None``.
        seat: This rank's use of the epoch's board, or ``None`` if there is no board.
        past_seats: The seats of former epochs at which a thread may still wait, by epoch.
    """

    __slots__ = (
        "chunk_bytes", "configured", "device_planes", "epoch", "given_up", "id", "index", "links", "members", "names", "options", "past_seats", "pending", "plane",
        "ranks", "seat", "withdrawn",
    )  # fmt: skip

    def __init__(self, id: int) -> None:
        self.id = id
        self.epoch = 0
        self.members: tuple[Member, ...] = ()
        self.ranks: tuple[int, ...] = ()
        self.index = -1
        self.plane = ""
        self.device_planes: dict[str, str] = {}
        self.links: Links = {}
        self.chunk_bytes = 0
        self.options: dict[str, str] = {}
        self.configured = False
        self.withdrawn = -1
        self.given_up: tuple[CauseKind, str, str] | None = None
        self.pending: dict[Entry, None] = {}
        self.names: dict[str, Entry] = {}
        self.seat: Seat | None = None
        self.past_seats: dict[int, Seat] = {}

    def retire_seat(self) -> None:
        """The epoch has ended in order, or this rank leaves: nothing is posted any more."""
        seat, self.seat = self.seat, None
        if seat is not None and seat.retire():
            self.past_seats[seat.board.epoch] = seat

    def abort_seats(self, epoch: int) -> set[Entry | None]:
        """The epochs up to ``epoch`` have ended at once; returns the requests that had been agreed on their boards before that."""
        if self.seat is not None and self.seat.board.epoch <= epoch:
            self.past_seats[self.seat.board.epoch], self.seat = self.seat, None
        return {self.past_seats.pop(old).abort() for old in list(self.past_seats) if old <= epoch}


def signature_of(request: Request, name: str, shape: tuple[int, ...]) -> Signature:
    """The part of a request that ranks must agree on."""
    group, count = request.group or ("", 0)
    return Signature(
        int(request.kind),
        name,
        int(request.dtype),
        int(request.op),
        shape,
        request.root,
        request.prescale,
        request.postscale,
        request.device,
        group,
        count,
        request.ranks,
        request.channel,
    )


def matched_shape(request: Request) -> tuple[int, ...]:
    """The shape as far as ranks must agree on it."""
    if request.input is None:
        return ()
    shape = request.input.shape
    if request.kind is OpKind.ALLGATHER or request.kind is OpKind.ALLTOALL:
        return shape[1:]
    return shape
