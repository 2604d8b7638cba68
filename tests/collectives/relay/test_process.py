"""Ranks behind a relay that is a process, and what its death, theirs and the coordinator's cost."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from hvdlab.collectives import api, context
from hvdlab.collectives.client import Client
from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.errors import AbortedError, CauseKind, StartError
from hvdlab.collectives.protocol.connect import connect
from hvdlab.collectives.protocol.messages import PROTOCOL_VERSION, Hello
from patience import PATIENCE, eventually
from ranks import Ranks, Running, meet
from relayed_ranks import RelayedRanks


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of a busy machine that comes back late must not count as dead."""
    monkeypatch.setenv("HVDLAB_REATTACH", f"{PATIENCE:g}")


@pytest.fixture(params=["tls", "unix"])
def three(request: pytest.FixtureRequest) -> Iterator[RelayedRanks]:
    with RelayedRanks(3, tls=request.param == "tls") as ranks:
        yield ranks


def client_of(group: Ranks) -> Client:
    return Client.connect(group.coordinator.address, group.coordinator.client_token)


def succeed(group: RelayedRanks, running: Running | None = None) -> None:
    """Let a successor take the place of the coordinator, which ends now, and see that the ranks go on."""
    eventually(lambda: not group.coordinator.running, lambda: "the coordinator does not end with its relay")
    group.coordinator.respawn()
    if running is not None:
        running.results(PATIENCE)
    assert group.run(total, per_rank=[(1.0,), (2.0,), (4.0,)], timeout=PATIENCE) == [7.0] * 3
    assert group.run(generation) == [1] * 3


# -- on the ranks -------------------------------------------------------------------------------------------------

memory: dict[str, Any] = {}


def total(value: float = 1.0, name: str = "total") -> float:
    return float(api.allreduce(np.full(5000, value), name, op=api.Sum)[0])


def ordered(value: float, name: str) -> float:
    """A sum of the kind that the coordinator orders: ranks that wait for a small one may agree on it in shared memory."""
    return float(np.asarray(api.synchronize(api.allreduce_async(np.full(3, value), name, op=api.Sum)))[0])


def many(count: int) -> float:
    started = [api.allreduce_async(np.ones(3) * i, f"many.{i}", op=api.Sum) for i in range(count)]
    return sum(float(np.asarray(api.synchronize(each))[0]) for each in started)


def gather(rows: int) -> int:
    return len(np.asarray(api.allgather(np.ones((rows, 2)), "gathered")))


def is_relayed() -> bool:
    return not context.engine()._endpoint.secure


def generation() -> int:
    return context.engine().generation


def own_pid() -> int:
    return os.getpid()


def lose_the_connection() -> None:
    context.engine()._endpoint._sock.shutdown(socket.SHUT_RDWR)


def keep(value: object) -> None:
    memory["kept"] = value


def recall() -> object:
    return memory["kept"]


def wait_for(name: str) -> None:
    started = api.allreduce_async(np.ones(4), name, op=api.Sum)
    context.engine().flush()
    context.engine().post("waiting", b"")
    api.synchronize(started)


def reduce_over_a_loss() -> int:
    """Reduce, again where one is lost, until all ranks have another coordinator. Returns how many were lost here.

    One that is lost for some ranks may have been completed for others, which then wait in the next one: all have one name.
    """
    engine = context.engine()
    before, lost = engine.generation, 0
    while True:
        try:
            gone_on = ordered(float(engine.generation != before), "endless")
        except AbortedError as error:
            if error.cause.kind is not CauseKind.COORDINATOR_LOST:
                raise
            lost += 1
        else:
            if gone_on == engine.size:
                return lost
            engine.post("waiting", b"")


