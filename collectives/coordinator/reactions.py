"""How the coordinator's state reacts to everything but announcements."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from hvdlab.collectives.coordinator.deadlock import describe_deadlock, find_deadlock
from hvdlab.collectives.coordinator.events import CloseConnection
from hvdlab.collectives.coordinator.matching import Round
from hvdlab.collectives.coordinator.membership import RankPeer, Wait
from hvdlab.collectives.coordinator.process_sets import OPEN, ProcessSet
from hvdlab.collectives.coordinator.signatures import describe
from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.errors import CauseKind, format_ranks
from hvdlab.collectives.protocol import messages as m

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.state import CoordinatorState

P = TypeVar("P")
Reaction = Callable[["CoordinatorState", P, Any, float], None]

# -- coming and going -------------------------------------------------------------------------------------------------


def connected(state: CoordinatorState, peer: int, hello: m.Hello, now: float) -> None:
    """A peer has introduced itself: welcome or refuse it."""
    membership, outbox = state.membership, state.outbox
    if hello.role == "client":
        membership.clients[peer] = None
        outbox.send((peer,), m.Welcome(-1, int(now * 1e9)))
        outbox.send((peer,), membership.world(state.sets.world.epoch))
        if hello.events:
            state.history.subscribe(peer, outbox)
        return
    rank = membership.free_rank() if hello.rank < 0 else hello.rank
    reason = membership.refusal(rank) if hello.role == "rank" else f"there is no role {hello.role!r}"
    if reason:
        outbox.log(f"refused: {reason}")
        outbox.send((peer,), m.Refused(reason))
        outbox.effects.append(CloseConnection(peer))
        return
    newcomer = membership.join(peer, rank, hello, now)
    state.by_peer[peer] = newcomer
    if newcomer.tracked:
        state.cells.join(rank)
    outbox.send((peer,), m.Welcome(rank, int(now * 1e9)))


def lost(state: CoordinatorState, peer: int, reason: str, now: float, *, explained: bool = False) -> None:
    """A peer's connection is gone without Bye."""
    rank = state.by_peer.get(peer)
    if rank is None:
        state.membership.clients.pop(peer, None)
        state.history.unsubscribe(peer)
        return
    if rank.leaving:
        _gone(state, rank)
        state.membership.leave(rank)
        return
    state.outbox.log(f"rank {rank.rank} (pid {rank.pid}) is dead: {reason}")
    sets = state.sets.containing(rank.rank)
    _gone(state, rank)
    state.membership.die(rank, reason, now, explained=explained)
    for ps in sets:
        state.sets.abort(ps, CauseKind.RANK_DIED, (rank.rank,), f"rank {rank.rank} died: {reason}")


def _gone(state: CoordinatorState, rank: RankPeer) -> None:
    del state.by_peer[rank.peer]
    state.signatures.forget(rank.definitions)
    state.cells.drop(rank.rank)
    state.history.unsubscribe(rank.peer)


def _on_bye(state: CoordinatorState, rank: RankPeer, message: m.Bye, now: float) -> None:
    """A rank leaves in order. Others that wait are told; otherwise the set goes on until it is used again."""
    sets = state.sets.containing(rank.rank)
    _gone(state, rank)
    state.membership.leave(rank)
    state.outbox.effects.append(CloseConnection(rank.peer))
    said = f" ({message.reason})" if message.reason else ""
    for ps in sets:
        if ps.phase == OPEN and ps.matcher.pending:
            state.sets.abort(ps, CauseKind.RANK_LEFT, (rank.rank,), f"rank {rank.rank} left the job{said}")
            continue
        ps.gone.add(rank.rank)
        if len(ps.gone) == len(ps.members):
            state.sets.switch(ps, ())
            state.sets.configure(ps)


def _on_client_bye(state: CoordinatorState, peer: int, message: m.Bye, now: float) -> None:
    state.membership.clients.pop(peer, None)
    state.history.unsubscribe(peer)
    state.outbox.effects.append(CloseConnection(peer))


def admit(state: CoordinatorState) -> None:
    """Change over to a larger world once all expected ranks are there (or dead).

    A tracked newcomer without a cell waits until no member runs one: it would not take part in the cell's
    collectives, and their ranks would fail for no reason of their own.
    """
    membership, world, cells = state.membership, state.sets.world, state.cells
    if not membership.complete:
        return
    assert membership.expected is not None
    there = [r for r in membership.expected if r in membership.ranks and not membership.ranks[r].leaving]
    current = world.members if world.next_members is None else world.next_members
    new = [rank for rank in there if rank not in current or rank in world.gone]
    if any(cells.active(rank) for rank in current):
        new = [rank for rank in new if rank not in cells.idle]
    stay = [rank for rank in current if rank in there and rank not in world.gone]
    if any(not membership.ranks[rank].tracked for rank in stay):
        new = [rank for rank in new if rank not in membership.returning]
    if new:
        membership.returning.difference_update(new)
        state.sets.switch(world, tuple(sorted({*stay, *new})))


