"""Admission: which peers may connect, which ranks make up the world, and when newcomers enter it.

Elastic training decides at which point the world changes, and its ranks begin again together. A rank in training keeps newcomers
out, since its collectives would wait for them. When it is at a point where the world may change, after a failure or because a
newcomer waits to enter, it reports so (*regroups*) and submits nothing more. Collectives in which other ranks wait for it are aborted
at once, so that they come, too. Once no rank of the world is in training any more, the world gets a new epoch, with the newcomers.

Once training has ended on a rank of a script, newcomers wait until that rank trains again or leaves: they would begin to
train from the start, with no rank whose state they could take over. (A pool's ranks only run what their notebook sends.)
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

from hvdlab.collectives import encryption, versions
from hvdlab.collectives.coordinator.events import CloseConnection
from hvdlab.collectives.coordinator.membership import RankPeer
from hvdlab.collectives.coordinator.process_sets import OPEN, ProcessSetState
from hvdlab.collectives.errors import CauseKind, format_ranks
from hvdlab.collectives.protocol import messages as m

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.state import CoordinatorState


def connect(state: CoordinatorState, peer: int, hello: m.Hello, now: float) -> None:
    """A peer has introduced itself: welcome or refuse it."""
    membership, effects = state.membership, state.effects
    if hello.role == "client":
        membership.clients[peer] = None
        state.history.limit = state.options.history_bytes
        effects.send((peer,), m.Welcome(-1, int(now * 1e9), state.options.generation, state.options.pid))
        effects.send((peer,), state.world())
        if state.pauses:
            effects.send((peer,), state.pauses.message())
        if hello.events:
            state.history.subscribe(peer, effects)
        return
    if hello.role == "observer":
        membership.observers[peer] = None
        effects.send((peer,), m.Welcome(-1, int(now * 1e9), state.options.generation, state.options.pid))
        effects.send((peer,), state.world())
        return
    rank = membership.free_rank() if hello.rank < 0 else hello.rank
    reason = membership.refusal(rank) if hello.role == "rank" else f"there is no role {hello.role!r}"
    reason = reason or _too_late(state, rank, hello)
    reason = reason or _differs(state, rank, hello)
    if reason:
        early = _is_early(state, rank, hello)
        if (
            not early and reason not in state.refusals
        ):  # a rank that is started again and again is logged once
            state.refusals.append(reason)
            effects.log(f"refused: {reason}")
        effects.send((peer,), m.Refused(reason, early))
        effects.add(CloseConnection(peer))
        return
    since = membership.cut_off_since(rank, hello.pid) if hello.generation >= 0 else None
    newcomer = membership.add(peer, rank, hello, now)
    state.by_peer[peer] = newcomer
    if hello.generation < 0 and state.restoring.active:
        state.restoring.renewed.add(rank)
    if newcomer.tracked:
        state.cells.add_rank(rank)
    effects.send((peer,), m.Welcome(rank, int(now * 1e9), state.options.generation, state.options.pid))
    if since is not None:
        effects.note(f"rank {rank} (pid {hello.pid}) is back after {now - since:.1f} s")
        effects.send(tuple(membership.clients), m.Returned(rank, hello.pid, now - since))
    if hello.generation >= 0 and hello.returns and not state.restoring.active:
        become_outdated(state, newcomer)


def become_outdated(state: CoordinatorState, rank: RankPeer) -> None:
    """The others have gone on without this rank, which has come back with its memory: have it learn that, and wait to be let in."""
    rank.outdated = True
    text = f"rank {rank.rank} was cut off, and the others have gone on without it"
    state.effects.send((rank.peer,), m.Outdated(text))


def _differs(state: CoordinatorState, rank: int, hello: m.Hello) -> str:
    """Why a rank does not fit those that are there; empty if it does. They are looked at singly only to say which one differs."""
    membership = state.membership
    members = (living.member for living in membership.ranks.values())
    required, hosts = state.options.require_encryption, membership.hosts.keys()
    reason = encryption.refusal(required, rank, hello, members, hosts)
    # For hvdlab itself the coordinator's counts: of two ranks that differ, the first one to come need not be right.
    others = [("the coordinator", {"hvdlab": versions.own_versions()["hvdlab"]})]
    if not membership.versions.fit(hello.versions):
        others += [(f"rank {living.rank}", living.versions) for living in membership.ranks.values()]
    return reason or versions.refusal(rank, hello.versions, others)


def _too_late(state: CoordinatorState, rank: int, hello: m.Hello) -> str:
    """Why a rank that has lost its connection can't come back, since the others go on without it; empty if it can."""
    death = state.membership.deaths.get(rank)
    if hello.generation < 0:
        return ""
    if hello.generation >= state.options.generation or (death is not None and death.pid == hello.pid):
        cut_off = state.membership.cut_off_since(rank, hello.pid) is not None
        if cut_off and hello.returns and not state.restoring.active:
            return ""
        return f"the connection of rank {rank} was lost, and the others have gone on without it"
    return ""


