"""``hvd.init()`` under srun and sbatch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from support.clusters.slurm import SlurmCluster
from support.patience import eventually

PROGRAM = """\
import json, os
os.environ["HVDLAB_HOST"] = os.environ["SLURMD_NODENAME"]
import numpy as np
import hvdlab.numpy as hvd
hvd.init()
total = hvd.allreduce(np.full(1, 1.0 + hvd.rank()), op=hvd.Sum)
where = os.environ["HVDLAB_HOST"], hvd.local_rank(), hvd.local_size()
print(json.dumps((hvd.rank(), hvd.size(), *where, float(total[0]))), flush=True)
hvd.shutdown()
"""
TASKS = ("-N", "2", "-n", "4", "--ntasks-per-node=2")
FOUND = [
    [0, 4, "n1", 0, 2, 10.0],
    [1, 4, "n1", 1, 2, 10.0],
    [2, 4, "n2", 0, 2, 10.0],
    [3, 4, "n2", 1, 2, 10.0],
]


def test_ranks_of_srun_find_each_other(slurm: SlurmCluster, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    said = slurm.run("srun", *TASKS, sys.executable, str(program))
    assert sorted(map(json.loads, said.splitlines())) == FOUND


def test_ranks_of_an_sbatch_script_find_each_other(slurm: SlurmCluster, tmp_path: Path) -> None:
    program, script, output = tmp_path / "program.py", tmp_path / "job.sh", tmp_path / "output"
    program.write_text(PROGRAM)
    script.write_text(f"#!/bin/sh\nexec srun {sys.executable} {program}\n")
    job = slurm.run("sbatch", "--parsable", *TASKS, "-o", str(output), str(script)).strip()
    eventually(lambda: job not in slurm.jobs(), lambda: output.read_text())
    assert sorted(map(json.loads, output.read_text().splitlines())) == FOUND
