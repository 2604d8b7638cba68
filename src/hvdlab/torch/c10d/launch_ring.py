"""The last launches of a watched group, and the comparison of several ranks' launches. No I/O.

A launch is one call that this rank has handed over to the inner group of torch's. A rank records it in a :class:`LaunchRing` by storing
references, and puts it into words only when ranks compare their rings.

Launches are counted for each channel: the collectives of a group are one channel, and the messages of one direction and tag another. The
count begins at 1 with each inner group, so that one number is the same call on all ranks, as long as none has skipped one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from hvdlab.collectives.errors import Disagreement
from hvdlab.collectives.protocol.member_lists import pack, unpack
from hvdlab.torch.c10d.call_history import CallHistoryMessage, CallRecord, find_drift, find_shift

SLOTS = 256
"""Launches of each group that a rank remembers: a power of two. A step of a model of 100 layers with ``fully_shard`` has some 300."""
SENT = 64
"""Launches that a rank sends for a comparison, the last ones: as many as the agreed groups compare."""
COLLECTIVES = ""
"""The channel of a group's collectives."""

_KINDS = {
    "all_reduce": "allreduce", "all_gather": "allgather", "reduce_scatter": "reducescatter", "all_to_all": "alltoall",
}  # fmt: skip
"""The core's words for operations, which errors of both kinds of groups use."""
_ANY_SHAPE = ("all_gather of lists", "reduce_scatter of lists", "all_to_all", "gather", "scatter", "barrier")
"""Operations whose tensors may differ in shape between the ranks, or that have none."""


class Launch(CallRecord, frozen=True, array_like=True):
    """One launch in words.

    Attributes:
        request: Operation, dtype, shape, operator and root, such as ``allreduce float32[2] sum``: equal on all ranks.
    """

    request: str = ""


class LaunchReport(msgspec.Struct, frozen=True, array_like=True):
    """Report of one rank's launches on one channel since the inner group was made.

    Attributes:
        count: How many there were.
        first: How many of them came before ``launches``.
        launches: The last of them.
    """

    count: int = 0
    first: int = 0
    launches: tuple[Launch, ...] = ()

    def at(self, number: int) -> Launch | None:
        """Return the launch with this number, counted from 1, if it is known."""
        index = number - 1 - self.first
        return self.launches[index] if 0 <= index < len(self.launches) else None


class LaunchSlot(NamedTuple):
    """One launch as the ring keeps it: references, which are put into words later.

    Attributes:
        generation, channel, number: The inner group, the channel, and the launch's number on it.
        sequence: The number of the call in this rank's errors.
        operation: Torch's name of the operation; behind it ``of lists`` if its tensors may differ in shape.
        tensor: Shape and dtype of the first tensor, or ``None``.
        options: Torch's options, with the operator or the root.
        site: The user's line of code.
        part: The part of a model that it is for, as errors show it.
        step: Steps that the rank's optimizers had taken before it.
    """

    generation: int
    channel: str
    number: int
    sequence: int
    operation: str
    tensor: tuple[Any, Any] | None
    options: Any
    site: str
    part: str
    step: int


class LaunchRing:
    """Ring of the last launches of this rank in one group. One thread adds at a time."""

    def __init__(self) -> None:
        #: The ring, whose size is a power of two, and how many launches there were.
        self._slots: list[LaunchSlot | None] = [None] * SLOTS
        self._count = 0

    def add(self, slot: LaunchSlot) -> None:
        """Record a launch."""
        count = self._count
        self._slots[count & (SLOTS - 1)] = slot
        # After the slot: a reader on another thread must not count a launch that is not there.
        self._count = count + 1

    def drop_last(self) -> None:
        """Forget the last launch, which torch has refused."""
        self._count -= 1
        self._slots[self._count & (SLOTS - 1)] = (
            None  # otherwise a full ring would show it in place of its oldest
        )

    def slots(self, generation: int, channel: str) -> list[LaunchSlot]:
        """Return the launches of one channel of an inner group, the oldest first. Any thread."""
        # Read once, and before the slots: the launching thread goes on to count.
        count = self._count
        kept = [self._slots[i & (SLOTS - 1)] for i in range(max(0, count - SLOTS), count)]
        found = [slot for slot in kept if slot is not None and slot[:2] == (generation, channel)]
        # Another thread may have gone round meanwhile and put newer launches before older ones.
        return sorted(found, key=lambda slot: slot.number)

    def report(self, generation: int, channel: str, members: Sequence[int]) -> LaunchReport:
        """Return the last launches of one channel of an inner group, in words. Any thread."""
        slots = self.slots(generation, channel)[-SENT:]
        if not slots:
            return LaunchReport()
        launches = tuple(launch_of(slot, members) for slot in slots)
        return LaunchReport(slots[-1].number, slots[0].number - 1, launches)


