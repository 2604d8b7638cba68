"""Interned signatures, which are compared by identity, the definitions of the ranks' local ids, and rounds of negotiation: the
submissions of one name that belong together.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping

import msgspec

from hvdlab.collectives.protocol.messages import Definition, Party, Signature
from hvdlab.collectives.types import DType, OpKind, ReduceOp

Channel = tuple[str, int]
"""The channel of messages, and the rank that receives them."""
FuseKey = tuple[int, int, str, float, float]
"""Element type, operator, device class, prescale and postscale: equal in all tensors of a fused operation."""


class InternedSignature:
    """Unique object for all equal signatures.

    Attributes:
        signature, name, kind: The signature, and the fields of it that are read most.
        references: Number of definitions that use it.
        group, group_size: Equal for the tensors that are dispatched together, empty for one that stands alone; and their number.
        fuse_key: Equal for allreduces that can be one operation; ``None`` for collectives that are never fused.
        nbytes: Size of the tensor in bytes, for the fusion threshold.
        between: The two ranks that a message goes between, or the one that receives from any rank; empty for a collective of all members.
        channel: The channel of a message, whose receives from any rank can get it; ``None`` if it has none.
        from_any: Whether it is a receive from any rank.
    """

    __slots__ = (
        "between", "channel", "from_any", "fuse_key", "group", "group_size", "kind", "name", "nbytes", "references", "signature",
    )  # fmt: skip

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.name = signature.name
        self.kind = signature.kind
        is_message, ranks = signature.kind == OpKind.SENDRECV, signature.ranks
        self.from_any = is_message and len(ranks) == 1 and bool(signature.channel)
        two = is_message and len({*ranks}) == len(ranks) == 2
        self.between = ranks if two or self.from_any else ()
        self.channel: Channel | None = None
        if self.between and signature.channel:
            self.channel = signature.channel, ranks[-1]
        # Ranks never put a message into a group. If a peer does, the group is ignored: others must not wait for the rest of it.
        grouped = signature.group_size > 0 and not self.between
        # With the size: ranks that give one group different sizes are in different ones, and get the error that they disagree.
        self.group = f"{signature.group_size}:{signature.group}" if grouped else ""
        self.group_size = signature.group_size
        self.references = 0
        self.nbytes = _nbytes(signature)
        self.fuse_key: FuseKey | None = None
        if signature.kind == OpKind.ALLREDUCE:
            self.fuse_key = (
                signature.dtype,
                signature.op,
                signature.device,
                signature.prescale,
                signature.postscale,
            )

    def may_get(self, message: InternedSignature) -> bool:
        """Return whether this receive from any rank fits a message of its channel."""
        own, other = self.signature, message.signature
        return (own.dtype, own.shape, own.device) == (other.dtype, other.shape, other.device)


class LocalDefinition:
    """Definition of a rank's local id.

    Attributes:
        local: The local id.
        info: The signature that it stands for.
        site: The user's line that submits it.
        priority: Its priority, or ``None``; only allreduces have one.
    """

    __slots__ = ("info", "local", "priority", "site")

    def __init__(self, local: int, info: InternedSignature, site: str, priority: int | None = None) -> None:
        self.local, self.info, self.site = local, info, site
        self.priority = priority if info.fuse_key is not None else None


class SignatureTable:
    """Table of signatures that some rank's definition uses."""

    def __init__(self) -> None:
        #: Signatures with at least one definition; names that change with each step must not add up.
        self._interned: dict[Signature, InternedSignature] = {}

    def __len__(self) -> int:
        return len(self._interned)

    def __iter__(self) -> Iterator[InternedSignature]:
        return iter(self._interned.values())

    def define(self, definitions: dict[int, LocalDefinition], definition: Definition) -> None:
        """Add a rank's definition; it replaces an earlier one of that local id."""
        signature = _comparable(definition.signature)
        info = self._interned.get(signature)
        if info is None:
            info = self._interned[signature] = InternedSignature(signature)
        info.references += 1
        old = definitions.get(definition.local)
        definitions[definition.local] = LocalDefinition(
            definition.local, info, definition.site, definition.priority
        )
        # After the new one has its reference: both can be the same signature, which must not be dropped in between.
        if old is not None:
            self._release(old.info)

    def forget(self, definitions: dict[int, LocalDefinition]) -> None:
        """Drop all definitions of a rank that is gone."""
        for defined in definitions.values():
            self._release(defined.info)
        definitions.clear()

    def _release(self, info: InternedSignature) -> None:
        info.references -= 1
        if info.references == 0:
            del self._interned[info.signature]


def _comparable(signature: Signature) -> Signature:
    """Return the same, but with the object ``math.nan`` for a factor that is NaN: a dict finds that again, as it finds no other NaN.

    A factor such as 1 / loss is NaN on all ranks once the training has diverged, which is no disagreement.
    """
    if math.isnan(signature.prescale) or math.isnan(signature.postscale):
        prescale = math.nan if math.isnan(signature.prescale) else signature.prescale
        postscale = math.nan if math.isnan(signature.postscale) else signature.postscale
        return msgspec.structs.replace(signature, prescale=prescale, postscale=postscale)
    return signature


