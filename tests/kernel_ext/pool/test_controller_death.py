"""ipyparallel's controller dies: that is told, and another one takes its place."""

from __future__ import annotations

import threading
from collections.abc import Callable

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


def test_a_controller_that_could_not_be_forked_is_tried_again(start_pool: StartPool) -> None:
    pool = start_pool(1)
    warm = pool._base._base.warm
    allow_files(warm.pid, 0)
    with pytest.raises(StartError, match="too many files are open"):
        _ = pool.cluster
    allow_files(warm.pid, 1000)
    assert pool.cluster.controller.running
