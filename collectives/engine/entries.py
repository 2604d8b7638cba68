"""Submitted collectives (entries), the local ids that they are announced as, and the orders of the rank's state about them (effects)."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np

from hvdlab.collectives.engine.requests import Request, Result
from hvdlab.collectives.errors import CauseKind, InvalidRequestError
from hvdlab.collectives.planes.buffers import HOST, storage_type
from hvdlab.collectives.protocol.messages import Definition, Member, Signature
from hvdlab.collectives.types import DType, OpKind, ReduceOp, Reduction

UNANNOUNCED, ANNOUNCED, EXECUTING, ENDED, POSTED = range(5)

LOCAL_LIMIT = 4096
"""Local ids of a rank at most, by default: the coordinator keeps a definition for each, of every rank."""

Key = tuple[object, ...]


class Entry:
    """Submitted collective. Its fields belong to :class:`RankState`, under the engine's lock.

    Attributes:
        request: The user's request.
        name: Tensor name as the coordinator matches it (anonymous ones of a kind have a common one).
        site: Call site.
        submitted: Time of submission, in nanoseconds of ``time.monotonic_ns``.
        received: Time at which ``Execute`` came, in the same nanoseconds, or 0.
        phase: ``UNANNOUNCED`` (not announced yet), ``ANNOUNCED``, ``EXECUTING``, ``ENDED`` or ``POSTED`` (on the board of its generation).
        generation: Generation that it is (or, if held, at the earliest will be) announced in.
        local: The local id that it is announced as.
        extra: Numbers that go along with the announcement and can differ between ranks (allgather: rows; alltoall: splits).
        given_up: Whether this rank has withdrawn it: it ends with its generation.
        waited: Seconds that the user's thread has waited for it, as this rank reported to the coordinator, or 0.
    """

    __slots__ = (
        "extra",
        "generation",
        "given_up",
        "local",
        "name",
        "phase",
        "received",
        "request",
        "site",
        "submitted",
        "waited",
    )  # fmt: skip

    def __init__(self, request: Request, site: str, submitted: int) -> None:
        self.request = request
        self.site = site
        self.submitted = submitted
        self.received = 0
        self.name = ""
        self.phase = UNANNOUNCED
        self.generation = 0
        self.local: Local = NO_LOCAL
        self.extra: tuple[int, ...] = ()
        self.given_up = False
        self.waited = 0.0


class Zeros(Entry):
    """Entry with zeros for a collective that other ranks have submitted, since this rank has joined. No thread waits for its end.

    Attributes:
        shape: Shape of the zeros. If they are on a device the request has no input: its plane makes them.
    """

    __slots__ = ("shape",)

    def __init__(self, process_set: int, signature: Signature) -> None:
        kind, dtype = OpKind(signature.kind), DType(signature.dtype)
        self.shape = signature.shape
        tensor = None
        if kind is OpKind.ALLREDUCE and signature.device == HOST:
            # The system hands out zeroed memory as it is touched: until this entry is executed, its zeros cost nothing.
            tensor = np.zeros(signature.shape, storage_type(dtype))
        request = Request(
            kind,
            signature.name,
            tensor,
            tensor,
            dtype,
            Reduction(ReduceOp(signature.op), signature.prescale, signature.postscale),
            process_set=process_set,
            device=signature.device,
        )
        Entry.__init__(self, request, "join", 0)
        self.name = signature.name

    def complete(self, result: Result | None, error: Exception | None) -> None:
        """Do nothing: only the ranks that submitted the collective have handles."""


@dataclass(slots=True)
class Cancellation:
    """Cancellation of a message to another rank, as this rank asks the coordinator for it.

    Attributes:
        entry: The message.
        kind: Kind of the cause.
        text: The cause, as errors name it.
        asked: Whether the coordinator has the question in the present generation of the message.
    """

    entry: Entry
    kind: CauseKind
    text: str
    asked: bool = False


# -- local ids ----------------------------------------------------------------------------------------------------


class Local:
    """Local id: a signature and call site as an integer.

    Attributes:
        id: The integer.
        key: The key of :class:`Locals` for it.
        signature: The part of its requests that ranks must agree on.
        site: The call site of its requests.
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
        """Return the definition of the id for the coordinator, and mark it as sent."""
        self.defined = True
        return Definition(self.id, self.signature, self.site, self.priority)


#: The local id of an entry that was not announced yet; its own object, so that no field is ``None``.
NO_LOCAL = Local(-1, (), Signature(0, "", 0, 0, ()), "")


