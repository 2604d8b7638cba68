"""What ranks and clients may both ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdlab.collectives.protocol import messages as m

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.state import CoordinatorState


def answer_ping(state: CoordinatorState, peer: int, message: m.Ping, now: float) -> None:
    """Answer a ping, after all other messages of the round."""
    # The round may have begun before the question was asked, hence not ``now``.
    state.answers.append((peer, m.Pong(message.number, state.clock(), message.after_events)))


def subscribe(state: CoordinatorState, peer: int, message: m.Subscribe, now: float) -> None:
    if message.events:
        state.history.subscribe(peer, state.outbox, past=message.history, after=message.after)
    else:
        state.history.unsubscribe(peer)


def peers_of(state: CoordinatorState, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Connections of those of these ranks that live."""
    living = state.membership.ranks
    return tuple(living[rank].peer for rank in ranks if rank in living)
