"""Shutting down and initializing again, with ranks that are far ahead of others."""

from __future__ import annotations

import random
from queue import SimpleQueue

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.client import Client
from hvdlab.collectives.errors import AbortedError, CauseKind, InvalidRequestError
from support.patience import HOUR, PATIENCE
from support.ranks.resident import Ranks, resident_ranks

TIMES = 20


three = resident_ranks(3)


# -- on the ranks -------------------------------------------------------------------------------------------------


def reduce(incarnation: int, count: int = 4) -> float:
    total = hvd.allreduce(np.full(count, incarnation), f"g{incarnation}", op=hvd.Sum)
    assert context.engine().size == 3
    return float(total[0])


def again(incarnation: int) -> float:
    """Shut down, come back, and begin at once."""
    context.engine().close(HOUR)  # others in a collective do not keep a rank from leaving
    context.shutdown()
    assert not context.is_initialized()
    context.init()
    return reduce(incarnation)


def many(times: int) -> list[float]:
    return [again(incarnation) for incarnation in range(times)]


def add(ranks: list[int]) -> int:
    return context.engine().add_process_set(ranks)


def of_a_set(set_id: int) -> float:
    return float(hvd.allreduce(np.ones(2), op=hvd.Sum, process_set=set_id)[0])


def again_with_a_set(ranks: list[int]) -> tuple[int, list[int]]:
    """Return the id of a set that is added after coming back, and the sets known before that."""
    context.shutdown()
    context.init()
    known = sorted(context.engine().process_sets())
    with pytest.raises(InvalidRequestError):
        hvd.allreduce(np.ones(2), process_set=max(known) + 17)
    return context.engine().add_process_set(ranks), known


def wait_for(count: int) -> float:
    operation = hvd.allreduce_async(np.ones(count), "waits")
    context.engine().flush()
    context.engine().post("waiting", b"")  # travels behind the announcement
    return float(hvd.synchronize(operation)[0])


# -- tests ----------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_all_again_and_again_as_fast_as_they_can(three: Ranks) -> None:
    assert three.run(many, TIMES, timeout=100) == [[3.0 * g for g in range(TIMES)]] * 3


@pytest.mark.timeout(120)
def test_again_in_any_order_with_the_others_still_there(three: Ranks) -> None:
    """Each rank is back, and in its first collective, before the next has sent Bye."""
    client = Client.connect(three.coordinator.address, three.coordinator.client_token)
    news: SimpleQueue[dict[int, float]] = SimpleQueue()
    client.on_membership(lambda now: news.put({member.rank: member.started for member in now.members}))
    chance = random.Random(7)
    try:
        for incarnation in range(TIMES):
            started = {member.rank: member.started for member in client.membership().members}
            running = []
            for rank in chance.sample(range(3), 3):
                running.append(three.start(again, incarnation, ranks=[rank]))
                while client_started(client, rank) in (None, started[rank]):
                    news.get(timeout=PATIENCE)
            assert [one.results(PATIENCE) for one in running] == [[3.0 * incarnation]] * 3
    finally:
        client.close()


def client_started(client: Client, rank: int) -> float | None:
    """Return when the rank's present incarnation connected; ``None`` while it is away."""
    found = [member.started for member in client.membership().members if member.rank == rank]
    return found[0] if found else None


def test_others_in_a_collective_are_told_at_once_and_meet_again(three: Ranks) -> None:
    for count in (4, 1 << 20):
        client = Client.connect(three.coordinator.address, three.coordinator.client_token)
        waiting: SimpleQueue[int] = SimpleQueue()
        client.on_mail("waiting", lambda sender, body, told=waiting: told.put(sender))  # type: ignore[misc]
        try:
            stuck = three.start(wait_for, count, ranks=[1, 2])
            assert {waiting.get(timeout=PATIENCE), waiting.get(timeout=PATIENCE)} == {1, 2}
        finally:
            client.close()
        back = three.start(again, 7, ranks=[0])
        for error in stuck.outcomes(PATIENCE):
            assert isinstance(error, AbortedError)
            assert error.cause.kind is CauseKind.RANK_LEFT
            assert error.cause.ranks == (0,)
        others = three.start(again, 7, ranks=[1, 2])
        assert back.results(PATIENCE) + others.results(PATIENCE) == [21.0] * 3


def test_process_sets_are_gone_and_can_be_added_again(three: Ranks) -> None:
    for _ in range(3):
        results = three.run(again_with_a_set, [0, 2])
        ids = {set_id for set_id, _ in results}
        assert len(ids) == 1
        assert all(known == [0] for _, known in results)
        assert three.run(of_a_set, ids.pop(), ranks=[0, 2]) == [2.0, 2.0]


def test_a_world_that_lost_a_rank_is_made_anew_by_the_others() -> None:
    with Ranks(3) as ranks:
        assert ranks.run(reduce, 1) == [3.0] * 3
        ranks.kill(1)
        for incarnation in range(3):
            assert ranks.run(again_of_two, incarnation, ranks=[0, 2]) == [2.0 * incarnation] * 2


def again_of_two(incarnation: int) -> float:
    context.shutdown()
    context.init()
    assert context.engine().ranks() == (0, 2)
    return float(hvd.allreduce(np.full(4, incarnation), op=hvd.Sum)[0])
