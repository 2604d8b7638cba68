"""Peers that come, are refused, or are lost; and when newcomers get into the world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdlab.collectives import encryption
from hvdlab.collectives.coordinator import elastic, pauses
from hvdlab.collectives.coordinator.elastic import Change
from hvdlab.collectives.coordinator.events import CloseConnection
from hvdlab.collectives.coordinator.membership import RankPeer
from hvdlab.collectives.coordinator.process_sets import OPEN, ProcessSet
from hvdlab.collectives.errors import CauseKind, format_ranks
from hvdlab.collectives.protocol import handshake
from hvdlab.collectives.protocol import messages as m

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.state import CoordinatorState


def connect(state: CoordinatorState, peer: int, hello: m.Hello, now: float) -> None:
    """A peer has introduced itself: welcome or refuse it."""
    membership, outbox = state.membership, state.outbox
    if hello.role == "client":
        membership.clients[peer] = None
        state.history.limit = state.options.history_bytes
        outbox.send((peer,), m.Welcome(-1, int(now * 1e9), state.options.generation, state.options.pid))
        outbox.send((peer,), state.world())
        if state.pauses:
            outbox.send((peer,), pauses.paused_ranks(state))
        if hello.events:
            state.history.subscribe(peer, outbox)
        return
    if hello.role == "observer":
        membership.observers[peer] = None
        outbox.send((peer,), m.Welcome(-1, int(now * 1e9), state.options.generation, state.options.pid))
        outbox.send((peer,), state.world())
        return
    rank = membership.free_rank() if hello.rank < 0 else hello.rank
    reason = membership.refusal(rank) if hello.role == "rank" else f"there is no role {hello.role!r}"
    reason = reason or _too_late(state, rank, hello)
    reason = reason or _differs(state, rank, hello)
    if reason:
        early = _is_early(state, rank, hello)
        if not early and reason not in state.refused:  # a rank that is started again and again is logged once
            state.refused.append(reason)
            outbox.log(f"refused: {reason}")
        outbox.send((peer,), m.Refused(reason, early))
        outbox.effects.append(CloseConnection(peer))
        return
    since = membership.cut_off_since(rank, hello.pid) if hello.generation >= 0 else None
    newcomer = membership.join(peer, rank, hello, now)
    state.by_peer[peer] = newcomer
    if hello.generation < 0 and state.restoring.active:
        state.restoring.renewed.add(rank)
    if newcomer.tracked:
        state.cells.join(rank)
    outbox.send((peer,), m.Welcome(rank, int(now * 1e9), state.options.generation, state.options.pid))
    if since is not None:
        outbox.note(f"rank {rank} (pid {hello.pid}) is back after {now - since:.1f} s")
        outbox.send(tuple(membership.clients), m.Returned(rank, hello.pid, now - since))
    if hello.generation >= 0 and hello.returns and not state.restoring.active:
        fall_behind(state, newcomer)


def fall_behind(state: CoordinatorState, rank: RankPeer) -> None:
    """The others have gone on without this rank, which has come back with its memory: have it learn that, and wait to be let in."""
    rank.behind = True
    text = f"rank {rank.rank} was cut off, and the others have gone on without it"
    state.outbox.send((rank.peer,), m.Outdated(text))


def _differs(state: CoordinatorState, rank: int, hello: m.Hello) -> str:
    """Why a rank does not fit those that are there; empty if it does. They are looked at singly only to say which one differs."""
    membership = state.membership
    members = (living.member for living in membership.ranks.values())
    required, hosts = state.options.require_encryption, membership.hosts.keys()
    reason = encryption.refusal(required, rank, hello, members, hosts)
    # For hvdlab itself the coordinator's counts: of two ranks that differ, the first one to come need not be right.
    others = [("the coordinator", {"hvdlab": handshake.own_versions()["hvdlab"]})]
    if not membership.versions.fit(hello.versions):
        others += [(f"rank {living.rank}", living.versions) for living in membership.ranks.values()]
    return reason or handshake.version_mismatch(rank, hello.versions, others)


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


def lose(
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
    depart(state, rank, now)
    if rank.leaving:
        state.membership.leave(rank)
    else:
        state.outbox.note(f"rank {rank.rank} (pid {rank.pid}) is dead: {reason}")
        state.membership.die(rank, reason, now, explained=explained, since=since)
    for ps in sets:
        state.sets.abort(ps, CauseKind.RANK_DIED, (rank.rank,), f"rank {rank.rank} died: {reason}")
    _end_past(state, past, rank, reason)


def _end_past(
    state: CoordinatorState, past: list[tuple[ProcessSet, int]], rank: RankPeer, reason: str
) -> None:
    """Abort what other ranks may still be executing with this one in former epochs, which ended before it was left out."""
    for ps, epoch in past:
        text = f"rank {rank.rank} died: {reason}"
        state.sets.abort_past(ps, epoch, CauseKind.RANK_DIED, (rank.rank,), text)


def resize(state: CoordinatorState, ranks: tuple[int, ...]) -> None:
    """The world is made of these ranks from now on."""
    dropped = state.membership.expect(ranks)
    state.cells.keep({*ranks, *state.membership.ranks})
    for rank in dropped:
        state.outbox.send((rank.peer,), m.Leave("the world was resized"))
    leaving = {rank.rank for rank in dropped}
    busy = any(state.cells.active(rank) for rank in leaving)
    for ps in list(state.sets):
        going = leaving & (set(ps.members) - ps.gone)
        if not going:
            continue
        if busy or (ps.phase == OPEN and ps.matcher.pending):
            text = f"{format_ranks(sorted(going))} left, because the world was resized"
            state.sets.abort(ps, CauseKind.MEMBERSHIP, sorted(going), text)
        else:
            state.sets.switch(ps, tuple(rank for rank in ps.members if rank not in going))


def release(state: CoordinatorState, ranks: tuple[int, ...]) -> None:
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
        resize(state, tuple(sorted(expected - (going - later))))
    if later:
        state.membership.release(later)
        state.check_admission = True


def _let_go(state: CoordinatorState, going: set[int]) -> None:
    """Take out ranks that were released and have come to where the world may change: it goes on without them, and nothing fails."""
    left = [rank for rank in state.membership.expected or () if rank not in going]
    for rank in state.membership.expect(left):
        state.elastic.drop(rank.rank)
        state.outbox.send((rank.peer,), m.Leave("its host is not part of the job any more"))
    for ps in list(state.sets):
        if going & (set(ps.members) - ps.gone):
            state.sets.switch(ps, tuple(rank for rank in ps.members if rank not in going))


def refuse_left_out(state: CoordinatorState, rank: RankPeer, message: m.Announce) -> None:
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
            state.outbox.send((rank.peer,), refusal)


def depart(state: CoordinatorState, rank: RankPeer, now: float) -> None:
    """Forget all that the state keeps of a rank's connection."""
    del state.by_peer[rank.peer]
    pauses.end(state, rank.rank, now)
    state.signatures.forget(rank.definitions)
    state.cells.drop(rank.rank)
    state.elastic.drop(rank.rank)
    state.restoring.drop(rank.rank)
    state.blocked.discard(rank.rank)
    for ps in state.sets:
        ps.former.pop(rank.rank, None)
    state.history.unsubscribe(rank.peer)


