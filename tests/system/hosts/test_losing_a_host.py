"""A host whose cable is pulled: the others go on, its ranks end with an error, and none hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.bindings.elastic_state import HandledState, HandlerRegistry
from hvdlab.collectives import context
from hvdlab.collectives.elastic import run_fn
from hvdlab.collectives.errors import AbortedError, CauseKind
from support.network.namespaces import Network
from support.patience import GONE, HOUR, PATIENCE, eventually
from support.ranks.on_hosts import RanksOnHosts
from support.ranks.resident import RankFailed

DEAD_AFTER = 2.0  # seconds of silence after which a host is lost: short, for a short test
HEARTBEAT = {"HVDLAB_PING_AFTER": "0.5", "HVDLAB_DEAD_AFTER": str(DEAD_AFTER)}


@pytest.fixture
def ranks(request: pytest.FixtureRequest, network: Network) -> Iterator[RanksOnHosts]:
    plane = getattr(request, "param", "auto")
    try:
        with RanksOnHosts(network, env={"HVDLAB_PLANE": plane, **HEARTBEAT}) as made:
            yield made
    finally:
        network.hosts[1].mend()


KEPT: dict[str, int] = {}
"""On a rank: what it must still have when it is back."""


# -- on the ranks -------------------------------------------------------------------------------------------------


def total(value: float, count: int = 5000) -> float:
    return float(hvd.allreduce(np.full(count, value), "total", op=hvd.Sum)[0])


def total_of_survivors() -> float:
    """The ranks of a host need not be declared dead in the same moment."""
    while True:
        try:
            return total(1.0)
        except AbortedError as error:
            if error.cause.kind is not CauseKind.RANK_DIED:
                raise


def reduce_until_it_fails() -> None:
    """Reduce all the time, until an error ends it."""
    while True:
        total(1.0, 200_000)


def rejoin() -> None:
    context.shutdown()
    context.init()


def train(directory: str) -> tuple[int, object]:
    """Train until the ranks of the second host have been away and are back: return the steps, and the state kept
    here. A file in the directory says that this rank has seen the others away."""

    def steps(state: Any) -> None:
        members = 0.0
        while not (state.apart and members == 4):
            members = float(hvd.allreduce(np.ones(1), "members", op=hvd.Sum)[0])
            if members == 2 and not state.apart:
                Path(directory, f"apart.{context.engine().rank}").touch()
                state.apart = True
            state.batch += 1
            time.sleep(0.01)  # time of a step
            state.commit()

    state: Any = HandledState(HandlerRegistry([]), batch=0, apart=False)
    run_fn(steps, lambda: None)(state)
    return state.batch, KEPT.get("rank")


def keep() -> None:
    KEPT["rank"] = context.engine().rank


def place() -> tuple[int, int]:
    e = context.engine()
    assert e.plane() == "hierarchical"
    return e.cross_rank, e.cross_size


def leave() -> None:
    """Leave without any hurry: the operation must end, not the time limit."""
    context.engine().close(HOUR)
    context.shutdown()


# -- tests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", ["gloo", "auto"], indirect=True)
def test_the_others_go_on_and_the_lost_ranks_are_told(ranks: RanksOnHosts) -> None:
    assert ranks.run(total, 1.0, timeout=60) == [4.0] * 4
    running = ranks.start(reduce_until_it_fails)
    ranks.network.hosts[1].cut()
    outcomes = running.outcomes(GONE)
    for error in outcomes[:2]:
        assert isinstance(error, AbortedError)
        assert error.cause.kind is CauseKind.RANK_DIED
        assert set(error.cause.ranks) <= {2, 3}
        assert "no sign of life" in str(error)
    for error in outcomes[2:]:
        assert isinstance(error, AbortedError)
        assert error.cause.kind is CauseKind.COORDINATOR_LOST
        assert "coordinator is gone" in str(error)
    assert ranks.run(total_of_survivors, ranks=[0, 1]) == [2.0] * 2
    ranks.run(leave, ranks=[2, 3], timeout=PATIENCE)


def test_a_rank_that_waits_is_told(ranks: RanksOnHosts) -> None:
    ranks.run(total, 1.0, timeout=60)
    waiting = ranks.start(total, 1.0, ranks=[0, 2])
    ranks.network.hosts[1].cut()
    here, there = waiting.outcomes(GONE)
    assert isinstance(here, AbortedError)
    assert here.cause.kind is CauseKind.RANK_DIED
    assert isinstance(there, AbortedError)
    assert there.cause.kind is CauseKind.COORDINATOR_LOST


def test_a_host_that_comes_back(ranks: RanksOnHosts) -> None:
    """Its ranks are dead to the others, until they join again; they can as soon as the network is there."""
    ranks.run(total, 1.0, timeout=60)
    running = ranks.start(reduce_until_it_fails)
    ranks.network.hosts[1].cut()
    outcomes = running.outcomes(GONE)
    assert all(isinstance(outcome, AbortedError) for outcome in outcomes)
    ranks.network.hosts[1].mend()
    assert ranks.run(total_of_survivors, ranks=[0, 1]) == [2.0] * 2
    with pytest.raises(RankFailed, match="the coordinator is gone"):
        ranks.run(total, 1.0, ranks=[2, 3])
    ranks.run(rejoin, ranks=[2, 3], timeout=60)
    assert ranks.run(total, 1.0) == [4.0] * 4


def test_ranks_that_train_come_back_with_their_memory(ranks: RanksOnHosts, tmp_path: Path) -> None:
    ranks.run(keep, timeout=60)
    running = ranks.start(train, str(tmp_path))
    ranks.network.hosts[1].cut()
    eventually(lambda: list(tmp_path.glob("apart.*")))
    ranks.network.hosts[1].mend()
    found = running.results(PATIENCE)
    assert [kept for _, kept in found] == [0, 1, 2, 3]
    assert len({steps for steps, _ in found}) == 1


def test_a_short_cut_is_survived(network: Network) -> None:
    # Shorter than the silence after which a host is lost, however late a busy machine mends it.
    env = {**HEARTBEAT, "HVDLAB_DEAD_AFTER": str(PATIENCE)}
    with RanksOnHosts(network, env=env) as ranks:
        ranks.run(total, 1.0, timeout=60)
        running = ranks.start(total, 1.0)
        network.hosts[1].cut()
        time.sleep(DEAD_AFTER / 4)
        network.hosts[1].mend()
        assert running.results(PATIENCE) == [4.0] * 4


def test_two_hosts_of_three_are_left() -> None:
    with Network(3) as three, RanksOnHosts(three, env=HEARTBEAT) as ranks:
        assert ranks.run(total, 1.0, 100_000, timeout=90) == [6.0] * 6
        waiting = ranks.start(total, 1.0, 100_000, ranks=[0, 1, 2, 3])
        three.hosts[2].cut()
        for error in waiting.outcomes(GONE):
            assert isinstance(error, AbortedError)
            assert error.cause.kind is CauseKind.RANK_DIED
            assert set(error.cause.ranks) <= {4, 5}
        assert ranks.run(total_of_survivors, ranks=[0, 1, 2, 3]) == [4.0] * 4
        assert ranks.run(place, ranks=[0, 1, 2, 3]) == [(0, 2), (0, 2), (1, 2), (1, 2)]
        three.hosts[2].mend()
