"""ipyparallel's controller dies: that is told, and another one takes its place."""

from __future__ import annotations

import os
import signal
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
from hvdlab.kernel_ext.pool import Pool

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
        assert sockets_of(pool) == before


def test_a_controller_that_could_not_be_forked_is_tried_again(start_pool: StartPool) -> None:
    pool = start_pool(1)
    warm = pool._base._base.warm
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


def test_it_comes_back_with_the_same_ranks_when_the_warm_process_has_died(start_pool: StartPool) -> None:
    pool = start_pool(2)
    news = News(pool)
    before = engines_of(pool)
    os.kill(pool._base._base.warm.pid, signal.SIGKILL)
    news.wait_until(lambda: pool._base.companion._deaths)
    assert engines_of(pool) == before
    assert news.lines == []  # the warm process's death was told


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
