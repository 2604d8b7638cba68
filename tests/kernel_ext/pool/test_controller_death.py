"""ipyparallel's controller dies: that is told, and another one takes its place."""

from __future__ import annotations

import json
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import zmq

from forked_ranks import allow_files
from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.errors import StartError
from hvdlab.kernel_ext.launchers import attempts, ports
from hvdlab.kernel_ext.notebook.pool import Pool

StartPool = Callable[..., Pool]

WITHIN = 60


class News:
    """What a pool's companion tells."""

    def __init__(self, pool: Pool) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._pool = pool
        pool._base.companion._lost = self._take

    def _take(self, line: str) -> None:
        with self._changed:
            self.lines.append(line)
            self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.lines) >= count, WITHIN)

    def wait_until(self, condition: Callable[[], object]) -> None:
        deadline = Deadline(WITHIN)
        while not condition():
            assert deadline.remaining() != 0
            with self._changed:
                self._changed.wait(0.02)


def controller_of(pool: Pool) -> psutil.Process:
    return psutil.Process(pool.cluster.controller.pid)


def test_a_controller_that_dies_is_replaced_and_clients_find_the_engines_again(start_pool: StartPool) -> None:
    pool = start_pool(2)
    news = News(pool)
    pool.run("x = 41")
    client = pool.cluster.connect_client_sync()
    client.wait_for_engines(2, timeout=WITHIN)
    first = controller_of(pool)
    for deaths in (1, 2):
        controller_of(pool).kill()
        news.wait_for(deaths)
        pool._base.companion.wait_up(Deadline(WITHIN))
        after = pool.cluster.connect_client_sync()
        after.wait_for_engines(2, timeout=WITHIN)
        assert after[:].pull("x", block=True) == [41, 41]
        after.close()
    assert news.lines[0] == (
        "ipyparallel's controller ended: killed by SIGKILL; another one is being started"
    )
    assert len(news.lines) == 2
    assert pool.run("x").errors == {}
    assert client[:].pull("x", block=True) == [41, 41]
    client.close()
    assert not first.is_running()
    zmq.Context.instance().destroy(linger=0)


def sockets_of(pool: Pool) -> list[int]:
    """How many sockets each rank has."""
    count: list[int] = []
    for _, pid in sorted(pool._base.group.pids().items()):
        links = [Path(f"/proc/{pid}/fd", name) for name in os.listdir(f"/proc/{pid}/fd")]
        targets = [os.readlink(link) for link in links if link.is_symlink()]
        count.append(sum(target.startswith("socket:") for target in targets))
    return count


def test_a_rank_has_joined_once_all_its_connections_are_up(start_pool: StartPool) -> None:
    pool = start_pool(2)
    news = News(pool)
    joining = pool._base.joining
    pool._base.companion.wait_up(Deadline(WITHIN))
    news.wait_until(lambda: joining.joined == {0, 1})
    before = sockets_of(pool)
    for death in (1, 2):
        controller_of(pool).kill()
        news.wait_for(death)  # from then on none has joined
        news.wait_until(lambda: joining.joined == {0, 1})
        news.wait_until(
            lambda: sockets_of(pool) == before
        )  # ZeroMQ closes what is not used any more in its own time


def test_a_controller_that_could_not_be_forked_is_tried_again(start_pool: StartPool) -> None:
    pool = start_pool(1)
    warm = pool._base._base.fork_server
    allow_files(warm.pid, 0)
    with pytest.raises(StartError, match="too many files are open"):
        _ = pool.cluster
    allow_files(warm.pid, 1000)
    assert pool.cluster.controller.running


def engines_of(pool: Pool) -> list[int]:
    """Process ids of the pool's engines, as ipyparallel has them."""
    client = pool.cluster.connect_client_sync()
    try:
        client.wait_for_engines(pool.size, timeout=WITHIN)
        return list(client[:].apply_sync(os.getpid))
    finally:
        client.close()
        zmq.Context.instance().destroy(linger=0)


