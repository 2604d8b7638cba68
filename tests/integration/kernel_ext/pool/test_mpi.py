"""Ranks that mpiexec starts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.kernel_ext.notebook.ipyparallel import launchers
from hvdlab.kernel_ext.notebook.pool import Pool
from support.patience import PATIENCE

StartPool = Callable[..., Pool]

pytest.importorskip("mpi4py")
if not any(name == "mpi" for name in launchers.launcher_names()):
    pytest.skip("ipyparallel has no MPI launcher here", allow_module_level=True)


def test_mpi_ranks_take_cells_and_compute_by_mpi(start_pool: StartPool) -> None:
    pool = start_pool(2, launcher="mpi")
    results = pool.run(
        "import os, numpy as np\n"
        "import hvdlab.numpy as hvd\nfrom hvdlab.collectives import context\n"
        "from hvdlab.collectives.types import ReduceOp\n"
        "context.init()\n"
        "summed = hvd.allreduce(np.full(3, 1 + int(os.environ['RANK'])), op=ReduceOp.SUM)\n"
        "(os.environ['RANK'], os.environ['WORLD_SIZE'], summed.tolist())"
    )
    assert results.errors == {}
    assert list(results) == [("0", "2", [3, 3, 3]), ("1", "2", [3, 3, 3])]
    assert [status.plane for status in pool.status()] == ["mpi", "mpi"]
    with pytest.raises(
        InvalidRequestError, match="can't be added or taken away, because it starts all of them together"
    ):
        pool.resize(3)
    with pytest.raises(InvalidRequestError, match="start it anew"):
        pool.restart([1])
    client = pool.cluster.connect_client_sync()
    try:
        client.wait_for_engines(2, timeout=30)
        assert client.ids == [0, 1]
    finally:
        client.close()
        import zmq

        zmq.Context.instance().destroy(linger=0)


def test_a_killed_mpi_rank_is_known(start_pool: StartPool) -> None:
    pool = start_pool(2, launcher="mpi")
    (pid,) = pool.run("import os; os.getpid()", ranks=[1])
    run = pool.start_run("import time; time.sleep(60)")
    os.kill(pid, signal.SIGKILL)
    results = run.wait(PATIENCE)
    assert 1 in results.deaths
    deadline = time.monotonic() + PATIENCE
    while len(pool.lost) < 2:  # mpiexec ends the whole job
        assert time.monotonic() < deadline
        time.sleep(0.02)