def _nbytes(signature: Signature) -> int:
    count = 1
    for extent in signature.shape:
        count *= extent
    try:
        return count * DType(signature.dtype).itemsize
    except ValueError:
        return count


def kind_label(kind: int) -> str:
    """Return ``allreduce`` for its number; a number that is unknown here stays a number."""
    try:
        return OpKind(kind).label
    except ValueError:
        return f"collective {kind}"


def describe(signature: Signature, *, device: bool = False) -> str:
    """Return a request in words, such as ``allreduce float32[10, 4] sum``. They name a device other than the host; with ``device`` any."""
    kind = signature.kind
    words = [kind_label(kind)]
    if kind in (OpKind.ADD_PROCESS_SET, OpKind.REMOVE_PROCESS_SET):
        return f"{words[0]} {list(signature.ranks)}"
    if kind in (OpKind.BARRIER, OpKind.JOIN):
        return words[0]
    words.append(_tensor(signature, open_first=kind in (OpKind.ALLGATHER, OpKind.ALLTOALL)))
    if kind in (OpKind.ALLREDUCE, OpKind.REDUCESCATTER):
        words.append(_operator(signature.op))
        if signature.prescale != 1.0:
            words.append(f"prescale {signature.prescale:g}")
        if signature.postscale != 1.0:
            words.append(f"postscale {signature.postscale:g}")
    if kind == OpKind.BROADCAST:
        words.append(f"from rank {signature.root}")
    if kind == OpKind.SENDRECV and len(signature.ranks) == 2:
        words.append("from rank {} to rank {}".format(*signature.ranks))
    elif kind == OpKind.SENDRECV and len(signature.ranks) == 1:
        words.append(f"from any rank to rank {signature.ranks[0]}")
    if device or signature.device != "cpu":
        words.append(f"on {signature.device}")
    if signature.group:
        words.append(f"in group `{signature.group}` of {signature.group_size}")
    return " ".join(words)


def _tensor(signature: Signature, *, open_first: bool) -> str:
    try:
        label = DType(signature.dtype).label
    except ValueError:
        label = f"dtype {signature.dtype}"
    extents = [*(["*"] if open_first else []), *map(str, signature.shape)]
    return f"{label}[{', '.join(extents)}]"


def _operator(op: int) -> str:
    try:
        return ReduceOp(op).name.lower()
    except ValueError:
        return f"operator {op}"


Extra = tuple[int, ...]
Item = tuple[LocalDefinition, Extra]


class NegotiationRound:
    """Submissions of one name that belong together, at most one from each rank.

    Attributes:
        info, local: Signature and local id of the first submission.
        same_local_id: Whether all ranks that have submitted it did so under the local id of the first.
        submissions: Definitions under which ranks have submitted it, by rank.
        extras: Numbers that came along and can differ between ranks, by rank; ``None`` if there are none.
        payloads: Small tensors that came along, by rank; ``None`` if there are none.
        queued: Later submissions of the same name by rank, oldest first; ``None`` if there never were any.
        since: Time at which the first submission came (monotonic seconds).
        reported: How many times it was reported as stalled.
        stalled: Entry of the decision log about that; 0 until then.
        mismatch_since: Time at which the first signature that differs came, or ``None``.
        absent: Once it is complete, members that have joined and did not submit it.
        priority: Priority of the first submission, or ``None`` if that had none.
    """

    __slots__ = (
        "absent", "extras", "info", "local", "mismatch_since", "payloads", "priority", "queued", "reported", "same_local_id", "since",
        "stalled", "submissions",
    )  # fmt: skip

    def __init__(
        self, info: InternedSignature, local: int, since: float, priority: int | None = None
    ) -> None:
        self.info = info
        self.local = local
        self.same_local_id = True
        self.submissions: dict[int, LocalDefinition] = {}
        # Empty dicts only where they are needed: nearly every round needs none of these three.
        self.extras: dict[int, Extra] | None = None
        self.payloads: dict[int, bytes] | None = None
        self.queued: dict[int, deque[Item]] | None = None
        self.since = since
        self.reported = self.stalled = 0
        self.mismatch_since: float | None = None
        self.absent: tuple[int, ...] = ()
        self.priority = priority


def parties_of(submissions: Mapping[int, LocalDefinition]) -> tuple[Party, ...]:
    """Group the ranks by the request that they made; each group's site is that of its lowest rank."""
    groups: dict[InternedSignature, list[int]] = {}
    for rank in sorted(submissions):
        groups.setdefault(submissions[rank].info, []).append(rank)
    devices = len({info.signature.device for info in groups}) > 1
    return tuple(
        Party(tuple(ranks), describe(info.signature, device=devices), submissions[ranks[0]].site)
        for info, ranks in groups.items()
    )