# -- what ranks say ---------------------------------------------------------------------------------------------------


def note_wait(rank: RankPeer, message: m.Blocked) -> None:
    """A rank's user is blocked in a wait, or no longer."""
    rank.wait = None
    if message.local >= 0:
        rank.wait = Wait(message.process_set, message.epoch, message.local, message.seconds)


def _on_withdraw(state: CoordinatorState, rank: RankPeer, message: m.Withdraw, now: float) -> None:
    ps = state.open_set(rank, message)
    if ps is not None:
        try:
            kind = CauseKind(message.kind)
        except ValueError:
            kind = CauseKind.WITHDRAWN
        state.sets.abort(ps, kind, (rank.rank,), message.text, message.site)


def _on_plane_failed(state: CoordinatorState, rank: RankPeer, message: m.PlaneFailed, now: float) -> None:
    """A plane often fails because a member died; its connection's end is the better explanation, if it comes."""
    ps = state.open_set(rank, message)
    if ps is not None and ps.failure is None:
        ps.failure = (now + state.options.failure_grace, rank.rank, message.text)


def end_failures(state: CoordinatorState, now: float) -> None:
    """End the epochs whose plane failed a moment ago without a better explanation."""
    for ps in list(state.sets):
        if ps.failure is not None and now >= ps.failure[0]:
            _, rank, text = ps.failure
            state.sets.abort(
                ps, CauseKind.PLANE_FAILED, (rank,), f"the data plane failed on rank {rank}: {text}"
            )


def _on_cell_begin(state: CoordinatorState, rank: RankPeer, message: m.CellBegin, now: float) -> None:
    if rank.tracked:
        state.check_admission = True
        state.cells.begin(message.cell, rank.rank)


def _on_cell_end(state: CoordinatorState, rank: RankPeer, message: m.CellEnd, now: float) -> None:
    state.check_admission = True
    if rank.tracked and state.cells.end(message.cell, rank.rank, message.error):
        for ps in state.sets.containing(rank.rank):
            ps.matcher.forgive(rank.rank)


def _on_store_set(state: CoordinatorState, rank: RankPeer, message: m.StoreSet, now: float) -> None:
    ps = state.open_set(rank, message)
    if ps is not None:
        ps.store.set(message.key, message.value, state.outbox)


def _on_store_get(state: CoordinatorState, rank: RankPeer, message: m.StoreGet, now: float) -> None:
    ps = state.open_set(rank, message)
    if ps is not None:
        ps.store.get(message.key, rank.peer, message.ticket, state.outbox)


def _on_events(state: CoordinatorState, rank: RankPeer, message: m.Events, now: float) -> None:
    state.history.add(rank.rank, message.batch, state.outbox)


def _on_post(state: CoordinatorState, rank: RankPeer, message: m.Post, now: float) -> None:
    told = _peers_of(state, message.to) if message.to else tuple(state.membership.clients)
    state.outbox.send(told, m.Mail(message.topic, rank.rank, message.body))


def _on_ping(state: CoordinatorState, rank: RankPeer, message: m.Ping, now: float) -> None:
    _on_client_ping(state, rank.peer, message, now)


def _on_subscribe(state: CoordinatorState, rank: RankPeer, message: m.Subscribe, now: float) -> None:
    _on_client_subscribe(state, rank.peer, message, now)


def _peers_of(state: CoordinatorState, ranks: tuple[int, ...]) -> tuple[int, ...]:
    living = state.membership.ranks
    return tuple(living[rank].peer for rank in ranks if rank in living)


# -- process sets -----------------------------------------------------------------------------------------------------


def change_sets(state: CoordinatorState, ps: ProcessSet, current: Round) -> None:
    """All members agree to add or remove a process set."""
    signature = current.info.signature
    if signature.kind == OpKind.ADD_PROCESS_SET:
        _add_set(state, ps, current, tuple(sorted(set(signature.ranks))))
        return
    target = _find_set(state, signature)
    if target is None:
        _refuse(state, ps, current, "there is no such process set")
        return
    state.sets.abort(target, CauseKind.MEMBERSHIP, (), f"process set {target.id} was removed")
    state.sets.remove(target, ps.peers)
    for rank, peer in zip(ps.members, ps.peers, strict=True):
        batch = m.Batch((current.heads[rank].local,))
        state.outbox.send((peer,), m.Execute(ps.id, ps.epoch, ps.sequence, (batch,)))


