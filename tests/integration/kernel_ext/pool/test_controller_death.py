"""ipyparallel's controller dies: a line reports it, cells go on, and the next use of the cluster starts another one."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest
import zmq

from hvdlab.collectives.errors import StartError
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.forkserver import controller
from hvdlab.kernel_ext.notebook.pool import Pool
from support.pool_probe import PoolProbe
from support.ranks.fork_server import allow_files

StartPool = Callable[..., Pool]

WITHIN = 60  # seconds until a wait fails


class News:
    """Lines of a pool's cluster: `ClusterOwner` in front of the pool's own.

    Attributes:
        kill: Whether each controller is killed as soon as ranks have been asked to register with it.
    """

    def __init__(self, pool: Pool) -> None:
        self.lines: list[str] = []
        self.kill = False
        self._changed = threading.Condition()
        self._companion = PoolProbe(pool).companion
        self._inner = self._companion._owner
        self._companion._owner = self

    def rank_pids(self) -> Mapping[int, int]:
        return self._inner.rank_pids()

    def set_controller(self, connection: str) -> None:
        self._inner.set_controller(connection)
        if connection and self.kill:
            cluster = self._companion._cluster
            assert cluster is not None
            os.kill(cluster.controller.pid, signal.SIGKILL)

    def controller_lost(self, line: str) -> None:
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


def engines_of(pool: Pool) -> list[int]:
    """Return process ids of the pool's engines, as ipyparallel has them."""
    client = pool.cluster.connect_client_sync()
    try:
        client.wait_for_engines(pool.size, timeout=WITHIN)
        return list(client[:].apply_sync(os.getpid))
    finally:
        client.close()
        zmq.Context.instance().destroy(linger=0)


def ports_of(pool: Pool) -> dict[str, int]:
    """Return where the controller listens for clients."""
    path = next(path for path in PoolProbe(pool).companion._guarded if path.endswith("-client.json"))
    return {name: port for name, port in json.loads(Path(path).read_text()).items() if isinstance(port, int)}


def check_where_it_listens(pool: Pool) -> None:
    """Only for this host, and where no program gets a port without naming it."""
    given_away = controller.outgoing() if controller.candidates(controller.outgoing()) else range(0)
    connections = psutil.Process(pool.cluster.controller.pid).net_connections("tcp")
    listening = {c.laddr for c in connections if c.status == psutil.CONN_LISTEN}
    assert len(listening) > 10
    assert [address for address in listening if address.port in given_away] == []
    assert {address.ip for address in listening} == {"127.0.0.1"}


ENDED = (
    "ipyparallel's controller ended {}; cells are not affected, the next use of `pool.cluster` starts another "
    "controller, and clients of ipyparallel have to be made again"
)


def test_cells_go_on_without_the_controller_and_the_next_use_starts_another(start_pool: StartPool) -> None:
    pool = start_pool(2)
    news = News(pool)
    pool.run("x = object(); before = id(x)")
    pids = engines_of(pool)
    earlier: set[int] = set()
    for death in (1, 2):
        earlier |= set(ports_of(pool).values())
        check_where_it_listens(pool)
        controller_of(pool).kill()
        news.wait_for(death)
        assert set(PoolProbe(pool).fork_server.children()) == {0, 1}  # none is started until it is used
        assert list(pool.run("import os; (os.getpid(), id(x) == before)")) == [(pid, True) for pid in pids]
        assert engines_of(pool) == pids
        assert not earlier & set(ports_of(pool).values())
        client = pool.cluster.connect_client_sync()
        client.wait_for_engines(2, timeout=WITHIN)
        # Not block=True: that also waits for the output, for ever if this new client's subscription comes after it.
        client[:].execute("y = 1; print(before)").get(timeout=WITHIN)
        assert client[:].apply_sync(eval, "id(x) == before and y == 1") == [True, True]
        client.close()
        zmq.Context.instance().destroy(linger=0)
    assert list(pool.run("id(x) == before")) == [True, True]
    assert news.lines == [ENDED.format("(killed by SIGKILL)")] * 2


def test_it_ends_with_the_fork_server_and_the_next_one_gets_the_same_ranks(start_pool: StartPool) -> None:
    pool = start_pool(2)
    news = News(pool)
    pool.run("x = 41")
    before = engines_of(pool)
    os.kill(PoolProbe(pool).fork_server.pid, signal.SIGKILL)
    news.wait_for(1)
    assert list(pool.run("x")) == [41, 41]
    assert engines_of(pool) == before
    assert news.lines == [ENDED.format("with the process that ranks are forked from")]


def test_it_may_die_while_ranks_join_and_while_they_are_busy(start_pool: StartPool, tmp_path: Path) -> None:
    pool = start_pool(2)
    news = News(pool)
    companion, joining = PoolProbe(pool).companion, PoolProbe(pool).joining
    pool.run("x = object(); before = id(x)")
    pids = engines_of(pool)
    controller_of(pool).kill()
    news.wait_for(1)
    news.kill = True
    for death in (2, 3):
        companion.wait_up(Deadline(WITHIN))
        news.wait_for(death)
    news.kill = False
    gate = tmp_path / "gate"
    run = pool.start_run(
        f"import os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)\nid(x) == before"
    )
    _ = pool.cluster
    assert joining.joined == set()
    gate.touch()
    assert list(run.wait(WITHIN)) == [True, True]
    assert engines_of(pool) == pids
    assert len(news.lines) == 3


def sockets_of(pool: Pool) -> list[int]:
    """Return how many sockets each rank has."""
    count: list[int] = []
    for _, pid in sorted(PoolProbe(pool).group.pids().items()):
        links = [Path(f"/proc/{pid}/fd", name) for name in os.listdir(f"/proc/{pid}/fd")]
        targets = [os.readlink(link) for link in links if link.is_symlink()]
        count.append(sum(target.startswith("socket:") for target in targets))
    return count


def test_a_rank_has_joined_once_all_its_connections_are_up(start_pool: StartPool) -> None:
    pool = start_pool(2)
    news = News(pool)
    joining = PoolProbe(pool).joining
    PoolProbe(pool).companion.wait_up(Deadline(WITHIN))
    news.wait_until(lambda: joining.joined == {0, 1})
    before = sockets_of(pool)
    for death in (1, 2):
        controller_of(pool).kill()
        news.wait_for(death)
        assert joining.joined == set()
        PoolProbe(pool).companion.wait_up(Deadline(WITHIN))
        news.wait_until(lambda: joining.joined == {0, 1})
        news.wait_until(lambda: sockets_of(pool) == before)  # ZeroMQ closes unused sockets in its own time


def test_a_controller_that_could_not_be_forked_is_tried_again(start_pool: StartPool) -> None:
    pool = start_pool(1)
    warm = PoolProbe(pool).fork_server
    allow_files(warm.pid, 0)
    with pytest.raises(StartError, match="too many files are open"):
        _ = pool.cluster
    allow_files(warm.pid, 1000)
    assert pool.cluster.controller.running


def test_a_kept_pool_that_is_attached_to_has_the_same_engines(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        pool = start_pool(2, keep="mine")
        pool.run("x = 41")
        before = engines_of(pool)
        first = controller_of(pool)
        pool.detach()
        pool = Pool.attach("mine")
        try:
            assert engines_of(pool) == before
            assert controller_of(pool) != first
            assert list(pool.run("x")) == [41, 41]
        finally:
            pool.stop()