def test_it_comes_back_with_the_same_ranks_when_the_fork_server_has_died(start_pool: StartPool) -> None:
    pool = start_pool(2)
    news = News(pool)
    before = engines_of(pool)
    os.kill(pool._base._base.fork_server.pid, signal.SIGKILL)
    news.wait_until(lambda: pool._base.companion._deaths)
    assert engines_of(pool) == before
    assert news.lines == []  # the fork server's death was told


# -- ports ------------------------------------------------------------------------------------------------------------


def ports_of(pool: Pool) -> dict[str, int]:
    """Where the controller listens for clients."""
    path = next(path for path in pool._base.companion._guarded if path.endswith("-client.json"))
    return {name: port for name, port in json.loads(Path(path).read_text()).items() if isinstance(port, int)}


def kill_and_take(process: psutil.Process, port: int) -> socket.socket:
    """Kill a process, and take one of its ports before anybody else does."""
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    process.kill()
    deadline = Deadline(WITHIN)
    while True:
        try:
            taken.bind(("127.0.0.1", port))
        except OSError:
            assert deadline.remaining() != 0
            continue
        taken.listen()
        return taken


def check_where_it_listens(pool: Pool) -> None:
    """Only for this host, and where nobody gets a port without naming it."""
    given_away = ports.outgoing() if ports.candidates(ports.outgoing()) else range(0)
    connections = psutil.Process(pool.cluster.controller.pid).net_connections("tcp")
    listening = {c.laddr for c in connections if c.status == psutil.CONN_LISTEN}
    assert len(listening) > 10
    assert [address for address in listening if address.port in given_away] == []
    assert {address.ip for address in listening} == {"127.0.0.1"}


def brief_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "SAME_PORTS", (0.1, 0.1))


def test_a_port_that_another_program_has_for_a_while_is_waited_for(start_pool: StartPool) -> None:
    pool = start_pool(2)
    news = News(pool)
    pool.run("x = object(); before = id(x)")
    client = pool.cluster.connect_client_sync()
    client.wait_for_engines(2, timeout=WITHIN)
    first = pool.cluster.controller
    known = ports_of(pool)
    check_where_it_listens(pool)
    with kill_and_take(psutil.Process(first.pid), known["mux"]):  # taken in a thread of its own
        news.wait_for(1)
        controller = pool._base.companion._cluster
        assert controller is not None
        news.wait_until(
            lambda: controller.controller not in (None, first) and controller.controller.ports_taken
        )
    news.wait_until(lambda: pool._base.joining.joined == {0, 1})
    assert client[:].apply_sync(eval, "id(x) == before") == [True, True]
    assert ports_of(pool) == known
    check_where_it_listens(pool)
    assert len(news.lines) == 1
    client.close()
    zmq.Context.instance().destroy(linger=0)