def _is_early(state: CoordinatorState, rank: int, hello: m.Hello) -> bool:
    """Whether a rank that was refused is one that comes back too soon: its old connection is not given up yet, or who lives is not
    known before the world is restored.
    """
    if hello.generation < 0 or not hello.returns:
        return False
    living = state.membership.ranks.get(rank)
    if living is not None:
        return living.pid == hello.pid
    return state.restoring.active and state.membership.cut_off_since(rank, hello.pid) is not None


def peer_lost(
    state: CoordinatorState,
    peer: int,
    reason: str,
    now: float,
    *,
    explained: bool = False,
    since: float | None = None,
) -> None:
    """A peer's connection has ended without Bye.

    Args:
        state: What loses it.
        peer: The connection.
        reason: How it has ended.
        now: When.
        explained: Whether more is known than that: the process has ended, or must not come back.
        since: When the last sign of life came; ``None`` for ``now``.
    """
    rank = state.by_peer.get(peer)
    if rank is None:
        state.membership.clients.pop(peer, None)
        state.membership.observers.pop(peer, None)
        state.history.unsubscribe(peer)
        return
    past = [(ps, ps.former[rank.rank][1]) for ps in state.sets if rank.rank in ps.former]
    sets = state.sets.containing(rank.rank)
    forget_peer(state, rank, now)
    if rank.leaving:
        state.membership.leave(rank)
    else:
        state.effects.note(f"rank {rank.rank} (pid {rank.pid}) is dead: {reason}")
        state.membership.die(rank, reason, now, explained=explained, since=since)
    for ps in sets:
        state.sets.abort(ps, CauseKind.RANK_DIED, (rank.rank,), f"rank {rank.rank} died: {reason}")
    _end_past(state, past, rank, reason)


def _end_past(
    state: CoordinatorState, past: list[tuple[ProcessSetState, int]], rank: RankPeer, reason: str
) -> None:
    """Abort what other ranks may still be executing with this one in former epochs, which ended before it was left out."""
    for ps, epoch in past:
        text = f"rank {rank.rank} died: {reason}"
        state.sets.abort_past(ps, epoch, CauseKind.RANK_DIED, (rank.rank,), text)


def forget_peer(state: CoordinatorState, rank: RankPeer, now: float) -> None:
    """Forget all that the state keeps of a rank's connection."""
    del state.by_peer[rank.peer]
    state.end_pause(rank.rank, now)
    state.signatures.forget(rank.definitions)
    state.cells.discard_rank(rank.rank)
    state.elastic.drop(rank.rank)
    state.restoring.drop(rank.rank)
    state.blocked.discard(rank.rank)
    for ps in state.sets:
        ps.former.pop(rank.rank, None)
    state.history.unsubscribe(rank.peer)


def set_expected(state: CoordinatorState, ranks: tuple[int, ...]) -> None:
    """The world is made of these ranks from now on."""
    dropped = state.membership.set_expected(ranks)
    state.cells.discard_all_but({*ranks, *state.membership.ranks})
    for rank in dropped:
        state.effects.send((rank.peer,), m.Leave("the world was resized"))
    leaving = {rank.rank for rank in dropped}
    busy = any(state.cells.is_running(rank) for rank in leaving)
    for ps in list(state.sets):
        going = leaving & (set(ps.members) - ps.gone)
        if not going:
            continue
        if busy or (ps.phase == OPEN and ps.negotiation.pending):
            text = f"{format_ranks(sorted(going))} left, because the world was resized"
            state.sets.abort(ps, CauseKind.MEMBERSHIP, sorted(going), text)
        else:
            state.sets.change_members(ps, tuple(rank for rank in ps.members if rank not in going))


