"""Finding ranks that wait for each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hvdlab.collectives.coordinator.membership import RankPeer
from hvdlab.collectives.coordinator.process_sets import ProcessSet
from hvdlab.collectives.coordinator.rounds import Round
from hvdlab.collectives.coordinator.signatures import kind_label
from hvdlab.collectives.errors import call_name, format_ranks


class Stuck(NamedTuple):
    """A rank in a wait, and the ranks that it waits for.

    Attributes:
        process_set: Process set of the collective.
        what: What it waits in, such as ``allreduce `loss```.
        site: The user's line.
        missing: The ranks that it waits for. If one of them can go on, so may this rank.
    """

    process_set: ProcessSet
    what: str
    site: str
    missing: tuple[int, ...]


def _in_round(ps: ProcessSet, current: Round, site: str, missing: tuple[int, ...]) -> Stuck:
    info = current.info
    what = call_name(kind_label(info.kind), info.name)
    if info.from_any:  # the same words on all ranks that wait so
        what = call_name("recv from any rank", info.signature.channel)
    return Stuck(ps, what, site, missing)


def find_deadlock(
    sets: Mapping[int, ProcessSet], ranks: Mapping[int, RankPeer], idle: set[int]
) -> dict[int, Stuck]:
    """The ranks that can never go on, because each waits for ranks that can't go on either.

    A rank counts only if the coordinator has not decided what it waits for: what was released executes and will end by itself.

    Args:
        sets: The process sets.
        ranks: The ranks that may be stuck.
        idle: Those that do nothing, and free no other rank.
    """
    stuck: dict[int, Stuck] = {}
    for rank, peer in ranks.items():
        waits = _waits_for(sets, peer)
        if waits is not None:
            stuck[rank] = waits
    changed = True
    while changed:
        free = [rank for rank, s in stuck.items() if any(m not in stuck and m not in idle for m in s.missing)]
        for rank in free:
            del stuck[rank]
        changed = bool(free)
    return stuck


def _waits_for(sets: Mapping[int, ProcessSet], peer: RankPeer) -> Stuck | None:
    wait = peer.wait
    if wait is None:
        return None
    ps = sets.get(wait.process_set)
    defined = peer.definitions.get(wait.local)
    if ps is None or ps.epoch != wait.epoch or defined is None:
        return None
    matcher = ps.matcher
    if any(kept.heads.get(peer.rank) is defined for kept in matcher.schedule):
        return None  # it will be executed; a later round of the name, which may be incomplete, is not what the rank waits for
    current = matcher.rounds.get(defined.info.name)
    if current is not None and peer.rank in current.heads:
        if current.disputed is not None:
            return None  # the round will get a verdict
        queued = (current.behind or {}).get(peer.rank, ())
        if current.heads[peer.rank] is defined or any(item[0] is defined for item in queued):
            return _in_round(ps, current, defined.site, matcher.missing(current))
    for held in matcher.held.get(defined.info.group, ()):
        if held.heads.get(peer.rank) is defined:
            # Complete by itself; what its group lacks may have to come from any member that has not joined.
            joined = matcher.joined
            return _in_round(ps, held, defined.site, tuple(r for r in ps.members if r not in joined))
    return None


def describe_deadlock(stuck: Mapping[int, Stuck]) -> str:
    """Which ranks wait where, those in the same place together."""
    places: dict[tuple[int, str, str], list[int]] = {}
    for rank in sorted(stuck):
        s = stuck[rank]
        places.setdefault((s.process_set.id, s.what, s.site), []).append(rank)
    several = len({id for id, _, _ in places}) > 1
    parts = []
    for (id, what, site), ranks in places.items():
        where = f" ({site})" if site else ""
        of = f" of process set {id}" if several else ""
        parts.append(f"{format_ranks(ranks)} in {what}{where}{of}")
    return "deadlock, all wait for each other: " + "; ".join(parts)
