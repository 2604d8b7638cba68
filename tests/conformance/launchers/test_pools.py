"""Pools of every launcher: ranks that are lost, interrupted, added and stopped."""

from __future__ import annotations

import pytest

from conformance.launchers.sites import Site
from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.launch.starter import Capability
from support.patience import PATIENCE, eventually

# Ray leaves files and sockets to the collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

SUM = """\
import numpy as np
import hvdlab.numpy as hvd
hvd.init()
float(hvd.allreduce(np.full(1, 1.0 + hvd.rank()), op=hvd.Sum)[0])
"""
PLACE = "import os; os.environ.get('LOCAL_RANK'), os.environ.get('LOCAL_WORLD_SIZE')"
CHILD = """\
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
child.pid
"""


def test_ranks_compute_together(pool: Pool) -> None:
    assert list(pool.run(SUM)) == [3.0, 3.0]


def test_lost_rank_comes_back_and_the_other_keeps_its_memory(site: Site, pool: Pool) -> None:
    places = list(pool.run(PLACE))
    pool.run("kept = 41")
    # The first one: its successor must not get the place of the second.
    dying = pool.start_run("import os; os.kill(os.getpid(), 9)", ranks=[0]).wait(PATIENCE)
    assert list(dying.deaths) == [0]
    capabilities = site.launcher().capabilities
    if Capability.REASONS in capabilities:
        assert "SIGKILL" in dying.deaths[0].reason
    if Capability.SINGLE_RANKS not in capabilities:
        with pytest.raises(InvalidRequestError, match="can't be started one by one, because"):
            pool.repair(timeout=PATIENCE)
        return
    assert pool.repair(timeout=PATIENCE) == (0,)
    assert list(pool.run("globals().get('kept')")) == [None, 41]
    assert list(pool.run(PLACE)) == places
    assert list(pool.run(SUM)) == [3.0, 3.0]


def test_interrupt_ends_the_cell_and_no_rank(pool: Pool) -> None:
    before = list(pool.run("import os; os.getpid()"))
    running = pool.start_run("import time; time.sleep(600)")
    running.interrupt()
    assert running.wait(PATIENCE).interrupted
    assert list(pool.run("os.getpid()")) == before


def test_pool_grows_as_far_as_there_is_room(site: Site, pool: Pool) -> None:
    pool.run("kept = 41")
    if Capability.RESIZE not in site.launcher().capabilities:
        with pytest.raises(InvalidRequestError, match="can't be added or taken away, because"):
            pool.resize(3, timeout=PATIENCE)
        assert list(pool.run("kept")) == [41, 41]
        return
    most = site.most or 3
    pool.resize(most, timeout=PATIENCE)
    assert list(pool.run("globals().get('kept')")) == [41, 41, *[None] * (most - 2)]
    if site.most is not None:
        with pytest.raises((InvalidRequestError, StartError), match=site.no_room):
            pool.resize(most + 1, timeout=PATIENCE)
        assert list(pool.run(SUM)) == [most * (most + 1) / 2] * most
    pool.resize(2, timeout=PATIENCE)
    assert list(pool.run("kept")) == [41, 41]
    # The ranks that left have given back their room.
    pool.resize(3, timeout=PATIENCE)
    assert list(pool.run("globals().get('kept')")) == [41, 41, None]


def test_stopped_pool_leaves_no_process_of_a_rank(pool: Pool) -> None:
    pids = list(pool.run("import os; os.getpid()"))
    children = list(pool.run(CHILD))
    pool.start_run("import time; time.sleep(600)")
    pool.stop()
    eventually(lambda: not any(map(_lives, [*pids, *children])), lambda: [*pids, *children])


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b") ")[2][:1] not in (b"Z", b"X")
    except OSError:
        return False
