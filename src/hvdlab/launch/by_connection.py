"""Ranks that a program of others starts, all at once: we know of them by their connections to the coordinator alone."""

from __future__ import annotations

import contextlib
import os
import threading

from hvdlab.collectives.client import Client, Membership
from hvdlab.collectives.system import host_key
from hvdlab.launch.starter import Capability, Ended, RankObserver, Started

_TOGETHER = "it starts all of them together, as one job"
_BY_CONNECTION = "they are known by their connections to the coordinator alone"

LACKS = {
    Capability.SINGLE_RANKS: _TOGETHER,
    Capability.RESIZE: _TOGETHER,
    Capability.KEEP: "they end with the program that started them, and that with the notebook",
    Capability.REASONS: _BY_CONNECTION,
    Capability.SIGNALS: _BY_CONNECTION,
}
"""What launchers of such ranks can't do."""


class MembershipRanks:
    """Reporter of the starts and ends of ranks as the coordinator knows them. Any thread.

    Args:
        client: The connection to the coordinator.
        ranks: Observer that gets the reports.
    """

    def __init__(self, client: Client, ranks: RankObserver) -> None:
        self._client, self._ranks = client, ranks
        self._lock = threading.Lock()
        #: Rank to its process, while it is connected. This and the following are guarded by the lock.
        self._pids: dict[int, int] = {}
        #: Ranks that have ended, unless they came back.
        self._ended: set[int] = set()
        #: Whether the program that started them has ended.
        self._over = False
        client.on_membership(self._on_membership)

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank of this host. Others end by the coordinator's order, or with the program that started them."""
        here = host_key()
        for member in self._client.membership().members:
            if member.rank == rank and member.host == here:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member.pid, number)

    def end_all(self, size: int, reason: str, tail: str = "") -> None:
        """Report the end of the program that started the ranks of a job of ``size``: they have ended too, and none will follow."""
        with self._lock:
            left = [(rank, self._pids.pop(rank, 0)) for rank in range(size) if rank not in self._ended]
            self._ended.update(rank for rank, _ in left)
            self._over = True
        for rank, pid in left:
            self._ranks.handle(Ended(rank, pid, reason, tail))

    def _on_membership(self, membership: Membership) -> None:
        events: list[Started | Ended] = []
        with self._lock:
            # A membership that arrives after end_all() must not report the ranks as started again.
            for member in membership.members if not self._over else ():
                if self._pids.get(member.rank) != member.pid:
                    self._pids[member.rank] = member.pid
                    self._ended.discard(member.rank)
                    events.append(Started(member.rank, member.pid))
            for death in membership.deaths:
                if self._pids.pop(death.rank, None) is not None:
                    events.append(Ended(death.rank, death.pid, death.reason))
            for rank in set(self._pids) - set(membership.ranks):
                events.append(Ended(rank, self._pids.pop(rank), "it left"))
            self._ended.update(event.rank for event in events if isinstance(event, Ended))
        for event in events:
            self._ranks.handle(event)
