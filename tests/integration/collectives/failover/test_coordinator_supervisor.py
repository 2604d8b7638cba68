"""Rank 0 lets a successor take over, and knows when to stop."""

from __future__ import annotations

import fcntl
import os
import queue
import resource
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from hvdlab.collectives.errors import StartError
from hvdlab.collectives.failover import supervisor
from hvdlab.collectives.failover.client_reconnect import ClientRecovery
from hvdlab.collectives.failover.supervisor import Keeper
from hvdlab.collectives.time_limits import RESTARTS
from support.patience import PATIENCE


class FakeCoordinator:
    """Process that only sleeps; ``broken`` ones have no successor, for this error."""

    def __init__(self, *, broken: bool = False, error: Exception | None = None) -> None:
        self.did: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.broken, self.error = broken, error or StartError("there is no memory")
        self.process = self.begin()

    def begin(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "600"])

    @property
    def pid(self) -> int:
        return self.process.pid

    def ending(self) -> str:
        return "" if self.process.poll() is None else "killed by SIGKILL"

    def respawn(self, within: float = PATIENCE) -> None:
        if self.broken:
            raise self.error
        self.process = self.begin()
        self.did.put("respawn")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.did.put("close")


def test_a_successor_each_time_but_not_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    fake: Any = FakeCoordinator()
    watching = Keeper(fake)
    for _ in range(RESTARTS):
        fake.process.kill()
        assert fake.did.get(timeout=PATIENCE) == "respawn"
    fake.process.kill()
    assert fake.did.get(timeout=PATIENCE) == "close"
    watching.close()
    assert "it has ended 5 times within a minute" in caplog.text


def test_nobody_waits_for_one_that_does_not_come_up(caplog: pytest.LogCaptureFixture) -> None:
    fake: Any = FakeCoordinator(broken=True)
    watching = Keeper(fake)
    fake.process.kill()
    assert fake.did.get(timeout=PATIENCE) == "close"
    watching.close()
    assert "no other one can take its place: there is no memory" in caplog.text


def test_successor_that_fails_by_an_unexpected_error_frees_the_ranks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake: Any = FakeCoordinator(broken=True, error=ValueError("no JSON"))
    watching = Keeper(fake)
    fake.process.kill()
    assert fake.did.get(timeout=PATIENCE) == "close"
    watching.close()
    assert "no other one can take its place: ValueError('no JSON')" in caplog.text


@pytest.fixture
def high_descriptors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Number the descriptors of processes as in a process with over a thousand open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))

    def high(pid: int) -> int:
        low = pidfd_open(pid)
        try:
            return fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1024)
        finally:
            os.close(low)

    pidfd_open = os.pidfd_open
    monkeypatch.setattr(os, "pidfd_open", high)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("high_descriptors")
def test_a_process_with_a_thousand_files_starts_a_successor() -> None:
    fake: Any = FakeCoordinator()
    watching = Keeper(fake)
    fake.process.kill()
    assert fake.did.get(timeout=PATIENCE) == "respawn"
    watching.close()
    fake.close()


@pytest.mark.usefixtures("high_descriptors")
def test_a_process_with_a_thousand_files_learns_how_its_coordinator_ended() -> None:
    fake: Any = FakeCoordinator(broken=True)
    client: Any = None
    recovery = ClientRecovery(fake, client)
    fake.process.kill()
    with pytest.raises(StartError, match="there is no memory"):
        recovery.run()
    assert recovery.ending == "killed by SIGKILL"


def test_one_whose_end_can_not_be_waited_for_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError

    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(supervisor, "_POLL", 0.01)
    fake: Any = FakeCoordinator()
    watching = Keeper(fake)
    fake.process.kill()
    assert fake.did.get(timeout=PATIENCE) == "respawn"
    watching.close()
    watching.close()
    assert fake.did.empty()
    fake.close()