def launch_of(slot: LaunchSlot, members: Sequence[int]) -> Launch:
    """Return a launch in words; ``members`` are the world's ranks by their numbers in the group."""
    return Launch(
        slot.sequence, slot.operation, slot.site + slot.part, slot.step, request_in_words(slot, members)
    )


def request_in_words(slot: LaunchSlot, members: Sequence[int]) -> str:
    """Return a launch's operation, dtype, shape, operator and root in the words of the agreed groups."""
    operation = slot.operation.removesuffix(" of lists")
    words = [_KINDS.get(operation, operation)]
    if slot.tensor is not None and operation != "barrier":
        shape, dtype = slot.tensor
        dims = "…" if slot.operation in _ANY_SHAPE else ", ".join(map(str, shape))
        words.append(f"{str(dtype).removeprefix('torch.')}[{dims}]")
    operator = getattr(slot.options, "reduceOp", None)
    if operator is not None:
        words.append(_operator_name(operator))
    root = getattr(slot.options, "rootRank", None)
    if root is not None:
        words.append(
            f"from rank {members[root]}"
            if operation in ("broadcast", "scatter")
            else f"to rank {members[root]}"
        )
    return " ".join(words)


def _operator_name(operator: Any) -> str:
    kinds = torch.distributed.ReduceOp.RedOpType
    for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR", "PREMUL_SUM"):
        if operator == getattr(kinds, name):
            return {"AVG": "average"}.get(name, name.lower())
    return "another operator"


class Verdict(NamedTuple):
    """Comparison of the launches of several ranks at one number.

    Attributes:
        waited: The ranks that have launched it.
        sites: Their lines of code.
        missing: The ranks that have not, or do not answer.
        parties: The different requests, if the ranks that have launched it disagree; otherwise empty.
        note: A sentence on a rank that has skipped or added a call before, if the ranks' lines show one; otherwise empty.
    """

    waited: tuple[int, ...]
    sites: tuple[str, ...]
    missing: tuple[int, ...]
    parties: tuple[Disagreement, ...] = ()
    note: str = ""


def compare_launches(number: int, members: Sequence[int], reports: Mapping[int, LaunchReport]) -> Verdict:
    """Compare the launches of a channel at one number.

    Args:
        number: The number of the launch, from 1, that some rank waits for.
        members: The ranks that have to launch it.
        reports: The launches of those of them that answer, by rank.
    """
    waited = tuple(rank for rank in sorted(reports) if reports[rank].count >= number)
    launches = {rank: reports[rank].at(number) for rank in waited}
    sites = tuple(launch.site if (launch := launches[rank]) is not None else "" for rank in waited)
    missing = tuple(sorted(set(members).difference(waited)))
    groups: dict[str, list[int]] = {}
    for rank, launch in launches.items():
        if launch is not None:  # a rank that is far ahead has forgotten it, and so has completed it
            groups.setdefault(launch.request, []).append(rank)
    parties: tuple[Disagreement, ...] = ()
    if len(groups) > 1:
        parties = tuple(
            Disagreement(tuple(ranks), request, sites[waited.index(ranks[0])])
            for request, ranks in groups.items()
        )
    return Verdict(waited, sites, missing, parties, _first_difference(reports))


def _first_difference(reports: Mapping[int, LaunchReport]) -> str:
    """Return a sentence on the first rank that has gone another way than the lowest one; empty if none has."""
    if not reports:
        return ""
    own, *others = sorted(reports)
    mine = _history(reports[own])
    for rank in others:
        theirs = _history(reports[rank])
        found = find_shift(mine, theirs) or find_drift(mine, theirs)
        if found is not None:
            return found.sentence(rank, own)
    return ""


def _history(report: LaunchReport) -> CallHistoryMessage:
    return CallHistoryMessage("", 0, report.first, report.launches)


