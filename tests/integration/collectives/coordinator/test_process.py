"""The coordinator as a process: quick to start, and gone with its starter."""

from __future__ import annotations

import os
import resource
import select
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.protocol.codec import decode_to_peer
from hvdlab.collectives.protocol.endpoint import new_certificate
from hvdlab.collectives.protocol.handshake import connect
from hvdlab.collectives.time_limits import Deadline
from support.patience import PATIENCE

STARTER = """
import os, sys, time
from hvdlab.collectives.coordinator.process import CoordinatorProcess
coordinator = CoordinatorProcess.start(size=1)
if sys.argv[1] == "fork" and os.fork() == 0:
    # A child without exec keeps the starter's end of the lifeline open.
    os.read(0, 1)
    os._exit(0)
print(coordinator.pid, coordinator.directory, flush=True)
sys.stdin.read()
"""

BREAKING = """
from hvdlab.collectives.coordinator.state import RANK_HANDLERS
from hvdlab.collectives.protocol import messages as m

def break_state(state, *arguments):
    state.blocked.add(99)
    raise ZeroDivisionError("made to fail")

RANK_HANDLERS[m.Ping] = break_state
"""
"""What a coordinator's interpreter imports first, so that a ping breaks the state."""


def ended(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], PATIENCE)[0])


def test_it_serves_until_it_is_closed(tmp_path: Path) -> None:
    coordinator = CoordinatorProcess.start(size=1, directory=tmp_path)
    hello = m.Hello(m.PROTOCOL_VERSION, coordinator.token, "rank", 0)
    endpoint, welcome = connect(coordinator.address, hello, deadline=Deadline(PATIENCE))
    assert welcome.rank == 0
    endpoint.close()
    assert coordinator.running
    coordinator.close()
    coordinator.close()
    assert not coordinator.running
    assert list(tmp_path.iterdir()) == []


def test_coordinator_has_all_descriptors_that_it_may_have() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard - 1), hard))
    try:
        coordinator = CoordinatorProcess.start(size=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(coordinator.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    coordinator.close()


def test_a_death_is_in_the_log_file_and_not_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    journal = tmp_path / "coordinator.log"
    monkeypatch.setenv("HVDLAB_COORDINATOR_LOG", str(journal))
    with CoordinatorProcess.start(size=2) as coordinator:
        first, second = (
            connect(
                coordinator.address,
                m.Hello(m.PROTOCOL_VERSION, coordinator.token, "rank", rank),
                deadline=Deadline(PATIENCE),
            )[0]
            for rank in (0, 1)
        )
        first.close()
        while not any(type(decode_to_peer(payload)) is m.Abort for payload in second.receive()):
            select.select([second], [], [], 10)
        second.close()
    assert "rank 0" in journal.read_text()
    assert "is dead" in journal.read_text()
    assert capfd.readouterr().err == ""


def test_nobody_else_gets_in(tmp_path: Path) -> None:
    with CoordinatorProcess.start(directory=tmp_path) as coordinator:
        assert stat.S_IMODE(coordinator.directory.stat().st_mode) == 0o700
        assert len(coordinator.token) == 64
        assert coordinator.token not in Path(f"/proc/{coordinator.pid}/cmdline").read_text()
        assert coordinator.token not in Path(f"/proc/{coordinator.pid}/environ").read_text()


def test_it_knows_no_numpy_and_no_torch() -> None:
    code = (
        "import sys, hvdlab.collectives.coordinator.__main__; "
        "heavy = {'numpy', 'torch', 'asyncio', 'IPython', 'zmq', 'cryptography'} & set(sys.modules); "
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


@pytest.mark.parametrize("mode", ["plain", "fork"])
def test_it_ends_with_a_starter_that_is_killed(mode: str) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert starter.stdin is not None
    assert starter.stdout is not None
    pid, directory = starter.stdout.readline().split()
    watch = os.pidfd_open(int(pid))
    assert Path(directory).exists()
    starter.kill()
    starter.wait()
    assert ended(watch)
    os.close(watch)
    assert not Path(directory).exists()
    starter.stdin.close()
    starter.stdout.close()


def test_it_ends_in_order_when_terminated() -> None:
    coordinator = CoordinatorProcess.start()
    watch = os.pidfd_open(coordinator.pid)
    os.kill(coordinator.pid, signal.SIGINT)  # ignored: Ctrl-C is the starter's affair
    os.kill(coordinator.pid, signal.SIGTERM)
    assert ended(watch)
    os.close(watch)
    assert not coordinator.directory.exists()
    coordinator.close()


@pytest.mark.parametrize("keeps", [True, False])
def test_a_broken_state_leaves_the_directory_only_to_a_successor(
    keeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The starter has ended, so that another process starts the successor."""
    (tmp_path / "sitecustomize.py").write_text(BREAKING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with CoordinatorProcess.start(size=1, linger=True, keep=keeps) as coordinator:
        watch = os.pidfd_open(coordinator.pid)
        hello = m.Hello(m.PROTOCOL_VERSION, coordinator.token, "rank", 0)
        endpoint, _ = connect(coordinator.address, hello, deadline=Deadline(PATIENCE))
        lifeline = coordinator._process.stdin
        assert lifeline is not None
        lifeline.close()
        endpoint.send(m.Ping(1))
        assert ended(watch)
        assert coordinator.directory.exists() == keeps
        os.close(watch)
        endpoint.close()


def test_close_removes_what_a_killed_one_left() -> None:
    coordinator = CoordinatorProcess.start()
    os.kill(coordinator.pid, signal.SIGKILL)
    coordinator.close()
    assert not coordinator.directory.exists()


def test_a_stopped_one_is_killed_after_the_timeout() -> None:
    coordinator = CoordinatorProcess.start()
    os.kill(coordinator.pid, signal.SIGSTOP)
    coordinator.close(timeout=0.1)
    assert not coordinator.running


def test_a_path_too_long_for_a_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    with pytest.raises(StartError, match="too long"):
        CoordinatorProcess.start(directory=deep)


def test_an_address_of_another_machine(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="could not start"):
        CoordinatorProcess.start(tcp_host="192.0.2.1", directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_too_slow(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"within 0\.001 s"):
        CoordinatorProcess.start(timeout=0.001, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_ranks_of_other_hosts_come_over_tls(tmp_path: Path) -> None:
    with CoordinatorProcess.start(size=1, tcp_host="127.0.0.1", directory=tmp_path) as coordinator:
        assert coordinator.tls_address is not None
        assert [path.name for path in coordinator.directory.iterdir()] == [
            "coordinator"
        ]  # no key is left there
        hello = m.Hello(m.PROTOCOL_VERSION, coordinator.token, "rank", 0)
        endpoint, _ = connect(
            coordinator.tls_address, hello, certificate=coordinator.certificate, deadline=Deadline(PATIENCE)
        )
        endpoint.close()


def test_without_cryptography_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(StartError, match=r"pip install hvdlab\[tls\]"):
        new_certificate("127.0.0.1")
