"""The fork server dies: ranks keep their memory, and a successor looks after them."""

from __future__ import annotations

import errno
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any, cast

import psutil
import pytest

from hvdlab.collectives.errors import StartError
from hvdlab.kernel_ext.forkserver.program import PROGRAM_NAME
from hvdlab.launch.forkserver import client
from hvdlab.launch.forkserver.children import SupervisedChild
from hvdlab.launch.forkserver.death_pipe import DeathPipe
from hvdlab.launch.forkserver.messages import Fork, Forked, ForkFailed, FromServer, Guard, Signal, encode
from hvdlab.launch.processes import describe, detail, readable, start_time
from support.patience import PATIENCE
from support.ranks.fork_server import ForkedRanks, living, loaded


@pytest.fixture
def ranks() -> Iterator[ForkedRanks]:
    found = ForkedRanks()
    try:
        yield found
    finally:
        found.close()


def kill_server(ranks: ForkedRanks) -> None:
    before, pid = len(ranks.losses), ranks.warm.pid
    os.kill(pid, signal.SIGKILL)
    ranks.wait(lambda: len(ranks.losses) > before)
    assert ranks.warm.pid != pid


def test_ranks_keep_their_memory_and_new_ones_join_them(ranks: ForkedRanks) -> None:
    ranks.fork([0, 1])
    pids = [ranks.pid(0), ranks.pid(1)]
    ranks.run(0, "x = 41; import sys; print('to the log', file=sys.__stderr__)")
    for _ in range(2):
        kill_server(ranks)
    assert ranks.losses == ["killed by SIGKILL"] * 2
    assert [ranks.pid(0), ranks.pid(1)] == pids
    assert ranks.run(0, "x + 1") == "42"
    ranks.fork([2], expect=[0, 1, 2])
    assert ranks.run(2, "1 + 1") == "2"
    assert ranks.run(0, "x") == "41"


def test_the_end_of_an_adopted_rank_is_told_with_its_last_words(ranks: ForkedRanks) -> None:
    ranks.fork([0, 1, 2])
    helper = int(ranks.run(0, "import subprocess; subprocess.Popen(['sleep', '60']).pid"))
    kill_server(ranks)
    loaded(ranks.warm)
    ranks.warm.send(Signal(0, signal.SIGKILL))
    assert describe(ranks.end_of(0)) in ("killed by SIGKILL", "exit status unknown")
    assert living({helper}) == []
    ranks.start(1, "import os; os.write(2, b'words'); os.abort()")
    crash = ranks.end_of(1)
    assert (crash.code, crash.signal) in ((-1, signal.SIGABRT), (-1, 0))
    assert "Fatal Python error: Aborted" in crash.tail
    ranks.start(2, "import os; os._exit(3)")
    assert describe(ranks.end_of(2)) in ("exit code 3", "exit status unknown")
    assert ranks.warm.children() == {}


def test_how_much_memory_an_adopted_rank_had_is_told(ranks: ForkedRanks) -> None:
    ranks.fork([0, 1])
    ranks.run(0, "x = b'x' * (80 << 20); del x")
    kill_server(ranks)
    for rank in (0, 1):
        os.kill(ranks.pid(rank), signal.SIGKILL)
    ends = [ranks.end_of(rank) for rank in (0, 1)]
    assert ends[0].max_rss - ends[1].max_rss > 70 << 20
    assert detail(ends[0]).startswith("peak memory at least ")
    assert ends[1].max_rss > 0