class Inquiry:
    """Inquiry about a channel's launches at one number, while its answers come in. State of the rank that compares; no I/O.

    Args:
        number: The number of the launch that a rank waits for.
        members: The ranks that have to launch it.
        asked: Those of them that live, which answer.
    """

    def __init__(self, number: int, members: Sequence[int], asked: Sequence[int]) -> None:
        self.number, self.members = number, tuple(members)
        #: The ranks that have not answered yet; an answer that comes twice counts once.
        self._waiting = set(asked)
        self._reports: dict[int, LaunchReport] = {}
        #: Whether a rank has a stand-in for it already, which waits for those of all others.
        self.stood_in = False

    def answered(self, rank: int, report: LaunchReport, *, stood_in: bool = False) -> bool:
        """Record an answer. Return whether it was the last one."""
        self.stood_in |= stood_in
        if rank not in self._waiting:
            return False
        self._waiting.discard(rank)
        self._reports[rank] = report
        return not self._waiting

    def verdict(self) -> Verdict:
        """Return the comparison of the answers that there are; a rank that has not answered counts as missing."""
        return compare_launches(self.number, self.members, self._reports)


class WatchMail(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of the mail between the ranks of a watched group: about one launch of one inner group."""

    group: str
    generation: int
    channel: str = COLLECTIVES
    number: int = 0


class LateLaunch(WatchMail, frozen=True, array_like=True):
    """Mail to the comparer: this launch is late here."""


class LaunchQuery(WatchMail, frozen=True, array_like=True):
    """Mail from the comparer: answer with the launches of this channel."""


class LaunchAnswer(WatchMail, frozen=True, array_like=True):
    """Mail to the comparer: the launches of this channel, and whether the launch asked about has a stand-in here."""

    report: LaunchReport = LaunchReport()
    stood_in: bool = False


class LaunchVerdict(WatchMail, frozen=True, array_like=True):
    """Mail from the comparer: its comparison. All ranks get the lists of all ranks, so runs are sent in place of them.

    Attributes:
        waited, missing, parties, note: As in :class:`Verdict`; each run of consecutive ranks as its first and the negative of its last.
        sites: The lines of the ranks that have launched it, those that are equal in a row once.
        repeats: How many ranks in a row each of them is of.
        stand_in: Whether ranks that have launched it let a stand-in take part in the core.
    """

    waited: tuple[int, ...] = ()
    sites: tuple[str, ...] = ()
    repeats: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    parties: tuple[tuple[tuple[int, ...], str, str], ...] = ()
    note: str = ""
    stand_in: bool = False

    @classmethod
    def of(
        cls, group: str, generation: int, channel: str, number: int, verdict: Verdict, *, stand_in: bool
    ) -> LaunchVerdict:
        """Return the mail with a comparison."""
        runs = [(site, len(list(same))) for site, same in itertools.groupby(verdict.sites)]
        return cls(
            group,
            generation,
            channel,
            number,
            pack(verdict.waited),
            tuple(site for site, _ in runs),
            tuple(count for _, count in runs),
            pack(verdict.missing),
            tuple((pack(party.ranks), party.request, party.site) for party in verdict.parties),
            verdict.note,
            stand_in,
        )

    def verdict(self) -> Verdict:
        """Return the comparison."""
        runs = zip(self.sites, self.repeats, strict=True)
        return Verdict(
            unpack(self.waited),
            tuple(itertools.chain.from_iterable(itertools.repeat(site, count) for site, count in runs)),
            unpack(self.missing),
            tuple(Disagreement(unpack(ranks), request, site) for ranks, request, site in self.parties),
            self.note,
        )


class InnerEnded(WatchMail, frozen=True, array_like=True):
    """Mail to the comparer: the inner group before ``generation`` has ended here, and this rank can make the next one."""


class MakeInner(WatchMail, frozen=True, array_like=True):
    """Mail from the comparer: all ranks can make the inner group ``generation``; make it."""


class FailedCell(WatchMail, frozen=True, array_like=True):
    """Mail to all ranks: this cell has failed here, so that a launch of it that waits for this rank waits in vain."""

    cell: str = ""


AnyWatchMail = LateLaunch | LaunchQuery | LaunchAnswer | LaunchVerdict | InnerEnded | MakeInner | FailedCell
