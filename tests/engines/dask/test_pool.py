"""Pools whose ranks run on Dask's workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.launch.dask import DaskLauncher
from support.patience import PATIENCE, eventually

SUM = """\
import os
import numpy as np
import hvdlab.numpy as hvd
hvd.init()
(float(hvd.allreduce(np.full(1, 1.0 + hvd.rank()), op=hvd.Sum)[0]), hvd.local_rank(), hvd.local_size())
"""


@pytest.fixture
def pool(cluster: Any) -> Iterator[Pool]:
    """Yield three ranks on two workers, with room for one more."""
    pool = Pool.start(3, launcher="dask", launcher_options={"timeout": "2"}, timeout=PATIENCE)
    yield pool
    pool.stop()


def test_ranks_of_two_workers_share_the_memory_of_their_machine(pool: Pool) -> None:
    assert list(pool.run(SUM)) == [(6.0, 0, 3), (6.0, 1, 3), (6.0, 2, 3)]
    assert {status.plane for status in pool.status()} == {"shm"}
    # A fork server on each worker has imported their common modules.
    parents = list(pool.run("os.getppid()"))
    assert parents[0] == parents[1] != parents[2]


def test_a_lost_worker_takes_its_own_ranks_alone(cluster: Any, pool: Pool) -> None:
    pool.run("kept = 41")
    worker = pool.run("import psutil; [p.pid for p in psutil.Process().parents()]").value(2)
    pids = cluster.get_client().run(os.getpid)
    (lost,) = set(worker) & set(pids.values())
    os.kill(lost, signal.SIGKILL)
    eventually(lambda: 2 in pool.lost)
    assert "Dask worker worker-" in pool.lost[2]
    assert list(pool.run("kept", ranks=[0, 1])) == [41, 41]
    # Dask restarts the worker.
    eventually(lambda: len(cluster.get_client().scheduler_info(n_workers=-1)["workers"]) == 2)
    assert pool.repair(timeout=PATIENCE) == (2,)
    assert list(pool.run("globals().get('kept')")) == [41, 41, None]


def test_what_can_not_be_is_said_at_once(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import distributed

    with pytest.raises(InvalidRequestError, match="name no hosts"):
        Pool.start(2, launcher="dask", hosts="a:2")
    with pytest.raises(StartError, match="/nowhere/python"):
        Pool.start(2, launcher="dask", launcher_options={"python": "/nowhere/python"}, timeout=PATIENCE)
    with (
        distributed.LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as inside,
        distributed.Client(inside),
        pytest.raises(StartError, match="processes=True"),
    ):
        Pool.start(2, launcher="dask")
    monkeypatch.setattr(distributed, "default_client", _no_client)
    with pytest.raises(StartError, match="DASK_SCHEDULER_ADDRESS"):
        Pool.start(2, launcher="dask")


def _no_client() -> Any:
    raise ValueError("No clients found")


def test_workers_are_a_source_of_hosts(cluster: Any) -> None:
    assert DaskLauncher().source().find() == {"worker-0": 2, "worker-1": 2}
