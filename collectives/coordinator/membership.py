"""Membership of the job: ranks that are expected, alive and dead, and clients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Iterable
from typing import NamedTuple

from hvdlab.collectives.coordinator.decision_log import DecisionEntry, DecisionKind, InvariantOf
from hvdlab.collectives.coordinator.events import Log, Send
from hvdlab.collectives.coordinator.signatures import LocalDefinition
from hvdlab.collectives.protocol.handshake import AgreedVersions
from hvdlab.collectives.protocol.messages import MOST_RANKS, Blocked, Death, Hello, Member, Returned, World

WORLD_INTERVAL = 0.2
"""Seconds between reports of the forming world to its ranks: with one for each newcomer a thousand ranks would get a million."""


class Wait(NamedTuple):
    """Wait of a rank's user for this local id. ``since`` is the coordinator's monotonic time, in seconds."""

    process_set: int
    generation: int
    local: int
    since: float


class RankPeer:
    """Connection of a living rank.

    Attributes:
        peer: Its connection.
        rank, pid, member: Its rank, its process id, and its description for other peers.
        tracked: Whether its collectives belong to cells.
        leaving: Whether the coordinator has asked it to leave.
        admitted: Whether it has been in a world.
        outdated: Whether the others have continued without it since its connection was lost, and have not admitted it again yet.
        versions: Versions that all ranks must have alike, by name, as far as its Hello has them.
        definitions: Definitions of its local ids.
        wait: The undecided collective in which its user is blocked, or ``None``.
        executing: The executing operation in which its user is blocked, or ``None``.
    """

    __slots__ = (
        "admitted", "definitions", "executing", "leaving", "member", "outdated", "peer", "pid", "rank", "tracked", "versions", "wait",
    )  # fmt: skip

    def __init__(self, peer: int, rank: int, hello: Hello, started: float) -> None:
        self.peer = peer
        self.rank = rank
        self.pid = hello.pid
        self.member = Member(
            rank, hello.host, hello.pid, hello.address, tuple(hello.planes), hello.plane, started
        )
        self.tracked = hello.cells_tracked
        self.versions = hello.versions
        self.leaving = False
        self.admitted = self.outdated = False
        self.definitions: dict[int, LocalDefinition] = {}
        self.wait: Wait | None = None
        self.executing: Wait | None = None

    def update_waits(self, message: Blocked, now: float) -> None:
        """Update :attr:`wait` and :attr:`executing` by a report; a negative local id ends the wait of its kind."""
        # NaN and infinity can't be subtracted from a time.
        seconds = message.seconds if math.isfinite(message.seconds) else 0.0
        wait = Wait(message.process_set, message.generation, message.local, now - max(0.0, seconds))
        over = message.local < 0
        self.executing = wait if message.executing and not over else None
        # An operation that executes is not undecided any more.
        if not message.executing or (self.wait is not None and self.wait[:3] == wait[:3]):
            self.wait = None if over or message.executing else wait


class MembershipTable:
    """Table of the job's ranks and clients.

    Attributes:
        ranks: Living ranks.
        clients: Connections of clients.
        observers: Connections of observers, which only learn which ranks live.
        expected: Ranks that make up the world, or ``None`` as long as neither the options nor a client have set them.
        awaited: Expected ranks that have not connected yet and are not known to be dead.
        returning: Ranks of scripts that have sent Bye and not become members again. Shutting down and initializing
            again concerns the whole world: one that is back waits until all others have sent Bye as well.
        deaths: The last death of each rank that was not replaced.
        waiting: Ranks that elastic training has to admit.
        hosts: Number of living ranks, by host.
        versions: The versions of the living ranks.
        leaving: Ranks of the world that are released where elastic training lets it change.
        kept: Those that were released and stay for the time being, since too few would be left to train.
        changed: Whether the membership has changed since clients got it last.
        formed: Whether a generation of the world has begun since clients got the membership last; its members know of it.
        urgent: Whether ranks have to get the membership without delay.
        ranks_sent_at: Time at which ranks got it last (monotonic seconds).
    """

    def __init__(self, expected: Iterable[int] | None, wall_offset: float) -> None:
        self.ranks: dict[int, RankPeer] = {}
        self.clients: dict[int, None] = {}
        self.observers: dict[int, None] = {}
        self.expected: tuple[int, ...] | None = None if expected is None else tuple(sorted(set(expected)))
        self.awaited: set[int] = set(self.expected or ())
        self.returning: set[int] = set()
        self.deaths: dict[int, Death] = {}
        self.waiting: tuple[int, ...] = ()
        self.hosts: Counter[str] = Counter()
        self.versions = AgreedVersions()
        self.leaving: set[int] = set()
        self.kept: set[int] = set()
        self.changed = False
        self.formed = False
        self.urgent = False
        # An interval before any time of the clock, so that the first report is due at once.
        self.ranks_sent_at = -WORLD_INTERVAL
        #: Whether ranks have to get a changed membership that clients have got already.
        self._ranks_owed = False
        #: Turns monotonic seconds into seconds since 1970.
        self._wall_offset = wall_offset
        #: Process id of each rank that has sent Bye: the end of that process is no death.
        self._left: dict[int, int] = {}
        #: Ranks that are dead only because their connection ended, with the time of their last sign of life.
        self._unexplained: dict[int, float] = {}

    # -- joining --------------------------------------------------------------------------------------------------

    def free_rank(self) -> int:
        """Return the rank for a newcomer that leaves the choice to the coordinator."""
        for rank in self.expected or ():
            if rank not in self.ranks:
                return rank
        return max((*self.ranks, -1)) + 1

    def refusal(self, rank: int) -> str:
        """Return why no process may come as ``rank`` now, or an empty text."""
        if rank >= MOST_RANKS:
            return f"rank {rank} is too high; ranks have numbers from 0 to {MOST_RANKS - 1}"
        living = self.ranks.get(rank)
        if living is not None:
            return (
                f"rank {rank} is already connected (pid {living.pid} on {living.member.host or 'this host'})"
            )
        if self.expected is not None and rank not in self.expected:
            return f"rank {rank} is not expected; the world is made of ranks {list(self.expected)}"
        return ""

    def add(self, peer: int, rank: int, hello: Hello, now: float) -> RankPeer:
        # The number belongs to another process now, whose end is a death unless that process sends Bye itself.
        self._left.pop(rank, None)
        self._withdraw_release(rank)
        newcomer = self.ranks[rank] = RankPeer(peer, rank, hello, now + self._wall_offset)
        self.hosts[hello.host] += 1
        self.versions.add(hello.versions)
        self.awaited.discard(rank)
        self.deaths.pop(rank, None)
        self._unexplained.pop(rank, None)
        self.changed = True
        return newcomer

    def cut_off_since(self, rank: int, pid: int) -> float | None:
        """Return the time of this process's last sign of life, if its only cause of death is a lost connection: it can come back.

        ``None`` if another process has this rank or had it, if the launcher has reported its exit, or if it broke the protocol.
        """
        death = self.deaths.get(rank)
        return self._unexplained.get(rank) if death is not None and death.pid == pid else None

    def report_return(
        self, rank: RankPeer, seconds: float
    ) -> Generator[DecisionEntry | Log | Send, None, None]:
        """Report that a rank whose connection was lost has come back after this time."""
        after = f"{seconds:.1f} s"
        entry = DecisionEntry(DecisionKind.RETURNED, ranks=(rank.rank,), facts={"after": after})
        yield entry
        text = f"rank {rank.rank} (pid {rank.pid}) is back after {after}"
        yield Log(text, warning=False, decision=entry.number)
        yield Send(tuple(self.clients), Returned(rank.rank, rank.pid, seconds))

    def set_expected(self, ranks: Iterable[int]) -> list[RankPeer]:
        """Set the ranks that make up the world. Return the living ranks that have no place in it any more."""
        self.expected = tuple(sorted(set(ranks)))
        self.awaited = {rank for rank in self.expected if rank not in self.ranks}
        self.returning.intersection_update(self.expected)
        self.leaving.intersection_update(self.expected)
        self.kept.intersection_update(self.expected)
        for rank in [rank for rank in self.deaths if rank not in self.expected]:
            del self.deaths[rank]
            self._unexplained.pop(rank, None)
        self.changed = self.urgent = True
        # Those that leave already have got their message.
        dropped = [p for p in self.ranks.values() if p.rank not in self.expected and not p.leaving]
        for peer in dropped:
            peer.leaving = True
        return dropped

    # -- going ----------------------------------------------------------------------------------------------------

    def leave(self, gone: RankPeer, reason: str) -> Generator[DecisionEntry, None, int]:
        """Remove a rank that has sent Bye, for this reason. Return the entry of the decision log about it."""
        self._leave(gone)
        entry = DecisionEntry(DecisionKind.LEFT, ranks=(gone.rank,), facts={"reason": reason})
        yield entry
        return entry.number

    def lose(
        self, gone: RankPeer, reason: str, now: float, *, explained: bool, since: float | None = None
    ) -> Generator[DecisionEntry | Log, None, int]:
        """Remove a rank whose connection has ended without Bye.

        Args:
            gone: The rank. It has left if it was asked to; otherwise it is dead.
            reason: How its connection has ended.
            now: Time of the batch of events, in monotonic seconds.
            explained: Whether more is known than that: the process has ended, or must not come back.
            since: Time of its last sign of life; ``None`` for ``now``.

        Returns:
            The entry of the decision log about it.
        """
        kind = DecisionKind.LEFT if gone.leaving else DecisionKind.DIED
        entry = DecisionEntry(kind, ranks=(gone.rank,), facts={"reason": reason, "pid": str(gone.pid)})
        yield entry
        # The coordinator has asked it to leave: if its process was ended before it could send Bye, that is no death.
        if gone.leaving:
            self._leave(gone)
            return entry.number
        text = f"rank {gone.rank} (pid {gone.pid}) is dead: {reason}"
        yield Log(text, warning=False, decision=entry.number)
        self._remove(gone)
        self._withdraw_release(gone.rank)
        self.record_death(
            gone.rank, gone.pid, reason, now, explained=explained, admitted=gone.admitted, since=since
        )
        return entry.number

    def explain_death(
        self, rank: int, pid: int, reason: str, now: float
    ) -> Generator[DecisionEntry, None, None]:
        """Record the reason that the launcher reports for the end of a process whose connection has ended, or never began."""
        known = self.deaths.get(rank)
        self.record_death(rank, pid, reason, now, explained=True)
        # Most ends are explained already, or are no deaths: such a report is no decision.
        if self.deaths.get(rank) != known:
            facts = {"reason": reason, "pid": str(pid)}
            yield DecisionEntry(DecisionKind.DIED, ranks=(rank,), facts=facts)

    def _leave(self, gone: RankPeer) -> None:
        self._remove(gone)
        self._withdraw_release(gone.rank)
        self._left[gone.rank] = gone.pid
        if not gone.tracked and self.expected is not None and gone.rank in self.expected:
            self.returning.add(gone.rank)
            self.awaited.add(gone.rank)
        self.changed = True

    def _remove(self, gone: RankPeer) -> None:
        del self.ranks[gone.rank]
        self.versions.remove(gone.versions)
        self.hosts[gone.member.host] -= 1
        # A Counter keeps zeros, and admission reads the keys as the hosts on which ranks live.
        if not self.hosts[gone.member.host]:
            del self.hosts[gone.member.host]

    def record_death(
        self,
        rank: int,
        pid: int,
        reason: str,
        now: float,
        *,
        explained: bool,
        admitted: bool = False,
        since: float | None = None,
    ) -> None:
        """Record how a rank that does not live any more has ended; the launcher's reason replaces that of a closed connection."""
        self.awaited.discard(rank)
        # The launcher reports each end of a process: that of one which has sent Bye is no death.
        if self._left.get(rank) == pid:
            if rank in self.returning and rank not in self.ranks:  # that process has ended: no return
                self.returning.discard(rank)
                self.awaited.discard(rank)
                self.changed = True
            return
        known = self.deaths.get(rank)
        if known is not None and known.pid == pid:
            # The first explanation stays: the launcher can report a process that the coordinator has ended itself.
            if not explained or rank not in self._unexplained:
                return
            self.deaths[rank] = Death(rank, pid, known.when, reason, known.admitted)
        elif self.expected is None or rank in self.expected:
            self.deaths[rank] = Death(rank, pid, now + self._wall_offset, reason, admitted)
        else:
            return
        self._unexplained.pop(rank, None)
        if not explained:
            self._unexplained[rank] = now if since is None else since
        self.changed = self.urgent = True

    # -- the world ------------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Return whether all expected ranks have come or are known to be dead."""
        return self.expected is not None and not self.awaited

    def restore_deaths(self, deaths: Iterable[Death]) -> None:
        """Restore the deaths that an earlier coordinator had recorded."""
        for death in deaths:
            # A rank that has come is another process: those that the client knows to be dead have lost their connections before this.
            if death.rank not in self.ranks and self.expected is not None and death.rank in self.expected:
                self.deaths[death.rank] = death
        self.awaited -= self.deaths.keys()
        self.changed = True

    def world(
        self, generation: int, formed: tuple[int, ...], *, restoring: bool = False, training: bool = False
    ) -> World:
        members = tuple(self.ranks[rank].member for rank in sorted(self.ranks))
        deaths = tuple(self.deaths[rank] for rank in sorted(self.deaths))
        leaving = tuple(sorted(self.leaving))
        return World(
            self.expected or (),
            members,
            deaths,
            generation,
            self.waiting,
            restoring,
            leaving,
            formed,
            training=training,
            kept=tuple(sorted(self.kept)),
        )

    def set_waiting(self, ranks: tuple[int, ...]) -> None:
        """Set the ranks that wait to be admitted."""
        if ranks != self.waiting:
            self.waiting = ranks
            self.changed = self.urgent = True

    def release(self, ranks: Iterable[int]) -> None:
        """Release these ranks where elastic training lets the world change."""
        self.leaving.update(ranks)
        self.kept.difference_update(ranks)
        self.changed = self.urgent = True

    def keep(self, ranks: Iterable[int]) -> None:
        """Let released ranks stay for the time being, until :meth:`release` lets them go after all."""
        self.leaving.difference_update(ranks)
        self.kept.update(ranks)
        self.changed = self.urgent = True

    def _withdraw_release(self, rank: int) -> None:
        """Forget that a rank was released: its process is gone, or another one has its number."""
        self.leaving.discard(rank)
        self.kept.discard(rank)

    @property
    def has_news(self) -> bool:
        """Return whether any peer has to get the membership, now or later."""
        return self.changed or self.formed or self.urgent or self._ranks_owed

    def recipients(self, now: float) -> tuple[int, ...]:
        """Return the connections that have to get the membership now; to be called once after each batch of events."""
        audience: tuple[int, ...] = ()
        if self.changed or self.formed:
            audience = (*self.clients, *self.observers)
        if self.changed:
            # Kept over batches: clients get each change at once, ranks at most one report per interval, so theirs can be due later.
            self._ranks_owed = True
        if self._ranks_owed and (self.urgent or now >= self.ranks_sent_at + WORLD_INTERVAL):
            audience += tuple([peer.peer for peer in self.ranks.values()])
            self.ranks_sent_at = now
            self._ranks_owed = False
        self.changed = self.urgent = self.formed = False
        return audience

    def next_report(self) -> float | None:
        """Return when ranks have to get the changed membership; ``None`` if they have it."""
        return self.ranks_sent_at + WORLD_INTERVAL if self._ranks_owed else None

    def validate(self) -> None:
        """Assert the invariants that hold between batches of events."""
        for rank, peer in self.ranks.items():
            with InvariantOf(rank=rank):
                assert peer.rank == rank
                assert rank not in self.deaths
        if self.expected is not None:
            assert self.awaited <= set(self.expected)
            assert self.deaths.keys() <= set(self.expected)
        assert not self.awaited & self.ranks.keys()
        assert self.leaving | self.kept <= self.ranks.keys()
        assert not self.leaving & self.kept
        assert self.hosts == Counter(peer.member.host for peer in self.ranks.values())
        assert self._unexplained.keys() <= self.deaths.keys()