def test_ranks_follow_to_other_ports_and_keep_what_they_have(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief_attempts(monkeypatch)
    pool = start_pool(2)
    news = News(pool)
    joining = pool._base.joining
    pool.run("x = object(); before = id(x)")
    pids = engines_of(pool)
    sockets = sockets_of(pool)
    known = ports_of(pool)
    with kill_and_take(controller_of(pool), known["mux"]):
        news.wait_for(2)
        assert "make new ones with `pool.cluster.connect_client_sync()`" in news.lines[1]
        news.wait_until(lambda: joining.joined == {0, 1})
        moved = ports_of(pool)
        client = pool.cluster.connect_client_sync()
        client.wait_for_engines(2, timeout=WITHIN)
        assert client[:].apply_async(eval, "id(x) == before").get(WITHIN) == [True, True]
        client.close()
        assert not set(moved.values()) & set(known.values())
        assert engines_of(pool) == pids
        news.wait_until(lambda: sockets_of(pool) == sockets)
        controller_of(pool).kill()  # the next one goes where this one was
        news.wait_for(3)
        client = pool.cluster.connect_client_sync()
        client.wait_for_engines(2, timeout=WITHIN)
        assert ports_of(pool) == moved
    client[:].execute("y = 1; print(before)", block=True)
    assert client[:].apply_sync(eval, "id(x) == before and y == 1") == [True, True]
    client.close()
    assert list(pool.run("id(x) == before")) == [True, True]
    assert len(news.lines) == 3
    zmq.Context.instance().destroy(linger=0)


def test_it_is_said_when_none_can_be_started_and_the_next_use_tries_again(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief_attempts(monkeypatch)
    pool = start_pool(1)
    news = News(pool)
    pool.run("x = 41")
    client = pool.cluster.connect_client_sync()
    client.wait_for_engines(1, timeout=WITHIN)
    warm = pool._base._base.fork_server
    allow_files(warm.pid, 0)
    controller_of(pool).kill()
    news.wait_for(2)
    assert news.lines[1].startswith("ipyparallel's controller could not be started again: ")
    assert "too many files are open" in news.lines[1]
    assert news.lines[1].endswith("cells are not affected")
    assert pool.run("x += 1").ok
    with pytest.raises(StartError, match="too many files are open"):
        _ = pool.cluster
    assert len(news.lines) == 2  # it is not said again and again
    allow_files(warm.pid, 1000)
    _ = pool.cluster
    news.wait_until(lambda: pool._base.joining.joined == {0})
    assert client[0].pull("x", block=True) == 42
    assert news.lines[2:] == ["ipyparallel's controller is up again"]
    client.close()
    zmq.Context.instance().destroy(linger=0)


# -- when it dies -----------------------------------------------------------------------------------------------------


def test_it_may_die_again_and_again_while_ranks_join_and_while_they_are_busy(
    start_pool: StartPool, tmp_path: Path
) -> None:
    pool = start_pool(2)
    news = News(pool)
    companion, joining = pool._base.companion, pool._base.joining
    pool.run("x = object(); before = id(x)")
    client = pool.cluster.connect_client_sync()
    client.wait_for_engines(2, timeout=WITHIN)
    told = companion._connected
    killed: list[int] = []

    def connected(connection: str) -> None:
        """Kill the first two as soon as ranks have been asked to join them."""
        told(connection)
        if connection and len(killed) < 3:
            cluster = companion._cluster
            assert cluster is not None
            killed.append(cluster.controller.pid)
            os.kill(killed[-1], signal.SIGKILL)

    companion._connected = connected
    killed.append(controller_of(pool).pid)
    os.kill(killed[0], signal.SIGKILL)
    news.wait_until(lambda: len(killed) == 3)
    news.wait_for(3)
    gate = tmp_path / "gate"
    run = pool.start_run(
        f"import os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\nid(x) == before"
    )
    for death in (4, 5):
        controller_of(pool).kill()  # which starts one, however often they have died
        news.wait_for(death)
    assert "or when the cluster is used" in news.lines[4]
    _ = pool.cluster
    assert joining.joined == set()
    gate.touch()
    assert list(run.wait(WITHIN)) == [True, True]
    news.wait_until(lambda: joining.joined == {0, 1})
    assert client[:].apply_sync(eval, "id(x) == before") == [True, True]
    assert len(news.lines) == 5
    client.close()
    zmq.Context.instance().destroy(linger=0)


def test_who_takes_a_kept_pool_over_takes_its_engines_over(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        pool = start_pool(2, keep="mine")
        before = engines_of(pool)
        first = controller_of(pool)
        pool.detach()
        pool = Pool.attach("mine")
        try:
            assert engines_of(pool) == before
            assert controller_of(pool) != first
        finally:
            pool.stop()


def test_engines_of_a_kept_pool_follow_to_other_ports(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    brief_attempts(monkeypatch)
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        pool = start_pool(2, keep="mine")
        pool.run("x = 41")
        before = engines_of(pool)
        first, known = controller_of(pool), ports_of(pool)
        pool.detach()
        with kill_and_take(first, known["iopub"]):
            pool = Pool.attach("mine")
            try:
                news = News(pool)
                assert engines_of(pool) == before
                assert "listens on other ports now" in news.lines[0]
                assert ports_of(pool)["iopub"] != known["iopub"]
                assert list(pool.run("x")) == [41, 41]
            finally:
                pool.stop()
