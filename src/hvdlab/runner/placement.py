"""Which ranks are started on which hosts, and which ones leave, when hosts come and go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Changes:
    """What the supervisor changes now.

    Attributes:
        start: Host of each rank that is started.
        release: Ranks that leave, since their host is not there any more, or has fewer slots.
    """

    start: dict[int, str]
    release: tuple[int, ...]


def changes(
    usable: Mapping[str, int],
    aside: Collection[str],
    placed: Mapping[int, str],
    leaving: Collection[int],
    least: int,
    most: int,
) -> Changes:
    """Fill the hosts one after the other, and empty those that are gone.

    A rank that runs is never moved: it would lose its memory. New ranks get the lowest numbers that are free. Ranks of
    hosts that are gone stay as long as fewer than ``least`` would be left: the source of hosts may be wrong, and if it is
    not, the job survives their loss like any other.

    Args:
        usable: Slots of the hosts on which ranks may be started.
        aside: Hosts that are there, but have failed: no rank is started there, and none released.
        placed: Host of each rank that lives, or is being started.
        leaving: Those of them that were released already.
        least, most: How many ranks the job needs, and may have.
    """
    staying = {rank: host for rank, host in placed.items() if rank not in leaving}
    by_host: dict[str, list[int]] = {}
    for rank in sorted(staying):
        by_host.setdefault(staying[rank], []).append(rank)
    surplus = [
        rank for host, ranks in by_host.items() if host not in aside for rank in ranks[usable.get(host, 0) :]
    ]
    spare = max(0, len(staying) - least)
    release = tuple(sorted(sorted(surplus, reverse=True)[:spare]))
    taken, start = Counter(placed.values()), dict[int, str]()
    room = most - (len(staying) - len(release))
    number = 0
    for host, slots in usable.items():
        for _ in range(min(slots - taken[host], room - len(start))):
            while number in placed or number in start:
                number += 1
            start[number] = host
    return Changes(start, release)