def _add_set(state: CoordinatorState, ps: ProcessSet, current: Round, ranks: tuple[int, ...]) -> None:
    absent = [rank for rank in ranks if rank not in ps.members]
    if absent or not ranks:
        why = f"{format_ranks(absent)} not in the world" if absent else "a process set needs a rank"
        _refuse(state, ps, current, why)
        return
    added = state.sets.add(ranks)
    for rank, peer in zip(ps.members, ps.peers, strict=True):
        state.outbox.send((peer,), m.ProcessSetAdded(current.heads[rank].local, added.id, ranks))


def _find_set(state: CoordinatorState, signature: m.Signature) -> ProcessSet | None:
    """The process set to remove: by number in ``root``, or else by its ranks."""
    if signature.root > 0:
        return state.sets.by_id.get(signature.root)
    for ps in state.sets:
        if ps.id > 0 and ps.members == tuple(sorted(set(signature.ranks))):
            return ps
    return None


def _refuse(state: CoordinatorState, ps: ProcessSet, current: Round, why: str) -> None:
    party = m.Party(
        ps.members, f"{describe(current.info.signature)}: {why}", current.heads[ps.members[0]].site
    )
    for rank, peer in zip(ps.members, ps.peers, strict=True):
        local = current.heads[rank].local
        state.outbox.send((peer,), m.Reject(ps.id, ps.epoch, (local,), current.info.name, (party,)))


def end_deadlock(state: CoordinatorState) -> None:
    """End the epochs in which ranks wait for each other."""
    stuck = find_deadlock(state.sets.by_id, state.membership.ranks, state.cells.idle)
    if stuck:
        text = describe_deadlock(stuck)
        for ps in {s.process_set.id: s.process_set for s in stuck.values()}.values():
            state.sets.abort(ps, CauseKind.DEADLOCK, sorted(stuck), text)


# -- what clients say -------------------------------------------------------------------------------------------------


def _on_expect(state: CoordinatorState, peer: int, message: m.Expect, now: float) -> None:
    dropped = state.membership.expect(message.ranks)
    state.cells.keep({*message.ranks, *state.membership.ranks})
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


def _on_cell_started(state: CoordinatorState, peer: int, message: m.CellStarted, now: float) -> None:
    ranks = state.membership.ranks
    expected = state.membership.expected or ()
    state.check_admission = True
    for rank in message.ranks:
        if ranks[rank].tracked if rank in ranks else rank in expected:
            state.cells.begin(message.cell, rank)


def _on_interrupt(state: CoordinatorState, peer: int, message: m.InterruptRanks, now: float) -> None:
    state.outbox.send(_peers_of(state, message.ranks), m.Interrupt())


def _on_rank_lost(state: CoordinatorState, peer: int, message: m.RankLost, now: float) -> None:
    """The launcher saw a process end; it may know before its connection does, or know better why."""
    rank = state.membership.ranks.get(message.rank)
    if rank is None:
        state.membership.record_death(message.rank, message.pid, message.reason, now, explained=True)
    elif rank.pid == message.pid:
        state.outbox.effects.append(CloseConnection(rank.peer))
        lost(state, rank.peer, message.reason, now, explained=True)


def _on_client_post(state: CoordinatorState, peer: int, message: m.Post, now: float) -> None:
    state.outbox.send(_peers_of(state, message.to), m.Mail(message.topic, -1, message.body))


def _on_client_ping(state: CoordinatorState, peer: int, message: m.Ping, now: float) -> None:
    state.answers.append((peer, m.Pong(message.number, int(now * 1e9))))


def _on_client_subscribe(state: CoordinatorState, peer: int, message: m.Subscribe, now: float) -> None:
    if message.events:
        state.history.subscribe(peer, state.outbox)
    else:
        state.history.unsubscribe(peer)


TO_RANKS: dict[type, Reaction[RankPeer]] = {
    m.Bye: _on_bye,
    m.Ping: _on_ping,
    m.Post: _on_post,
    m.Withdraw: _on_withdraw,
    m.PlaneFailed: _on_plane_failed,
    m.CellBegin: _on_cell_begin,
    m.CellEnd: _on_cell_end,
    m.StoreSet: _on_store_set,
    m.StoreGet: _on_store_get,
    m.Events: _on_events,
    m.Subscribe: _on_subscribe,
}
TO_CLIENTS: dict[type, Reaction[int]] = {
    m.Bye: _on_client_bye,
    m.Ping: _on_client_ping,
    m.Post: _on_client_post,
    m.Expect: _on_expect,
    m.CellStarted: _on_cell_started,
    m.InterruptRanks: _on_interrupt,
    m.RankLost: _on_rank_lost,
    m.Subscribe: _on_client_subscribe,
}