def admit(state: CoordinatorState) -> None:
    """Change over to a larger world once all expected ranks are there (or dead).

    A tracked newcomer without a cell waits until no member runs one: it would not take part in that cell's
    collectives, and the ranks that run it would fail for no reason of their own. Elastic training lets newcomers in when its
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
    behind = {rank for rank in there if membership.ranks[rank].behind}
    stay = [rank for rank in there if rank in current and rank not in gone | behind]
    new = [
        rank for rank in there if rank not in stay and (rank not in behind or _may_enter(state, rank, stay))
    ]
    if any(cells.active(rank) for rank in current):
        new = [rank for rank in new if rank not in cells.idle]
    if any(not membership.ranks[rank].tracked for rank in stay):
        new = [rank for rank in new if rank not in membership.returning]
    going = membership.leaving.intersection(stay)
    change = state.elastic.consider(stay, new, len(going))
    if going and change is not Change.LATER:
        _let_go(state, going)
        stay = [rank for rank in stay if rank not in going]
    membership.wait(tuple(new) if change is Change.LATER else ())
    if change is Change.NOW or (change is Change.FREE and new and membership.complete):
        membership.returning.difference_update(new)
        for rank in new:
            membership.ranks[rank].behind = False
        # The members keep their order: a restored world has no other record of which rank came first.
        state.sets.switch(world, (*(rank for rank in current if rank in stay), *sorted(new)))
        elastic.regroup(state)


def _may_enter(state: CoordinatorState, rank: int, members: Sequence[int]) -> bool:
    """Whether a rank that these members have gone on without may be let in.

    Not while they are in the middle of something that it has not begun with them. What it had begun itself fails there until it has ended
    (:class:`~hvdlab.collectives.protocol.messages.Outdated`).
    """
    training, ready = state.elastic.training, state.elastic.ready
    if rank in training:
        return False
    busy = any(state.cells.active(member) for member in members)
    if rank in ready:
        return not busy or any(member in training or member in ready for member in members)
    return state.membership.ranks[rank].tracked and not busy
