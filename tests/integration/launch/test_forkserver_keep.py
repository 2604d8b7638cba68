"""A fork server that stays with its ranks when the pool's process ends, and the next one that takes it over."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from hvdlab.collectives.errors import StartError
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.forkserver.program import PROGRAM_NAME
from hvdlab.launch.forkserver import client
from hvdlab.launch.forkserver.client import ForkServer
from hvdlab.launch.forkserver.messages import Signal
from support.patience import GONE, PATIENCE, eventually
from support.ranks.fork_server import ForkedRanks, living, loaded


@pytest.fixture
def ranks() -> Iterator[ForkedRanks]:
    found = ForkedRanks()
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def door() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield f"{directory}/door"
        assert os.listdir(directory) == []


def take_over(ranks: ForkedRanks, door: str) -> ForkServer:
    """Let go of the fork server as if this process had ended, and come back."""
    ranks.warm.detach()
    ranks.warm = ForkServer.attach(door, PROGRAM_NAME, Deadline(PATIENCE))
    ranks.news.clear()
    return ranks.warm


def listen(ranks: ForkedRanks) -> None:
    ranks.warm.listen(lambda message: ranks._note(ranks.news, message), ranks._lost)


def test_a_successor_gets_the_children_and_what_it_missed(door: str, ranks: ForkedRanks) -> None:
    ranks.warm.keep(door, Deadline(PATIENCE))
    ranks.fork([0, 1])
    ranks.run(0, "x = 5")
    pids, pid = {number: child.pid for number, child in ranks.warm.children().items()}, ranks.warm.pid
    ranks.warm.detach()
    os.kill(pids[1], signal.SIGKILL)
    assert living({pids[1]}) == []
    take_over(ranks, door)
    listen(ranks)
    assert ranks.warm.pid == pid
    assert ranks.end_of(1).signal == signal.SIGKILL
    assert {number: child.pid for number, child in ranks.warm.children().items()} == {0: pids[0]}
    assert ranks.run(0, "x") == "5"
    loaded(ranks.warm)
    ranks.fork([1], expect=[0, 1])
    assert ranks.run(1, "2") == "2"


def test_a_successor_s_ranks_survive_the_fork_server_too_and_are_still_kept(
    door: str, ranks: ForkedRanks
) -> None:
    ranks.warm.keep(door, Deadline(PATIENCE))
    ranks.fork([0])
    ranks.run(0, "x = 5")
    take_over(ranks, door)
    listen(ranks)
    os.kill(ranks.warm.pid, signal.SIGKILL)
    ranks.wait(lambda: ranks.losses == ["killed by SIGKILL"])
    assert ranks.run(0, "x") == "5"
    loaded(ranks.warm)
    take_over(ranks, door)
    listen(ranks)
    assert ranks.run(0, "x") == "5"
    ranks.warm.send(Signal(0, signal.SIGTERM))
    ranks.end_of(0)


def test_only_one_has_it(door: str, ranks: ForkedRanks) -> None:
    ranks.warm.keep(door, Deadline(PATIENCE))
    ranks.fork([0])
    with pytest.raises(StartError, match=f"process {os.getpid()} has it"):
        ForkServer.attach(door, PROGRAM_NAME, Deadline(PATIENCE))
    assert ranks.run(0, "1") == "1"


def test_interrupted_attach_gives_the_fork_server_back(
    door: str, ranks: ForkedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.warm.keep(door, Deadline(PATIENCE))
    ranks.fork([0])
    ranks.run(0, "x = 5")
    ranks.warm.detach()

    def interrupt(condition: threading.Condition, predicate: object, timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as waiting:
        waiting.setattr(threading.Condition, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ForkServer.attach(door, PROGRAM_NAME, Deadline(PATIENCE))
    assert [thread for thread in threading.enumerate() if thread.name == "hvdlab-forkserver"] == []
    ranks.warm = ForkServer.attach(door, PROGRAM_NAME, Deadline(PATIENCE))
    ranks.news.clear()
    listen(ranks)
    assert ranks.run(0, "x") == "5"


def test_no_pool_waits_where_there_is_none(door: str) -> None:
    with pytest.raises(StartError, match="no pool waits"):
        ForkServer.attach(door, PROGRAM_NAME, Deadline(PATIENCE))


def test_a_place_where_none_can_wait_is_told(ranks: ForkedRanks) -> None:
    with pytest.raises(StartError, match="can't be kept at /proc/none: "):
        ranks.warm.keep("/proc/none", Deadline(PATIENCE))
    assert living({ranks.warm.pid}, timeout=0) == [ranks.warm.pid]


def stop(*pids: int) -> None:
    """Stop processes, and wait until all their threads stand still: until then, one can still have a rank leave."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        eventually(partial(_stands_still, pid))