def test_a_sample_sees_the_memory_that_a_process_has_had_since() -> None:
    grow = "input(); x = b'x' * (80 << 20); print(); input()"
    with subprocess.Popen(
        [sys.executable, "-c", grow], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        child = SupervisedChild.adopt(Forked(0, process.pid, start_time(process.pid)))
        assert child is not None
        before = child.peak
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        child.sample_memory()
        assert child.peak - before > 70 << 20
        process.kill()
        readable(child.pidfd, 60)
        child.sample_memory()
        assert child.peak - before > 70 << 20
        child.close()


def test_a_rank_that_dies_together_with_the_fork_server_is_told(ranks: ForkedRanks) -> None:
    ranks.fork([0, 1])
    ranks.run(1, "x = 7")
    gone = ranks.pid(0)
    os.kill(ranks.warm.pid, signal.SIGSTOP)
    os.kill(gone, signal.SIGKILL)
    kill_server(ranks)
    assert ranks.end_of(0).pid == gone
    assert ranks.run(1, "x") == "7"


def test_what_was_asked_of_the_dead_one_is_done_by_its_successor(ranks: ForkedRanks) -> None:
    ranks.fork([0])
    os.kill(ranks.warm.pid, signal.SIGSTOP)
    ranks.warm.send(Signal(0, signal.SIGKILL))
    ranks.warm.send(Fork.of(7, os.environ, os.getcwd(), ()))  # ends at once: it finds nothing to import
    kill_server(ranks)
    ranks.end_of(0)
    assert ranks.end_of(7).code == 1


def test_a_rank_that_is_stopped_or_stuck_in_c_code_is_adopted_and_can_be_ended(ranks: ForkedRanks) -> None:
    ranks.fork([0, 1])
    ranks.start(0, STUCK)
    os.kill(ranks.pid(1), signal.SIGSTOP)
    kill_server(ranks)
    for rank in (0, 1):
        ranks.warm.send(Signal(rank, signal.SIGKILL))
        ranks.end_of(rank)


def test_without_a_successor_the_ranks_end_with_the_pool(ranks: ForkedRanks) -> None:
    ranks.rebuild = False
    ranks.fork([0, 1])
    ranks.start(0, STUCK)
    pid = ranks.warm.pid
    os.kill(pid, signal.SIGKILL)
    ranks.wait(lambda: bool(ranks.losses))
    assert ranks.run(1, "5") == "5"
    ranks.warm.close(grace=0.1)
    with pytest.raises(StartError, match="closed"):
        ranks.warm.respawn()


def test_successors_that_do_not_come_up_are_not_started_for_ever(
    ranks: ForkedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.fork([0])
    ranks.run(0, "x = 5")
    ranks.rebuild = False
    monkeypatch.setattr(client, "PAUSE", 0.001)
    monkeypatch.setattr("sys.executable", "/bin/false")
    os.kill(ranks.warm.pid, signal.SIGKILL)
    for losses in range(1, client.TRIES + 1):
        ranks.wait(lambda losses=losses: len(ranks.losses) == losses)  # type: ignore[misc]  # a default argument
        ranks.warm.respawn()
    ranks.wait(lambda: len(ranks.losses) == client.TRIES + 1)
    with pytest.raises(StartError, match="of no use, the last one: exit code 1"):
        ranks.warm.respawn()
    with pytest.raises(StartError, match="gone"):
        ranks.warm.send(Signal(0, signal.SIGTERM))
    assert ranks.run(0, "x") == "5"


STUCK = "import ctypes; ctypes.PyDLL(None).sleep(60)"
"""Holds the interpreter's lock."""


def test_a_successor_that_can_not_be_started_is_tried_again(
    ranks: ForkedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a host where no more processes are allowed for a moment."""
    ranks.fork([0])
    ranks.run(0, "x = 5")
    popen, refusals = subprocess.Popen, iter(range(4))

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if next(refusals, None) is not None:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return popen(*args, **kwargs)

    monkeypatch.setattr(client, "PAUSE", 0.001)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    kill_server(ranks)
    loaded(ranks.warm)
    assert ranks.run(0, "x") == "5"


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception) -> None:
    """Have the next call of this function raise the error, and the later ones work."""
    original, errors = getattr(owner, name), [error]

    def call(*args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop()
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


NO_DESCRIPTOR = OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        pytest.param(socket, "socketpair", NO_DESCRIPTOR, id="connection"),
        pytest.param(tempfile, "TemporaryFile", NO_DESCRIPTOR, id="log"),
        pytest.param(DeathPipe, "with_reader", NO_DESCRIPTOR, id="pulse"),
        pytest.param(os, "pidfd_open", NO_DESCRIPTOR, id="process"),
        pytest.param(selectors, "DefaultSelector", NO_DESCRIPTOR, id="selector"),
        pytest.param(threading.Thread, "start", RuntimeError("can't start new thread"), id="thread"),
    ],
)
def test_successor_without_descriptor_or_thread_is_tried_again(
    owner: Any, name: str, error: Exception, ranks: ForkedRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.fork([0])
    ranks.run(0, "x = 5")
    ranks.rebuild = False
    os.kill(ranks.warm.pid, signal.SIGKILL)
    ranks.wait(lambda: bool(ranks.losses))
    with monkeypatch.context() as patch:
        fail_once(patch, owner, name, error)
        ranks.warm.respawn()
    ranks.rebuild = True
    loaded(ranks.warm)
    ranks.fork([1], expect=[0, 1])
    assert ranks.run(0, "x") == "5"


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        pytest.param(selectors, "DefaultSelector", NO_DESCRIPTOR, id="selector"),
        pytest.param(threading.Thread, "start", RuntimeError("can't start new thread"), id="thread"),
    ],
)
def test_fork_server_whose_messages_cannot_be_read_ends(
    owner: Any, name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[client.ServerHandle] = []
    start = client.ServerHandle.start

    def note(*args: Any) -> client.ServerHandle:
        started.append(start(*args))
        fail_once(monkeypatch, owner, name, error)
        return started[0]

    monkeypatch.setattr(client.ServerHandle, "start", note)
    with pytest.raises(type(error), match=str(error.args[-1])):
        client.ForkServer.start(PROGRAM_NAME, {**os.environ, "HVDLAB_PRELOAD": ""})
    assert not psutil.pid_exists(started[0].pid)


def test_messages_that_come_while_early_ones_are_delivered_come_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client.ForkServer, "_begin", lambda self, handle: None)
    server = client.ForkServer(cast(Any, None), None, {}, "program")
    early, late = (ForkFailed(0, "early"), ForkFailed(1, "early")), ForkFailed(2, "late")
    heard: list[FromServer] = []

    def listener(message: FromServer) -> None:
        heard.append(message)
        if message is early[0]:
            reader = threading.Thread(target=server._take, args=(late, cast(Any, None)))
            reader.start()
            reader.join()

    for message in early:
        server._take(message, cast(Any, None))
    server.listen(listener, lambda reason: None)
    os.close(server._wakeup)
    os.close(server._wakeup_write)
    assert heard == [*early, late]


class EndpointFirst(selectors.DefaultSelector):
    """Selector that reports sockets before pipes, which are registered by their numbers."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return sorted(super().select(timeout), key=lambda found: isinstance(found[0].fileobj, int))


def test_callback_that_closes_leaves_the_other_events_of_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selectors, "DefaultSelector", EndpointFirst)
    failures: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    readers: list[threading.Thread] = []
    closed = threading.Event()
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(["true"])  # a fork server that ends at once, so that close() does not wait
        handle = client.ServerHandle(ours, process.pid, None, process)
        server = client.ForkServer(handle, None, {}, "program")

        def listener(message: FromServer) -> None:
            if message == ForkFailed(1, "last"):
                server.close()
                closed.set()
                return
            readers.append(threading.current_thread())
            # More than the socket takes, so that the thread is woken; and the next round has another message, too.
            server.send(Guard(("x" * (1 << 24),)))
            theirs.sendall(encode(ForkFailed(1, "last")))

        server.listen(listener, lambda reason: None)
        theirs.sendall(encode(ForkFailed(0, "first")))
        assert closed.wait(PATIENCE)
        readers[0].join(PATIENCE)
    assert failures == []
