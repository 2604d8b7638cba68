"""A rank that trains loses its connection, is given up, and comes back: the same process, with its memory."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.bindings.elastic_state import HandledState, HandlerRegistry
from hvdlab.collectives import context
from hvdlab.collectives.elastic import run_fn
from hvdlab.collectives.errors import AbortedError
from support.engine_probe import EngineProbe
from support.patience import PATIENCE
from support.ranks.resident import Ranks, resident_ranks

ranks = resident_ranks(2, scope="function")


# -- on the ranks -------------------------------------------------------------------------------------------------


def cut() -> None:
    """End this rank's connection under both ends."""
    with socket.socket(fileno=os.dup(EngineProbe(context.engine()).endpoint.fileno())) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def train(cut_rank: int) -> tuple[list[tuple[int, int]], int, float]:
    """Train until the rank that was cut off takes part again.

    Returns:
        The step and the number of ranks at the beginning of each attempt, the step at the end, and the sum of all
        trained steps.
    """
    begun: list[tuple[int, int]] = []
    mine = context.engine().rank == cut_rank

    def steps(state: Any) -> None:
        begun.append((state.batch, context.engine().size))
        back = 0.0
        while not back:
            if state.batch == 5 and len(begun) == 1 and mine:
                cut()
            total, back = hvd.allreduce(np.array([1.0, mine and len(begun) > 1]), "x", op=hvd.Sum).tolist()
            state.total += total
            state.batch += 1
            state.commit()

    state: Any = HandledState(HandlerRegistry([]), batch=0, total=0.0)
    run_fn(steps, lambda: None)(state)
    return begun, state.batch, state.total


def one_sum() -> float:
    return float(hvd.allreduce(np.ones(1), "x", op=hvd.Sum)[0])


def cut_and_wait() -> str:
    """Return why the next collective fails, once nothing is left to hope for."""
    gone = threading.Event()
    context.engine().on_leave(lambda reason: gone.set())
    cut()
    assert gone.wait(PATIENCE)
    with pytest.raises(AbortedError) as failed:
        one_sum()
    return str(failed.value)


# -- tests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut_rank", [0, 1])
def test_a_rank_comes_back_and_gets_the_state_of_the_others(ranks: Ranks, cut_rank: int) -> None:
    found = ranks.run(train, cut_rank, timeout=PATIENCE)
    attempts = [attempt[0] for attempt in found]
    assert found[0][1:] == found[1][1:], "they end with the same state"
    again = attempts[cut_rank][1:]
    assert len(again) == 1, "it begins again once, with all others"
    assert again[0] == attempts[1 - cut_rank][-1]
    assert again[0][0] >= 5
    assert again[0][1] == 2


def test_a_script_that_does_not_train_is_not_let_in(ranks: Ranks) -> None:
    """Its next submission would meet a later one of the other rank."""
    said = ranks.run(cut_and_wait, ranks=[1], timeout=PATIENCE)[0]
    assert "the others have gone on without it" in said
