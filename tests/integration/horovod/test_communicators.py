"""Worlds and process sets from communicators of mpi4py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hvdlab.collectives.coordinator.process import CoordinatorProcess
from support.patience import PROGRAM_PATIENCE

pytest.importorskip("mpi4py")
MPIEXEC = Path(sys.prefix) / "bin" / "mpiexec"

SCRIPT = """
import os
import sys
from mpi4py import MPI
world = MPI.COMM_WORLD
os.environ["HVDLAB_RANK"] = str(world.rank)
os.environ["HVDLAB_SIZE"] = str(world.size)
import torch
import hvdlab.torch as hvd

half = world.Split(color=world.rank % 2, key=-world.rank)
mine = hvd.ProcessSet(half)
assert mine.mpi_comm is half and mine.process_set_id is None
hvd.init(world, process_sets=[mine])
members = [rank for rank in range(hvd.size()) if rank % 2 == hvd.rank() % 2]
assert (mine.ranks, mine.included(), mine.rank()) == (members, True, members.index(hvd.rank()))
assert hvd.allreduce(torch.tensor(hvd.rank()), op=hvd.Sum, process_set=mine).item() == sum(members)
for again in (half, members):
    try:
        hvd.add_process_set(again)
    except ValueError as error:
        assert "registered already" in str(error)
    else:
        raise AssertionError
assert hvd.remove_process_set(mine)
assert mine.process_set_id is None
hvd.shutdown()
try:
    hvd.init(half)
except NotImplementedError as error:
    assert "were started" in str(error), error
else:
    raise AssertionError
assert not hvd.is_initialized()
sys.stdout.write(f"done {world.rank}\\n")  # in one piece: mpiexec mixes those of several ranks
"""


@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec in this environment")
def test_communicators(tmp_path: Path) -> None:
    script = tmp_path / "communicators.py"
    script.write_text(SCRIPT)
    coordinator = CoordinatorProcess.start(size=4)
    try:
        ran = subprocess.run(
            [
                str(MPIEXEC), "-n", "4",
                "-genv", "HVDLAB_COORDINATOR", coordinator.address,
                "-genv", "HVDLAB_TOKEN", coordinator.token,
                "-genv", "OMP_NUM_THREADS", "1",
                sys.executable, str(script),
            ],
            capture_output=True, text=True, timeout=PROGRAM_PATIENCE, check=False,
        )  # fmt: skip
    finally:
        coordinator.close()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert sorted(ran.stdout.split("\n")) == ["", "done 0", "done 1", "done 2", "done 3"]