def start_waiting(group: Ranks, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Running:
    """Start a function on ranks, and return once they say that they wait."""
    with client_of(group) as client:
        told: SimpleQueue[int] = SimpleQueue()
        client.on_mail("waiting", lambda sender, body: told.put(sender))
        running = group.start(function, *args, **kwargs)
        said: set[int] = set()
        while said != set(running.numbers):
            said.add(told.get(timeout=PATIENCE))
    return running


# -- without faults -----------------------------------------------------------------------------------------------


def test_collectives_behind_a_relay(three: RelayedRanks) -> None:
    assert three.run(is_relayed)[1:] == [True, True]
    assert three.run(total, per_rank=[(1.0,), (2.0,), (4.0,)]) == [7.0] * 3
    assert three.run(many, 40) == [3.0 * sum(range(40))] * 3
    assert three.run(gather, per_rank=[(1,), (2,), (3,)]) == [6] * 3


# -- deaths -------------------------------------------------------------------------------------------------------


def test_a_relay_that_is_killed_costs_no_memory(three: RelayedRanks) -> None:
    three.run(keep, per_rank=[("a",), ("b",), ("c",)])
    running = start_waiting(three, reduce_over_a_loss)
    os.kill(three.relay.pid, signal.SIGKILL)
    succeed(three, running)
    assert three.run(recall) == ["a", "b", "c"]


def test_a_relay_that_is_stopped_is_killed_by_its_starter(three: RelayedRanks) -> None:
    three.run(keep, per_rank=[("a",), ("b",), ("c",)])
    running = start_waiting(three, reduce_over_a_loss)
    os.kill(three.relay.pid, signal.SIGSTOP)
    eventually(lambda: "stopped" in three.relay.look(time.monotonic()))
    succeed(three, running)
    assert three.run(recall) == ["a", "b", "c"]


def test_a_relay_that_answers_is_let_be(three: RelayedRanks) -> None:
    answered: list[float] = []

    def look() -> bool:
        now = time.monotonic()
        assert not three.relay.look(now)
        answered.append(three.relay.due(now))
        return len(answered) > 3 and answered[-1] > max(answered[-4:-1])  # it was asked, and heard again

    eventually(look)
    assert three.run(total) == [3.0] * 3


def test_a_coordinator_that_is_killed_has_a_successor_without_relays(three: RelayedRanks) -> None:
    three.run(keep, per_rank=[("a",), ("b",), ("c",)])
    running = start_waiting(three, reduce_over_a_loss)
    os.kill(three.coordinator.pid, signal.SIGKILL)
    succeed(three, running)
    assert three.run(recall) == ["a", "b", "c"]
    three.relay.close(PATIENCE)
    assert not os.path.exists(three.relay.address.removeprefix("unix:"))


def test_a_rank_that_comes_by_itself_has_lost_its_relay(three: RelayedRanks) -> None:
    """The coordinator may hear of that first from the rank: it takes the rank's word, and does not refuse it as one that is there already."""
    [pid] = three.run(own_pid, ranks=[1])
    hello = Hello(PROTOCOL_VERSION, three.coordinator.token, "rank", 1, "here", pid, generation=0)
    with contextlib.suppress(StartError):
        endpoint, _ = connect(three.coordinator.address, hello, deadline=Deadline(PATIENCE))
        endpoint.close()
    succeed(three)


def test_ranks_come_by_themselves_before_the_coordinator_knows_why(three: RelayedRanks) -> None:
    three.run(keep, per_rank=[("a",), ("b",), ("c",)])
    os.kill(three.relay.pid, signal.SIGSTOP)
    three.run(lose_the_connection, ranks=[1, 2])
    eventually(lambda: not three.coordinator.running)
    os.kill(three.relay.pid, signal.SIGKILL)
    succeed(three)
    assert three.run(recall) == ["a", "b", "c"]


def test_a_rank_behind_a_relay_is_killed(three: RelayedRanks) -> None:
    running = start_waiting(three, wait_for, "x", ranks=[0, 1])
    three.kill(2)
    for error in running.outcomes(PATIENCE):
        assert isinstance(error, AbortedError)
        assert error.cause.kind is CauseKind.RANK_DIED
        assert error.cause.ranks == (2,)
        assert "its connection ended without a goodbye" in str(error)
    assert three.coordinator.running


def test_a_stall_names_ranks_behind_a_relay(three: RelayedRanks) -> None:
    with client_of(three) as client:
        seen: SimpleQueue[Any] = SimpleQueue()
        client.on_stall(seen.put)
        running = three.start(wait_for, "x", ranks=[0, 1])
        stall = seen.get(timeout=PATIENCE)
        assert (stall.waited, stall.missing) == ((0, 1), (2,))
        three.run(wait_for, "x", ranks=[2])
        running.results(PATIENCE)


def test_an_interrupt_reaches_a_rank_behind_a_relay(three: RelayedRanks) -> None:
    running = start_waiting(three, wait_for, "x", ranks=[1])
    three.kill(1, signal.SIGINT)
    [error] = running.outcomes(PATIENCE)
    assert isinstance(error, KeyboardInterrupt)
    three.run(meet)
    assert three.run(total) == [3.0] * 3


def test_only_its_user_gets_to_a_relay(three: RelayedRanks) -> None:
    path = Path(three.relay.address.removeprefix("unix:"))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_garbage_costs_its_sender_the_connection(three: RelayedRanks) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(three.relay.address.removeprefix("unix:"))
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        stranger.settimeout(PATIENCE)
        assert stranger.recv(100) == b""
    assert three.run(total) == [3.0] * 3


def test_only_its_own_token_makes_a_relay(three: RelayedRanks) -> None:
    for token in (three.coordinator.token, three.coordinator.client_token, "guessed"):
        with pytest.raises(StartError, match="refused: "):
            connect(
                three.coordinator.address,
                Hello(PROTOCOL_VERSION, token, "relay"),
                deadline=Deadline(PATIENCE),
            )


def test_a_token_is_asked_for_behind_a_relay(three: RelayedRanks) -> None:
    for hello, why in (
        (Hello(PROTOCOL_VERSION, "guessed", "rank", 3), "the token is wrong"),
        (Hello(PROTOCOL_VERSION - 1, three.coordinator.token, "rank", 3), "is not spoken here"),
    ):
        with pytest.raises(StartError, match=why):
            connect(three.relay.address, hello, deadline=Deadline(PATIENCE))
    assert three.run(total) == [3.0] * 3


def test_without_a_successor_the_ranks_behind_a_relay_are_lost() -> None:
    with RelayedRanks(3, keep=False) as ranks:
        running = start_waiting(ranks, wait_for, "x", ranks=[0])
        os.kill(ranks.relay.pid, signal.SIGKILL)
        [error] = running.outcomes(PATIENCE)
        assert isinstance(error, AbortedError)
        assert error.cause.kind is CauseKind.RANK_DIED
        assert ranks.coordinator.running


def test_ranks_do_without_a_relay_that_can_not_come_up() -> None:
    with RelayedRanks(3, token="wrong") as ranks:
        assert ranks.run(total) == [3.0] * 3
        assert ranks.run(is_relayed) == [False] * 3
