"""How the coordinator reacts to what ranks say, announcements excepted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from hvdlab.collectives.coordinator.arrivals import depart
from hvdlab.collectives.coordinator.common import answer_ping, peers_of, subscribe
from hvdlab.collectives.coordinator.elastic import on_elastic, on_regroup
from hvdlab.collectives.coordinator.events import CloseConnection
from hvdlab.collectives.coordinator.membership import RankPeer, Wait
from hvdlab.collectives.coordinator.process_sets import OPEN, ProcessSet, Store
from hvdlab.collectives.coordinator.restoring import on_resume
from hvdlab.collectives.coordinator.stall_inspector import on_paused, on_resumed
from hvdlab.collectives.errors import CauseKind, format_ranks
from hvdlab.collectives.protocol import messages as m

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.state import CoordinatorState

Reaction = Callable[["CoordinatorState", RankPeer, Any, float], None]


def _on_bye(state: CoordinatorState, rank: RankPeer, message: m.Bye, now: float) -> None:
    """A rank leaves in order. If others wait in a process set, its epoch ends; otherwise the set goes on until it is used again."""
    sets = state.sets.containing(rank.rank)
    past = [(ps, ps.former[rank.rank][1]) for ps in state.sets if rank.rank in ps.former]
    depart(state, rank, now)
    state.membership.leave(rank)
    state.outbox.effects.append(CloseConnection(rank.peer))
    said = f" ({message.reason})" if message.reason else ""
    for ps in sets:
        if ps.phase == OPEN and ps.matcher.pending:
            state.sets.abort(ps, CauseKind.RANK_LEFT, (rank.rank,), f"rank {rank.rank} left the job{said}")
            continue
        ps.gone.add(rank.rank)
        if ps.declined[0] == ps.epoch:
            # A member has waited at the board, and may still do; this rank may have left before it had mapped the board.
            _count_out(state, ps, m.DeclinePost(ps.id, *ps.declined))
        if len(ps.gone) == len(ps.members):
            state.sets.switch(ps, ())
            state.sets.configure(ps)
    for ps, epoch in past:
        _count_out(state, ps, m.DeclinePost(ps.id, epoch, 0))


def _on_withdraw(state: CoordinatorState, rank: RankPeer, message: m.Withdraw, now: float) -> None:
    try:
        kind = CauseKind(message.kind)
    except ValueError:
        kind = CauseKind.WITHDRAWN
    ps = state.open_set(rank, message)
    if ps is not None:
        state.sets.abort(ps, kind, (rank.rank,), message.text, message.site)
    elif (ps := _past_set(state, rank, message)) is not None:
        state.sets.abort_past(ps, message.epoch, kind, (rank.rank,), message.text, message.site)


def _on_cancel(state: CoordinatorState, rank: RankPeer, message: m.Cancel, now: float) -> None:
    ps, defined = state.open_set(rank, message), rank.definitions.get(message.local)
    report = None
    if ps is not None and defined is not None:
        report = ps.matcher.cancel(rank.rank, defined, message.later, now)
    if ps is None or report is None:
        # The coordinator has ordered the message meanwhile: the other rank may be in the middle of it.
        why = message.kind, message.text, message.site
        _on_withdraw(state, rank, m.Withdraw(message.process_set, message.epoch, *why), now)
        return
    state.touched[ps] = None
    answer = m.Cancelled(
        ps.id, ps.epoch, (), message.kind, (rank.rank,), message.text, message.site, report, message.ticket
    )
    state.outbox.send((rank.peer,), answer)


def _on_decline_post(state: CoordinatorState, rank: RankPeer, message: m.DeclinePost, now: float) -> None:
    """Pass the request on to the members that may have to decline."""
    ps = state.open_set(rank, message)
    if ps is not None and ps.gone:
        # A rank that has left has declined everything for good, but perhaps it left before it had mapped the board.
        left = tuple(sorted(ps.gone))
        state.sets.abort(ps, CauseKind.RANK_LEFT, left, f"{format_ranks(left)} left the job")
        return
    if ps is not None:
        if (message.epoch, message.number) > ps.declined:
            ps.declined = message.epoch, message.number
            state.outbox.send(tuple(peer for peer in ps.peers if peer != rank.peer), message)
    elif (past := _past_set(state, rank, message)) is not None:
        _count_out(state, past, message)


def _on_board_missing(state: CoordinatorState, rank: RankPeer, message: m.BoardMissing, now: float) -> None:
    ps = state.open_set(rank, message) or _past_set(state, rank, message)
    if ps is not None:
        _count_out(state, ps, m.DeclinePost(ps.id, message.epoch, 0), without=rank.pid)


def _count_out(
    state: CoordinatorState, ps: ProcessSet, message: m.DeclinePost, *, without: int | None = None
) -> None:
    """Pass the message on to all ranks that may be at that board, with the process ids of those that are there, but ``without``."""
    there = {*ps.peers, *(peer for peer, _ in ps.former.values())}
    ranks = [other for other in state.membership.ranks.values() if other.peer in there]
    peers = tuple(sorted(other.peer for other in ranks))
    pids = tuple(sorted(other.pid for other in ranks if other.pid != without))
    state.outbox.send(peers, msgspec.structs.replace(message, pids=pids))


def _past_set(
    state: CoordinatorState,
    rank: RankPeer,
    message: m.Withdraw | m.DeclinePost | m.BoardMissing | m.PlaneFailed | m.StoreSet | m.StoreGet,
) -> ProcessSet | None:
    """The process set of a message of an earlier epoch, in which ranks may still be executing; else ``None``."""
    ps = state.sets.by_id.get(message.process_set)
    if ps is None or message.epoch >= ps.epoch or not (rank.rank in ps.members or rank.rank in ps.former):
        return None
    return ps


def _on_plane_failed(state: CoordinatorState, rank: RankPeer, message: m.PlaneFailed, now: float) -> None:
    """Note that a plane failed. Often that is because a member died; the end of its connection explains it better, if it comes in time."""
    ps = state.open_set(rank, message)
    if ps is not None and ps.failure is None:
        ps.failure = (now + state.options.failure_grace, rank.rank, message.text)
    elif ps is None and (ps := _past_set(state, rank, message)) is not None:
        due = now + state.options.failure_grace
        ps.plane_failed_before(due, message.epoch, rank.rank, message.text)


def _on_executed(state: CoordinatorState, rank: RankPeer, message: m.Executed, now: float) -> None:
    """A batch of tensors with a priority has ended: it is the turn of the next ones."""
    ps = state.open_set(rank, message)
    if ps is not None:
        ps.matcher.schedule.executed(message.sequence, message.batch)
        state.touched[ps] = None


def _on_renew(state: CoordinatorState, rank: RankPeer, message: m.Renew, now: float) -> None:
    ps = state.open_set(rank, message)
    if ps is not None:
        state.sets.switch(ps, tuple(member for member in ps.members if member not in ps.gone))


def _on_cell_begin(state: CoordinatorState, rank: RankPeer, message: m.CellBegin, now: float) -> None:
    if rank.tracked:
        state.check_admission = True
        state.cells.begin(message.cell, rank.rank)


def _on_cell_end(state: CoordinatorState, rank: RankPeer, message: m.CellEnd, now: float) -> None:
    state.check_admission = True
    if not rank.tracked:
        return
    state.restoring.cell_ended(message.cell, rank.rank)
    if state.cells.end(message.cell, rank.rank, message.error):
        for ps in state.sets.containing(rank.rank):
            ps.matcher.debts.forgive(rank.rank)


def _store(state: CoordinatorState, rank: RankPeer, message: m.StoreSet | m.StoreGet) -> Store | None:
    """The store that a message is about: of this epoch, or of an earlier one that ended in order."""
    ps = state.open_set(rank, message)
    if ps is not None:
        return ps.store
    ps = _past_set(state, rank, message)
    return ps.past_stores.get(message.epoch) if ps is not None else None


def _on_store_set(state: CoordinatorState, rank: RankPeer, message: m.StoreSet, now: float) -> None:
    store = _store(state, rank, message)
    if store is not None:
        store.set(message.key, message.value, state.outbox)


def _on_store_get(state: CoordinatorState, rank: RankPeer, message: m.StoreGet, now: float) -> None:
    store = _store(state, rank, message)
    if store is not None:
        store.get(message.key, rank.peer, message.ticket, state.outbox)


def _on_events(state: CoordinatorState, rank: RankPeer, message: m.Events, now: float) -> None:
    state.history.add(rank.rank, message.batch, state.outbox)


def _on_post(state: CoordinatorState, rank: RankPeer, message: m.Post, now: float) -> None:
    peers = peers_of(state, message.to) if message.to else tuple(state.membership.clients)
    state.outbox.send(peers, m.Mail(message.topic, rank.rank, message.body))


def _on_ping(state: CoordinatorState, rank: RankPeer, message: m.Ping, now: float) -> None:
    answer_ping(state, rank.peer, message, now)


def _on_subscribe(state: CoordinatorState, rank: RankPeer, message: m.Subscribe, now: float) -> None:
    subscribe(state, rank.peer, message, now)


def _on_pong(state: CoordinatorState, rank: RankPeer, message: m.Pong, now: float) -> None:
    state.stalls.executions.answered(rank.rank)


def _on_duplicate(state: CoordinatorState, rank: RankPeer, message: m.Duplicate, now: float) -> None:
    ps = state.open_set(rank, message)
    if ps is not None:
        state.touched[ps] = None
        ps.matcher.duplicate(message.name, rank.rank, message.first_site, message.second_site, now)


def _on_blocked(state: CoordinatorState, rank: RankPeer, message: m.Blocked, now: float) -> None:
    # NaN and infinity can't be subtracted from a time.
    seconds = message.seconds if math.isfinite(message.seconds) else 0.0
    wait = Wait(message.process_set, message.epoch, message.local, now - max(0.0, seconds))
    over = message.local < 0
    rank.executing = wait if message.executing and not over else None
    if not message.executing or (rank.wait is not None and rank.wait[:3] == wait[:3]):
        rank.wait = None
        state.blocked.discard(rank.rank)
    if over:
        return
    if message.executing:
        state.stalls.watch_execution(wait.since, now)
    else:
        rank.wait = wait
        state.blocked.add(rank.rank)
        state.check_blocked = True


TO_RANKS: dict[type, Reaction] = {
    m.Resume: on_resume,
    m.Duplicate: _on_duplicate,
    m.Blocked: _on_blocked,
    m.Paused: on_paused,
    m.Resumed: on_resumed,
    m.Pong: _on_pong,
    m.Bye: _on_bye,
    m.Ping: _on_ping,
    m.Post: _on_post,
    m.Withdraw: _on_withdraw,
    m.Cancel: _on_cancel,
    m.DeclinePost: _on_decline_post,
    m.BoardMissing: _on_board_missing,
    m.PlaneFailed: _on_plane_failed,
    m.Executed: _on_executed,
    m.Renew: _on_renew,
    m.CellBegin: _on_cell_begin,
    m.CellEnd: _on_cell_end,
    m.Elastic: on_elastic,
    m.Regroup: on_regroup,
    m.StoreSet: _on_store_set,
    m.StoreGet: _on_store_get,
    m.Events: _on_events,
    m.Subscribe: _on_subscribe,
}
