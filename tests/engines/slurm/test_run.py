"""``hvdlab run --launcher slurm``."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from support.clusters.slurm import CPUS, NODES, SlurmCluster
from support.patience import PATIENCE, eventually

RUN = (sys.executable, "-m", "hvdlab", "run", "--launcher", "slurm")
SPREAD = ("--launcher-option", "args=--ntasks-per-node=2", "--launcher-option", "nodes=2")

PROGRAM = """\
import os, sys
import numpy as np
import hvdlab.numpy as hvd
hvd.init()
total = float(hvd.allreduce(np.full(1, 1.0 + hvd.rank()), op=hvd.Sum)[0])
print("found", os.environ["SLURMD_NODENAME"], hvd.rank(), hvd.local_rank(), total, flush=True)
if hvd.rank() == 3:
    raise SystemExit(int(sys.argv[1]))
hvd.shutdown()
"""


def test_a_program_runs_on_the_jobs_nodes_and_its_failure_is_told(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [*RUN, "-np", "4", *SPREAD, sys.executable, str(program), "3"],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    found = [line.partition("found ")[2].split() for line in done.stdout.splitlines() if "found" in line]
    assert sorted(found, key=lambda words: words[1]) == [
        ["n1", "0", "0", "10.0"],
        ["n1", "1", "1", "10.0"],
        ["n2", "2", "0", "10.0"],
        ["n2", "3", "1", "10.0"],
    ]
    assert "rank 3 on n2" in done.stderr or "rank 3 (n2)" in done.stderr, done.stderr


def test_ctrl_c_in_the_queue_cancels_the_job(slurm: SlurmCluster) -> None:
    size = len(NODES) * CPUS
    full = slurm.run(
        "sbatch", "--parsable", "-o", "/dev/null", f"-n{size}", "-t5", "--wrap=sleep 600"
    ).strip()
    eventually(lambda: full in slurm.run("squeue", "-h", "-t", "running", "-o", "%i"), lambda: full)
    with subprocess.Popen([*RUN, "-np", "2", "true"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        next(line for line in process.stderr if "PENDING (Resources)" in line)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert slurm.jobs() == [full]
    slurm.run("scancel", full)