class Locals:
    """Local ids of this rank, and the entries that were announced under each of them.

    An id stands for a signature and call site. This rank sends its definition to the coordinator once.

    Args:
        limit: Number of ids from which on the least recently used ones are given to other signatures.
    """

    def __init__(self, limit: int = LOCAL_LIMIT) -> None:
        #: Local ids by number.
        self.by_id: dict[int, Local] = {}
        self._limit = limit
        #: Local ids by their key, the least recently used first once ids become scarce.
        self._by_key: OrderedDict[Key, Local] = OrderedDict()
        #: The next number that was never used.
        self._next = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def queue(self, entry: Entry) -> None:
        """Give an entry its local id, and queue it behind other entries of that id."""
        entry.local = local = self.local_of(entry)
        entry.phase = ANNOUNCED
        local.queue.append(entry)

    def local_of(self, entry: Entry) -> Local:
        """Return the local id for entries like this one; a new one is defined."""
        request = entry.request
        shape = matched_shape(request)
        if request.reduction.has_nan:
            request.reduction = _with_one_nan(request.reduction)
        key: Key = (
            entry.name, request.kind, shape, request.dtype, request.reduction, entry.site, request.process_set, request.root,
            request.group, request.device, request.ranks, request.channel, request.about,
            request.priority,
        )  # fmt: skip
        local = self._by_key.get(key)
        if local is None:
            local = self._define(key, entry, shape)
        # Only once half of the ids are in use: before, each step of a training would pay for an order that no eviction reads.
        elif len(self._by_key) * 2 > self._limit:
            self._by_key.move_to_end(key)
        return local

    def unqueue(self, entry: Entry) -> None:
        """Remove an announced entry from the queue of its local id."""
        local = entry.local
        if entry.phase == ANNOUNCED and local is not NO_LOCAL:
            # Nearly always the oldest: the queue is searched only if it is not.
            if local.queue and local.queue[0] is entry:
                local.queue.popleft()
            elif entry in local.queue:
                local.queue.remove(entry)

    def take(self, id: int) -> Entry | None:
        """Remove and return the oldest entry that was announced as ``id``, or ``None`` if none is left."""
        local = self.by_id.get(id)
        return local.queue.popleft() if local is not None and local.queue else None

    def clear(self) -> None:
        """Forget all ids: each is defined again before its next use."""
        self._by_key.clear()
        self.by_id.clear()
        self._next = 0

    def _define(self, key: Key, entry: Entry, shape: tuple[int, ...]) -> Local:
        id = self._free_id()
        request = entry.request
        signature = signature_of(request, entry.name, shape)
        local = Local(id, key, signature, entry.site + request.about, request.priority)
        self._by_key[key] = local
        self.by_id[id] = local
        return local

    def _free_id(self) -> int:
        """Return a new id below the limit; at the limit the least recently used one that has nothing in flight, if there is one."""
        if self._next >= self._limit:
            for key, local in self._by_key.items():
                # One with entries in flight can't change its meaning: decisions about them name the id.
                if not local.queue:
                    del self._by_key[key]
                    return local.id
        # Beyond the limit only while that many different tensors are in flight.
        self._next += 1
        return self._next - 1

    def validate(self) -> None:
        """Assert the invariants that hold between calls."""
        ids = [local.id for local in self._by_key.values()]
        assert len(ids) == len(set(ids)), "an id stands for two things"
        for local in self._by_key.values():
            assert self.by_id[local.id] is local
            for entry in local.queue:
                assert entry.phase == ANNOUNCED, entry.phase
        assert len(self._by_key) <= max(self._limit, self._next)


def plain_name(name: object) -> str:
    """Return a name as it can be sent: one of a subclass of ``str``, such as ``numpy.str_``, as a ``str``."""
    if not isinstance(name, str):
        raise InvalidRequestError(f"name= takes a text, not {name!r} ({type(name).__name__}).")
    return str.__str__(name)


def signature_of(request: Request, name: str, shape: tuple[int, ...]) -> Signature:
    """Return the part of a request that ranks must agree on."""
    group, count = request.group or ("", 0)
    op, prescale, postscale = request.reduction
    return Signature(
        int(request.kind),
        name,
        int(request.dtype),
        int(op),
        shape,
        request.root,
        prescale,
        postscale,
        request.device,
        group,
        count,
        request.ranks,
        request.channel,
    )


def _with_one_nan(reduction: Reduction) -> Reduction:
    """Return the reduction with ``math.nan`` for every NaN: one object, which a dict finds again, so one id for all NaN."""
    op, *factors = reduction
    return Reduction(op, *(math.nan if math.isnan(factor) else factor for factor in factors))


def matched_shape(request: Request) -> tuple[int, ...]:
    """Return the shape as far as ranks must agree on it."""
    if request.input is None:
        return ()
    shape = request.input.shape
    if request.kind is OpKind.ALLGATHER or request.kind is OpKind.ALLTOALL:
        return shape[1:]
    return shape


# -- effects ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RunBatch:
    """Order to execute these entries as one operation of the plane of this process set, generation and device class.

    With ``payloads``, the small tensors of all members by position, no plane is needed. ``(process_set, sequence, batch)`` names
    the operation and is equal on all members. With ``reported``, this rank reports the end of the operation to the coordinator.
    """

    process_set: int
    generation: int
    sequence: int
    batch: int
    entries: tuple[Entry, ...]
    tables: tuple[tuple[tuple[int, ...], ...], ...]
    payloads: tuple[bytes, ...] = ()
    device: str = HOST
    reported: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """Order to end an entry with an error."""

    entry: Entry
    error: Exception


@dataclass(frozen=True, slots=True)
class Succeed:
    """Order to end an entry that moves no data."""

    entry: Entry
    process_set: int = -1


@dataclass(frozen=True, slots=True)
class AbortPlane:
    """Order to end the running operation of the plane of this process set and generation at once, and to drop the plane."""

    process_set: int
    generation: int


@dataclass(frozen=True, slots=True)
class ClosePlanes:
    """Order to close the planes of this process set older than ``generation`` once their work is done."""

    process_set: int
    generation: int


@dataclass(frozen=True, slots=True)
class NewGeneration:
    """Order to prepare the planes of a process set's new generation; ``index`` is -1 where this rank is no member.

    ``plane`` is for tensors of the host, ``device_planes`` are for those of other device classes.
    """

    process_set: int
    generation: int
    index: int
    members: tuple[Member, ...]
    plane: str
    options: dict[str, str]
    has_memory: bool
    device_planes: dict[str, str]


Effect = RunBatch | Fail | Succeed | AbortPlane | ClosePlanes | NewGeneration
