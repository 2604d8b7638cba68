"""Pools whose ranks run in a job of Slurm's."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from hvdlab.kernel_ext.notebook.pool import Pool
from support.clusters.slurm import SlurmCluster
from support.patience import PATIENCE
from support.pool_probe import PoolProbe

WHERE = "import os; os.environ['SLURMD_NODENAME'], os.environ['SLURM_JOB_ID']"
SUM = """\
import numpy as np
import hvdlab.numpy as hvd
hvd.init()
(float(hvd.allreduce(np.full(1, 1.0 + hvd.rank()), op=hvd.Sum)[0]), hvd.local_rank(), hvd.local_size())
"""


@pytest.fixture(scope="module")
def pool(slurm: SlurmCluster) -> Iterator[Pool]:
    """Yield three ranks on two nodes, with room for one more."""
    options = {"nodes": "2", "slots": "4", "args": "--ntasks-per-node=2"}
    pool = Pool.start(3, launcher="slurm", launcher_options=options, timeout=PATIENCE)
    yield pool
    pool.stop()


def test_ranks_run_in_one_job_on_its_nodes(slurm: SlurmCluster, pool: Pool) -> None:
    job = slurm.job()
    assert list(pool.run(WHERE)) == [("n1", job), ("n1", job), ("n2", job)]
    assert list(pool.run(SUM)) == [(6.0, 0, 2), (6.0, 1, 2), (6.0, 0, 1)]
    hosts = [f"n1 (job {job})", f"n1 (job {job})", f"n2 (job {job})"]
    assert [status.host for status in pool.status()] == hosts
    # A fork server on each node has imported their common modules.
    parents = list(pool.run("import os; os.getppid()"))
    assert parents[0] == parents[1] != parents[2]


def test_the_secret_is_on_no_command_line_and_in_no_file_of_slurms(slurm: SlurmCluster, pool: Pool) -> None:
    token = PoolProbe(pool).coordinator.token
    lines = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
    assert any("--jobid=" in line for line in lines)
    assert not [line for line in lines if token in line]
    written = [path for path in slurm.work.rglob("*") if path.is_file()]
    assert written
    assert not [path for path in written if token.encode() in path.read_bytes()]
    assert token not in slurm.run("scontrol", "-d", "show", "job", slurm.job())


def test_ranks_that_come_back_or_are_added_run_on_their_nodes(pool: Pool) -> None:
    dying = pool.start_run("import os; os.kill(os.getpid(), 9)", ranks=[2]).wait(PATIENCE)
    assert dying.deaths[2].reason == "killed by SIGKILL"
    assert pool.repair(timeout=PATIENCE) == (2,)
    assert [where[0] for where in pool.run(WHERE)] == ["n1", "n1", "n2"]
    pool.resize(4, timeout=PATIENCE)
    assert [where[0] for where in pool.run(WHERE)] == ["n1", "n1", "n2", "n2"]
    pool.resize(3, timeout=PATIENCE)
    assert next(iter(pool.run(SUM))) == (6.0, 0, 2)