def scale_down(state: CoordinatorState, ranks: tuple[int, ...]) -> None:
    """Let ranks go where elastic training lets the world change; at once if no rank trains, or if they are not in the world."""
    if (
        state.restoring.active
    ):  # which ranks train, and are in the world, is known once the ranks have resumed
        state.restoring.released.update(ranks)
        return
    expected = set(state.membership.expected or ())
    going = expected & set(ranks)
    later = going & set(state.sets.world.current) & state.membership.ranks.keys()
    if not state.elastic.active:
        later = set()
    if going - later:
        set_expected(state, tuple(sorted(expected - (going - later))))
    if later:
        state.membership.scale_down(later)
        state.check_admission = True


def _remove_released(state: CoordinatorState, going: set[int]) -> None:
    """Take out ranks that were released and have come to where the world may change: it goes on without them, and nothing fails."""
    left = [rank for rank in state.membership.expected or () if rank not in going]
    for rank in state.membership.set_expected(left):
        state.elastic.drop(rank.rank)
        state.effects.send((rank.peer,), m.Leave("its host is not part of the job any more"))
    for ps in list(state.sets):
        if going & (set(ps.members) - ps.gone):
            state.sets.change_members(ps, tuple(rank for rank in ps.members if rank not in going))


def reject_left_out(state: CoordinatorState, rank: RankPeer, message: m.Announce) -> None:
    """Fail what a rank has submitted that the coordinator has asked to leave: the others go on without it, and no epoch of its own will end.

    What it executes with them goes on, so that the epoch is not aborted.
    """
    text = f"rank {rank.rank} was let go, and the others go on without it"
    for local in message.locals:
        defined = rank.definitions.get(local)
        if defined is not None:
            info, site = defined.info, defined.site
            pending = m.AbortedCollective(int(info.kind), info.name, (rank.rank,), (), (site,))
            scope = message.process_set, message.epoch
            kind = CauseKind.MEMBERSHIP.value
            refusal = m.Cancelled(*scope, (local,), kind, (rank.rank,), text, "", pending)
            state.effects.send((rank.peer,), refusal)


def admit_newcomers(state: CoordinatorState) -> None:
    """WorldChange over to a larger world once all expected ranks are there (or dead).

    A tracked newcomer without a cell waits until no member runs one: it would not take part in that cell's
    collectives, and the ranks that run it would fail for no reason of their own. ElasticRanks training lets newcomers in when its
    ranks regroup; then not all expected ranks need be there. A rank that the others have gone on without waits until its own training has
    gone back to its last commit, or the cells of the members have ended.
    """
    membership, world, cells = state.membership, state.sets.world, state.cells
    if membership.expected is None or not (membership.complete or state.elastic.active):
        return
    if state.restoring.active:
        return
    there = [r for r in membership.expected if r in membership.ranks and not membership.ranks[r].leaving]
    current = world.current
    gone = world.gone | membership.returning
    outdated = {rank for rank in there if membership.ranks[rank].outdated}
    stay = [rank for rank in there if rank in current and rank not in gone | outdated]
    new = [
        rank for rank in there if rank not in stay and (rank not in outdated or _may_enter(state, rank, stay))
    ]
    if any(cells.is_running(rank) for rank in current):
        new = [rank for rank in new if rank not in cells.idle]
    if any(not membership.ranks[rank].tracked for rank in stay):
        new = [rank for rank in new if rank not in membership.returning]
    going = membership.leaving.intersection(stay)
    change = state.elastic.consider(stay, new, len(going))
    if going and change is not WorldChange.LATER:
        _remove_released(state, going)
        stay = [rank for rank in stay if rank not in going]
    membership.set_waiting(tuple(new) if change is WorldChange.LATER else ())
    if change is WorldChange.NOW or (change is WorldChange.FREE and new and membership.complete):
        membership.returning.difference_update(new)
        for rank in new:
            membership.ranks[rank].outdated = False
        # The members keep their order: a restored world has no other record of which rank came first.
        state.sets.change_members(world, (*(rank for rank in current if rank in stay), *sorted(new)))
        answer_regrouped(state)


