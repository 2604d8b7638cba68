"""Networks that fail by halves: one direction is dead, or all is late. The lost ranks are reported, on both sides, and
not before."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.errors import AbortedError, CauseKind
from support.network import namespaces as hosts
from support.network.namespaces import Network, SlowLink
from support.ranks.on_hosts import RanksOnHosts

if hosts.slow_missing():
    pytest.skip(hosts.slow_missing(), allow_module_level=True)

pytestmark = pytest.mark.soak

PING_AFTER, DEAD_AFTER = 0.5, 4.0
HEARTBEAT = {
    "HVDLAB_PING_AFTER": str(PING_AFTER),
    "HVDLAB_DEAD_AFTER": str(DEAD_AFTER),
    "HVDLAB_REATTACH": "2",
}
SLACK = 30.0
"""Seconds for a busy machine, on top of what is waited for a sign of life."""


# -- on the ranks -------------------------------------------------------------------------------------------------


def total(value: float = 1.0, count: int = 5000) -> float:
    return float(hvd.allreduce(np.full(count, value), "total", op=hvd.Sum)[0])


def add_own_set() -> int:
    """A process set for each host."""
    sets = [context.engine().add_process_set(ranks) for ranks in ([0, 1], [2, 3])]
    return sets[context.engine().rank // 2]


def reduce_until_it_fails() -> tuple[AbortedError, float]:
    """Return the error that ends a rank that reduces all the time, and its time."""
    while True:
        try:
            total(1.0, 50_000)
        except AbortedError as error:
            return error, time.time()


def alone(process_set: int) -> list[bool]:
    """Whether each of some collectives within a host is done."""
    done = []
    for _ in range(3):
        try:
            hvd.allreduce(np.ones(5), "alone", op=hvd.Sum, process_set=process_set)
        except AbortedError:
            done.append(False)
        else:
            done.append(True)
    return done


def total_of_survivors() -> float:
    """The ranks of a host need not be declared dead in the same moment."""
    while True:
        try:
            return total()
        except AbortedError as error:
            if error.cause.kind is not CauseKind.RANK_DIED:
                raise


# -- tests ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ranks() -> Iterator[RanksOnHosts]:
    with Network(2, {1: SlowLink(0.0, 1e9)}) as network, RanksOnHosts(network, env=HEARTBEAT) as made:
        yield made


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "incoming",
    [
        pytest.param(True, id="nothing reaches it"),
        pytest.param(False, id="nothing comes from it"),
    ],
)
def test_a_network_that_works_in_one_direction(ranks: RanksOnHosts, *, incoming: bool) -> None:
    """The second host hears nothing, or is not heard."""
    second = ranks.network.hosts[1]
    sets = ranks.run(add_own_set, timeout=90)
    assert ranks.run(total) == [4.0] * 4
    running = ranks.start(reduce_until_it_fails)
    begin = time.time()
    second.cut_one_way(incoming=incoming)
    try:
        outcomes = running.outcomes(DEAD_AFTER + SLACK)
        for rank, (error, when) in enumerate(outcomes):
            assert isinstance(error, AbortedError), error
            # The last sign of life can be as old as the time for which silence is allowed.
            assert when - begin > DEAD_AFTER - PING_AFTER - 0.5, (rank, when - begin, error)
            if rank < 2:
                assert error.cause.kind is CauseKind.RANK_DIED
                assert set(error.cause.ranks) <= {2, 3}
            else:
                assert error.cause.kind in (CauseKind.COORDINATOR_LOST, CauseKind.RANK_DIED)
        assert ranks.run(total_of_survivors, ranks=[0, 1]) == [2.0] * 2
        # The ranks that are cut off are no group of their own, not even in a process set of their own.
        assert (
            ranks.run(alone, per_rank=[(sets[2],), (sets[3],)], ranks=[2, 3], timeout=60) == [[False] * 3] * 2
        )
    finally:
        second.cut_one_way(incoming=incoming)
    assert ranks.run(total, ranks=[0, 1]) == [2.0] * 2


@pytest.mark.timeout(300)
def test_messages_that_are_late_by_half_the_heartbeat_kill_nobody() -> None:
    with (
        Network(2, {1: SlowLink(DEAD_AFTER / 8, 100e6)}) as network,
        RanksOnHosts(network, env=HEARTBEAT) as ranks,
    ):
        for value in (1.0, 2.0, 3.0):
            assert ranks.run(total, value, timeout=90) == [4 * value] * 4
