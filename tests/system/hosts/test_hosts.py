"""The hosts themselves behave as the other tests assume, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.network.namespaces import Host, HostFailed, Network
from support.patience import PATIENCE

_SERVER = """
import socket
server = socket.create_server(("0.0.0.0", 7000))
print("up", flush=True)
while True:
    peer, _ = server.accept()
    peer.close()
"""
_CLIENT = "import socket, sys; socket.create_connection((sys.argv[1], 7000), 1).close()"
_OWNER = """
import sys, time
from support.network.namespaces import Network
network = Network(2)
network.hosts[0].popen(["sleep", "1000"])
print(*(host.pid for host in network.hosts), flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def server(network: Network) -> Iterator[Host]:
    """Yield the second host, where a server answers at port 7000."""
    host = network.hosts[1]
    with host.popen([sys.executable, "-c", _SERVER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield host
        process.kill()


def key(host: Host) -> str:
    code = "from hvdlab.collectives.system import host_key; print(host_key())"
    return host.run(sys.executable, "-c", code).strip()


def reaches(network: Network, host: Host) -> bool:
    try:
        network.hosts[0].run(sys.executable, "-c", _CLIENT, host.name)
    except HostFailed:
        return False
    return True


def test_hosts_are_told_apart(network: Network) -> None:
    one, other = (key(host) for host in network.hosts)
    assert (one.split("#")[0], other.split("#")[0]) == ("host0", "host1")
    assert one.split("#")[1] != other.split("#")[1]
    assert one == key(network.hosts[0])


def test_a_cable_is_cut_and_mended(network: Network, server: Host) -> None:
    assert reaches(network, server)
    server.cut()
    assert not reaches(network, server)
    server.mend()
    deadline = time.monotonic() + PATIENCE
    while not reaches(network, server):
        assert time.monotonic() < deadline


def test_a_process_there_takes_signals_and_tells_how_it_ended(network: Network) -> None:
    with network.hosts[0].popen(["sh", "-c", "echo up; exec sleep 1000"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == -signal.SIGTERM


def test_a_host_that_fails_has_no_processes_and_can_be_used_again() -> None:
    with Network(2) as network:
        one, other = network.hosts
        command = ["sh", "-c", "echo up; sleep 1000; true"]  # a process with a child
        with other.popen(command, stdout=subprocess.PIPE) as stays:
            with one.popen(command, stdout=subprocess.PIPE) as process:
                for started in (process, stays):
                    assert started.stdout is not None
                    assert started.stdout.readline() == b"up\n"
                one.fail()
                assert process.wait(PATIENCE) == -signal.SIGKILL
            assert one.run("echo", "again") == "again\n"
            assert stays.poll() is None
            stays.kill()


def test_closing_ends_all_processes() -> None:
    with Network(1) as network:
        command = ["sh", "-c", "echo up; exec sleep 1000"]
        process = network.hosts[0].popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        pid = network.hosts[0].pid
    with process:
        assert process.wait(PATIENCE) == -signal.SIGKILL
    assert not Path(f"/proc/{pid}").exists()


def test_nothing_outlives_an_owner_that_is_killed(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", _OWNER], env=env, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        pids = owner.stdout.readline().split()
        assert len(pids) == 2
        owner.kill()
    deadline = time.monotonic() + PATIENCE
    while any(Path(f"/proc/{int(pid)}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)