def _may_enter(state: CoordinatorState, rank: int, members: Sequence[int]) -> bool:
    """Whether a rank that these members have gone on without may be let in.

    Not while they are in the middle of something that it has not begun with them. What it had begun itself fails there until it has ended
    (:class:`~hvdlab.collectives.protocol.messages.Outdated`).
    """
    training, ready = state.elastic.training, state.elastic.ready
    if rank in training:
        return False
    busy = any(state.cells.is_running(member) for member in members)
    if rank in ready:
        return not busy or any(member in training or member in ready for member in members)
    return state.membership.ranks[rank].tracked and not busy


class WorldChange(Enum):
    """Whether the world may change."""

    FREE = "nobody trains"
    LATER = "when the ranks in training have come"
    NOW = "they have, and begin again"


class ElasticRanks:
    """What the living ranks have said of their elastic training.

    Attributes:
        training: Ranks in the middle of training.
        ready: Ranks that have regrouped, and what they said.
        finished: Ranks of scripts whose training has ended.
    """

    def __init__(self) -> None:
        self.training: set[int] = set()
        self.ready: dict[int, m.Regroup] = {}
        self.finished: set[int] = set()

    @property
    def active(self) -> bool:
        """Whether elastic training decides which ranks come in."""
        return bool(self.training or self.ready or self.finished)

    def drop(self, rank: int) -> None:
        """A rank is gone."""
        self.training.discard(rank)
        self.ready.pop(rank, None)
        self.finished.discard(rank)

    def consider(self, stay: Sequence[int], new: Sequence[int], leaving: int = 0) -> WorldChange:
        """Whether the world may change.

        Args:
            stay: Members of the world that stay there.
            new: Newcomers that are there.
            leaving: How many of ``stay`` leave with the change.
        """
        if not self.training.isdisjoint(stay):
            return WorldChange.LATER
        # If no member is left, those that come back begin again by themselves, as soon as there are enough.
        wanted = [self.ready[rank].at_least for rank in stay or new if rank in self.ready]
        if not wanted:
            return WorldChange.FREE if self.finished.isdisjoint(stay) else WorldChange.LATER
        return WorldChange.NOW if len(stay) + len(new) - leaving >= max(wanted) else WorldChange.LATER

    def resume(self) -> list[tuple[int, int]]:
        """Put all ranks that have regrouped into training again; returns them with their tickets."""
        answered = [(rank, said.ticket) for rank, said in self.ready.items()]
        self.training.update(self.ready)
        self.ready.clear()
        return answered


def answer_regrouped(state: CoordinatorState) -> None:
    """The world has been changed: answer the ranks that have regrouped, after the messages about the new epoch."""
    for rank, ticket in state.elastic.resume():
        state.answers.append((state.membership.ranks[rank].peer, m.Regrouped(ticket)))


def abort_waits_on_regrouped(state: CoordinatorState) -> None:
    """End the collectives that other ranks wait in and that a rank which has regrouped will not submit."""
    ready = state.elastic.ready
    for ps in list(state.sets):
        if ps.phase != OPEN or not ps.negotiation.pending:
            continue
        absent = sorted(ps.negotiation.members & ready.keys())
        if absent:
            whose = "its" if len(absent) == 1 else "their"
            why = ready[absent[0]].reason
            text = f"{format_ranks(absent)} went back to {whose} last commit" + (f" ({why})" if why else "")
            state.sets.abort(ps, CauseKind.WITHDRAWN, absent, text)


def on_elastic(state: CoordinatorState, rank: RankPeer, message: m.Elastic, now: float) -> None:
    state.check_admission = True
    if message.on and not state.elastic.active:
        state.membership.changed = True  # those that wait for the world to be complete need not any more
    state.elastic.drop(rank.rank)
    if message.on:
        state.elastic.training.add(rank.rank)
    elif not rank.tracked:
        state.elastic.finished.add(rank.rank)


def on_regroup(state: CoordinatorState, rank: RankPeer, message: m.Regroup, now: float) -> None:
    state.check_admission = True
    state.elastic.training.discard(rank.rank)
    state.elastic.ready[rank.rank] = message
