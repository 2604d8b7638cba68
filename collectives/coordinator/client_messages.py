"""How the coordinator reacts to what clients say."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hvdlab.collectives.coordinator.arrivals import lose, release, resize
from hvdlab.collectives.coordinator.common import answer_ping, peers_of, subscribe
from hvdlab.collectives.coordinator.events import CloseConnection
from hvdlab.collectives.coordinator.restoring import on_recall
from hvdlab.collectives.protocol import messages as m

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.state import CoordinatorState

Reaction = Callable[["CoordinatorState", int, Any, float], None]


def _on_bye(state: CoordinatorState, peer: int, message: m.Bye, now: float) -> None:
    state.membership.clients.pop(peer, None)
    state.membership.observers.pop(peer, None)
    state.history.unsubscribe(peer)
    state.outbox.effects.append(CloseConnection(peer))


def _on_expect(state: CoordinatorState, peer: int, message: m.Expect, now: float) -> None:
    state.restoring.recalled = True
    resize(state, message.ranks)


def _on_release(state: CoordinatorState, peer: int, message: m.Release, now: float) -> None:
    release(state, message.ranks)


def _on_cell_started(state: CoordinatorState, peer: int, message: m.CellStarted, now: float) -> None:
    ranks = state.membership.ranks
    state.check_admission = True
    for rank in message.ranks:
        if rank in ranks and ranks[rank].tracked:  # a rank that comes later does not get this cell
            state.cells.begin(message.cell, rank)


def _on_interrupt(state: CoordinatorState, peer: int, message: m.InterruptRanks, now: float) -> None:
    state.outbox.send(peers_of(state, message.ranks), m.Interrupt())


def _on_rank_lost(state: CoordinatorState, peer: int, message: m.RankLost, now: float) -> None:
    """The launcher saw a process end, perhaps before its connection ended; it knows better why, too."""
    rank = state.membership.ranks.get(message.rank)
    if rank is None:
        state.membership.record_death(message.rank, message.pid, message.reason, now, explained=True)
    elif rank.pid == message.pid:
        state.outbox.effects.append(CloseConnection(rank.peer))
        lose(state, rank.peer, message.reason, now, explained=True)


def _on_post(state: CoordinatorState, peer: int, message: m.Post, now: float) -> None:
    state.outbox.send(peers_of(state, message.to), m.Mail(message.topic, -1, message.body))


def _ignore(state: CoordinatorState, peer: int, message: m.Message, now: float) -> None:
    """Do nothing for a Pong: it is only a sign of life, and the server has noted that bytes came."""


TO_CLIENTS: dict[type, Reaction] = {
    m.Pong: _ignore,
    m.Bye: _on_bye,
    m.Ping: answer_ping,
    m.Post: _on_post,
    m.Recall: on_recall,
    m.Expect: _on_expect,
    m.Release: _on_release,
    m.CellStarted: _on_cell_started,
    m.InterruptRanks: _on_interrupt,
    m.RankLost: _on_rank_lost,
    m.Subscribe: subscribe,
}