def _stands_still(pid: int) -> bool:
    return {_state(task) for task in Path(f"/proc/{pid}/task").iterdir()} == {"T"}


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # it has ended since the listing
        return ""


OWNER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from support.ranks.fork_server import ForkedRanks
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.time_limits import Deadline
ranks = ForkedRanks()
if sys.argv[2]:
    ranks.warm.keep(sys.argv[2], Deadline(60))
ranks.fork([0, 1])
print(ranks.warm.pid, *(child.pid for child in ranks.warm.children().values()), flush=True)
input()
"""


def test_it_stays_when_the_owner_is_killed_and_ends_all_when_it_is_killed_itself(door: str) -> None:
    """The ranks' coordinator goes with its owner here, so they leave by themselves; the fork server stays."""
    tests = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, tests, door], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        warm, *others = (int(word) for word in process.stdout.readline().split())
        stop(others[0])
        process.kill()
    found = ForkServer.attach(door, PROGRAM_NAME, Deadline(PATIENCE))
    assert found.children()[0].pid == others[0]
    found.detach()
    os.kill(warm, signal.SIGKILL)
    assert living({warm, *others}) == []
    os.unlink(door)


def test_process_that_connects_just_before_the_owner_dies_keeps_its_connection(
    door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests, find, connected = str(Path(__file__).parents[2]), client.ServerHandle.find, threading.Event()

    def note(path: str, deadline: Deadline) -> client.ServerHandle:
        handle = find(path, deadline)
        connected.set()
        return handle

    monkeypatch.setattr(client.ServerHandle, "find", note)
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, tests, door], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        stop(*pids)  # the ranks, so that they do not leave without their coordinator
        with ThreadPoolExecutor() as threads:
            attaching = threads.submit(ForkServer.attach, door, PROGRAM_NAME, Deadline(PATIENCE))
            assert connected.wait(PATIENCE)
            # The fork server sees the connection and all signs of the owner's end in one round, in this order.
            process.kill()
            process.wait()
            os.kill(pids[0], signal.SIGCONT)
            try:
                found = attaching.result()
                assert {child.pid for child in found.children().values()} == set(pids[1:])
                found.close(grace=0.0)
            finally:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
    assert living(set(pids)) == []


KEEPS_NO_MORE = """
ranks = ForkedRanks()
ranks.fork([0])
ranks.warm.keep(sys.argv[2], Deadline(60))
ranks.warm.keep("", Deadline(60))
print(ranks.warm.pid, ranks.pid(0), flush=True)
input()
"""


def test_stopped_server_that_keeps_no_more_ends_with_its_owner(door: str) -> None:
    tests, script = str(Path(__file__).parents[2]), OWNER.partition("ranks = ")[0] + KEEPS_NO_MORE
    with subprocess.Popen(
        [sys.executable, "-c", script, tests, door], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pids = {int(word) for word in process.stdout.readline().split()}
        stop(*pids)  # the rank, so that it does not leave by itself
        process.kill()
    try:
        assert living(pids, GONE) == []
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_stranger_s_bytes_do_no_harm(door: str, ranks: ForkedRanks) -> None:
    ranks.warm.keep(door, Deadline(PATIENCE))
    loaded(ranks.warm)
    ranks.fork([0])  # without any it would end
    ranks.warm.detach()
    for garbage in GARBAGE:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(10)
            stranger.connect(door)
            stranger.sendall(garbage)
            stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):  # not all of it was read
                while stranger.recv(4096):
                    pass
    ranks.warm = ForkServer.attach(door, PROGRAM_NAME, Deadline(PATIENCE))


GARBAGE = (
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 100,
    b"\x04\0\0\0\x92\xa1\xff\x00",  # no UTF-8
    b"\x01\0\0\0\xc1",
)
