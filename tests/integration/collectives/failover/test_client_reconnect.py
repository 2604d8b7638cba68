"""Only a coordinator that has ended, is stopped or does not answer is replaced."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator

import pytest

from hvdlab.collectives.client import Client, CoordinatorLostError
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.failover import client_reconnect
from hvdlab.collectives.failover.client_reconnect import Cells, ClientRecovery
from hvdlab.collectives.time_limits import RESTARTS
from hvdlab.collectives.types import Membership
from support.patience import GONE, PATIENCE

CELLS = {"cell": (0, 1)}


class Fakes:
    """Coordinator, client and runs of cells; ``answers`` has the answers to the next connections."""

    def __init__(self, pid: int, answers: list[Exception | None]) -> None:
        self.pid = pid
        self.answers = answers
        self.did: list[str] = []
        self.how = ""

    def ending(self) -> str:
        return self.how

    def running(self) -> Cells:
        return CELLS

    def respawn(self, timeout: float = 0) -> None:
        self.did.append("respawn")

    def reconnect(self, cells: Cells | None = None, timeout: float = 0, *, process: int = 0) -> Membership:
        assert cells == CELLS
        self.did.append("reconnect")
        if self.answers and (error := self.answers.pop(0)) is not None:
            if "killed" in str(error):
                self.how = "killed by SIGKILL"
            raise error
        return Membership()


@pytest.fixture
def living(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(client_reconnect, "END_WITHIN", 0.0)
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def recovering(fakes: Fakes) -> ClientRecovery:
    return ClientRecovery(fakes, fakes, runs=fakes)


def test_one_that_lives_stays(living: int) -> None:
    fakes = Fakes(living, [])
    recovered = recovering(fakes).run()
    assert (fakes.did, recovered.replaced, recovered.cells) == (["reconnect"], False, CELLS)


@pytest.mark.parametrize("error", [StartError("silence"), TimeoutError("silence"), ConnectionResetError()])
def test_one_that_does_not_answer_is_replaced(living: int, error: Exception) -> None:
    fakes = Fakes(living, [error])
    assert recovering(fakes).run().replaced
    assert fakes.did == ["reconnect", "respawn", "reconnect"]


def test_one_that_has_ended_is_not_asked(living: int) -> None:
    fakes = Fakes(living, [])
    fakes.how = "killed by SIGKILL"
    recovery = recovering(fakes)
    assert recovery.run().replaced
    assert (fakes.did, recovery.ending) == (["respawn", "reconnect"], "killed by SIGKILL")


def test_one_that_is_stopped_is_not_asked(living: int) -> None:
    os.kill(living, signal.SIGSTOP)
    os.waitpid(living, os.WUNTRACED)
    fakes = Fakes(living, [])
    assert recovering(fakes).run().replaced
    assert fakes.did == ["respawn", "reconnect"]


def test_a_client_that_was_closed_needs_no_successor(living: int) -> None:
    fakes = Fakes(living, [CoordinatorLostError("this client was closed")])
    with pytest.raises(CoordinatorLostError):
        recovering(fakes).run()
    assert fakes.did == ["reconnect"]


def test_one_that_loses_its_client_again_and_again_is_replaced(living: int) -> None:
    fakes = Fakes(living, [])
    recovery = recovering(fakes)
    assert [recovery.run().replaced for _ in range(RESTARTS + 1)] == [False] * RESTARTS + [True]


def test_with_a_coordinator() -> None:
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    with (
        CoordinatorProcess.start(keep=True, timeout=PATIENCE) as coordinator,
        Client.connect(coordinator.address, coordinator.client_token) as client,
    ):
        client.on_lost(lost.put)
        recovery = ClientRecovery(coordinator, client)
        first = coordinator.pid
        client._connection._endpoint._sock.shutdown(socket.SHUT_RDWR)
        lost.get(timeout=GONE)
        assert not recovery.run().replaced
        assert (coordinator.pid, client.incarnation, recovery.ending) == (first, 0, "")
        client.flush()
        os.kill(first, signal.SIGKILL)
        lost.get(timeout=GONE)
        assert recovery.run().replaced
        assert (client.incarnation, recovery.ending) == (1, "killed by SIGKILL")
        client.flush()


def test_a_successor_that_ends_before_it_answers_has_a_successor(living: int) -> None:
    fakes = Fakes(living, [StartError("killed")] * 2)
    fakes.how = "killed by SIGKILL"
    recovery = recovering(fakes)
    assert recovery.run().replaced
    assert fakes.did == ["respawn", "reconnect"] * 3
    fakes = Fakes(living, [StartError("killed")] * 99)
    fakes.how = "killed by SIGKILL"
    with pytest.raises(StartError):
        recovering(fakes).run()


class KilledSuccessor:
    """Coordinator whose first successor stands still, and is killed while the client waits for its answer."""

    def __init__(self, coordinator: CoordinatorProcess) -> None:
        self.coordinator, self.respawns = coordinator, 0

    @property
    def pid(self) -> int:
        return self.coordinator.pid

    def ending(self) -> str:
        return self.coordinator.ending()

    def respawn(self, timeout: float = 10) -> None:
        self.coordinator.respawn(timeout)
        self.respawns += 1
        if self.respawns == 1:
            os.kill(self.pid, signal.SIGSTOP)
            threading.Timer(0.3, os.kill, (self.pid, signal.SIGKILL)).start()


def test_the_wait_for_a_successor_ends_with_it() -> None:
    with (
        CoordinatorProcess.start(keep=True, timeout=PATIENCE) as coordinator,
        Client.connect(coordinator.address, coordinator.client_token) as client,
    ):
        killed = KilledSuccessor(coordinator)
        os.kill(coordinator.pid, signal.SIGKILL)
        recovered = ClientRecovery(killed, client, reconnect_within=PATIENCE).run()
        assert (recovered.replaced, killed.respawns, client.incarnation) == (True, 2, 2)
        client.flush()
