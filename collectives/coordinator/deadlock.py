"""Detection of collectives that can't complete: their ranks wait for each other in a circle, or for ranks that run no cell.

The cells that run on each rank explain why it has not submitted a collective that others wait for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from hvdlab.collectives.coordinator.membership import RankPeer
from hvdlab.collectives.coordinator.point_to_point import lost_messages
from hvdlab.collectives.coordinator.process_sets import Decisions, GenerationAbort, ProcessSetState
from hvdlab.collectives.coordinator.signatures import NegotiationRound, kind_label
from hvdlab.collectives.errors import CauseKind, call_name
from hvdlab.collectives.text import format_ranks


class RunningCells:
    """Register of the cells that run on tracked ranks.

    Attributes:
        idle: Living tracked ranks that run no cell.
    """

    def __init__(self) -> None:
        self.idle: set[int] = set()
        #: Cells on each rank, in order.
        self._active: dict[int, dict[str, None]] = {}
        #: The last cell that has ended on each rank, with the line of its failure; empty if it has not failed.
        self._last: dict[int, tuple[str, str]] = {}

    def add_rank(self, rank: int) -> None:
        """Add a tracked rank; it runs the cells that were announced for it before."""
        if not self._active.get(rank):
            self.idle.add(rank)

    def discard_rank(self, rank: int) -> None:
        """Forget a rank that is gone."""
        self.idle.discard(rank)
        self._active.pop(rank, None)
        self._last.pop(rank, None)

    def discard_all_but(self, ranks: Iterable[int]) -> None:
        """Forget cells that were announced for ranks other than these."""
        kept = set(ranks)
        for rank in [rank for rank in self._active if rank not in kept]:
            del self._active[rank]

    def begin(self, cell: str, rank: int) -> None:
        """Record that a cell is on its way to a rank, or runs there."""
        # The client and the rank both report the begin, in any order; the second report changes nothing.
        self._active.setdefault(rank, {})[cell] = None
        self.idle.discard(rank)

    def end(self, cell: str, rank: int, error: str) -> bool:
        """Record that a cell ended on a rank. Return whether the rank is idle now."""
        active = self._active.get(rank)
        if active is not None:
            active.pop(cell, None)
        self._last[rank] = (cell, error)
        if active:
            return False
        self._active.pop(rank, None)
        self.idle.add(rank)
        return True

    def is_running(self, rank: int) -> bool:
        return rank in self._active

    def absence_reason(self, missing: Sequence[int], waiting: Iterable[int]) -> AbsenceReason:
        """Return why the idle ranks ``missing`` do not submit the collective that the ranks ``waiting`` wait for."""
        # A failure before an orderly end, and either only of a cell that the waiting ranks run, if they run any: an older one explains
        # nothing.
        cells = {cell for rank in waiting for cell in self._active.get(rank, ())}
        last = {rank: self._last.get(rank, ("", "")) for rank in missing}
        failed = [rank for rank in missing if last[rank][1] and (last[rank][0] in cells or not cells)]
        if failed:
            text = "; ".join(f"rank {rank} failed: {last[rank][1]}" for rank in failed[:3])
            more = f"; and {len(failed) - 3} more ranks" if len(failed) > 3 else ""
            return AbsenceReason(CauseKind.CELL_FAILED, tuple(failed), text + more)
        ended = [rank for rank in missing if last[rank][0] in cells]
        if ended:
            ranks = format_ranks(ended)
            one, several = f"{ranks} finished its cell without it", f"{ranks} finished their cells without it"
            return AbsenceReason(CauseKind.CELL_ENDED, tuple(ended), one if len(ended) == 1 else several)
        runs = "runs" if len(missing) == 1 else "run"
        return AbsenceReason(CauseKind.CELL_ENDED, tuple(missing), f"{format_ranks(missing)} {runs} no cell")

    def validate(self, tracked: Iterable[int]) -> None:
        """Assert the invariants that hold between batches of events."""
        assert all(self._active.values())
        assert self.idle == {rank for rank in tracked if rank not in self._active}


@dataclass(frozen=True, slots=True)
class AbsenceReason:
    """Reason why ranks will not submit a collective that others wait for."""

    kind: CauseKind
    ranks: tuple[int, ...]
    text: str


def end_lost_messages(ps: ProcessSetState, cells: RunningCells, idle: AbstractSet[int], now: float) -> None:
    """End the messages that ranks without a cell will not send or receive. They concern no third rank, so the generation continues."""
    for name, absent in lost_messages(ps.negotiation.waiting(), idle).items():
        # Repeated, as the end of a round begins the next of its name with the submissions queued behind it, which can be lost as
        # well.
        while (current := ps.negotiation.rounds.get(name)) is not None and not current.submissions.keys() & {
            *absent
        }:
            why = cells.absence_reason(absent, current.submissions)
            ps.negotiation.end_message(current, why.kind, why.ranks, why.text, now)


def find_absence(ps: ProcessSetState, cells: RunningCells, idle: AbstractSet[int]) -> GenerationAbort | None:
    """Return the abort of the generation if its oldest collective that waits for ranks without a cell waits in vain; otherwise ``None``."""
    for current, missing in ps.negotiation.waiting():
        absent = [rank for rank in (missing or ps.members) if rank in idle]
        if absent and not current.info.from_any:  # otherwise another rank can send
            why = cells.absence_reason(absent, current.submissions)
            return GenerationAbort(ps, why.kind, why.ranks, why.text)
    return None


class DeadlockedRank(NamedTuple):
    """Rank in a wait that can't end, and the ranks that it waits for.

    Attributes:
        process_set: Process set of the collective.
        call: Collective that it waits in, such as ``allreduce `loss```.
        site: The user's line.
        missing: The ranks that it waits for. If one of them can continue, perhaps this rank can, too.
    """

    process_set: ProcessSetState
    call: str
    site: str
    missing: tuple[int, ...]


def find_deadlock(
    sets: Mapping[int, ProcessSetState], ranks: Mapping[int, RankPeer], idle: set[int]
) -> dict[int, DeadlockedRank]:
    """Return the ranks that can never continue, because each waits for ranks that can't continue either.

    A rank counts only if its collective is still undecided: one that was dispatched executes and will end by itself.

    Args:
        sets: The process sets.
        ranks: The ranks that are perhaps stuck.
        idle: Those that do nothing, and free no other rank.
    """
    stuck: dict[int, DeadlockedRank] = {}
    for rank, peer in ranks.items():
        waits = _waits_for(sets, peer)
        if waits is not None:
            stuck[rank] = waits
    # The largest set in which each rank waits only for members of it, or for idle ranks: those that can be freed are removed until
    # none is left.
    changed = True
    while changed:
        free = [rank for rank, s in stuck.items() if any(m not in stuck and m not in idle for m in s.missing)]
        for rank in free:
            del stuck[rank]
        changed = bool(free)
    return stuck


def abort_deadlock(
    sets: Mapping[int, ProcessSetState], ranks: Mapping[int, RankPeer], idle: set[int]
) -> Decisions[None]:
    """Abort the generations in which ranks wait for each other. The arguments are those of :func:`find_deadlock`."""
    stuck = find_deadlock(sets, ranks, idle)
    if stuck:
        text = describe_deadlock(stuck)
        for ps in {s.process_set.id: s.process_set for s in stuck.values()}.values():
            yield GenerationAbort(ps, CauseKind.DEADLOCK, tuple(sorted(stuck)), text)


def _waits_for(sets: Mapping[int, ProcessSetState], peer: RankPeer) -> DeadlockedRank | None:
    wait = peer.wait
    if wait is None:
        return None
    ps = sets.get(wait.process_set)
    defined = peer.definitions.get(wait.local)
    if ps is None or ps.generation != wait.generation or defined is None:
        return None
    negotiation = ps.negotiation
    if any(kept.submissions.get(peer.rank) is defined for kept in negotiation.priorities):
        return None  # it will be executed; the rank does not wait for a later round of the name, which can be incomplete
    current = negotiation.rounds.get(defined.info.name)
    if current is not None and peer.rank in current.submissions:
        if current.mismatch_since is not None:
            return None  # the round will get a verdict
        queued = (current.queued or {}).get(peer.rank, ())
        if current.submissions[peer.rank] is defined or any(item[0] is defined for item in queued):
            return _in_round(ps, current, defined.site, negotiation.missing(current))
    for held in negotiation.incomplete_groups.get(defined.info.group, ()):
        if held.submissions.get(peer.rank) is defined:
            # Complete by itself; the rest of its group can come from any member that has not joined.
            joined = negotiation.joined
            return _in_round(ps, held, defined.site, tuple(r for r in ps.members if r not in joined))
    return None


def _in_round(
    ps: ProcessSetState, current: NegotiationRound, site: str, missing: tuple[int, ...]
) -> DeadlockedRank:
    info = current.info
    call = call_name(kind_label(info.kind), info.name)
    if info.from_any:  # the same words on all ranks that wait so
        call = call_name("recv from any rank", info.signature.channel)
    return DeadlockedRank(ps, call, site, missing)


def describe_deadlock(stuck: Mapping[int, DeadlockedRank]) -> str:
    """Return a text that lists where ranks wait, those at the same place together."""
    places: dict[tuple[int, str, str], list[int]] = {}
    for rank in sorted(stuck):
        s = stuck[rank]
        places.setdefault((s.process_set.id, s.call, s.site), []).append(rank)
    several = len({id for id, _, _ in places}) > 1
    parts = []
    for (id, call, site), ranks in places.items():
        where = f" ({site})" if site else ""
        of = f" of process set {id}" if several else ""
        parts.append(f"{format_ranks(ranks)} in {call}{where}{of}")
    return "deadlock, all wait for each other: " + "; ".join(parts)
