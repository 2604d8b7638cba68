"""``hvdlab run --launcher dask``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from patience import PATIENCE

PROGRAM = """\
import sys
import numpy as np
import hvdlab.numpy as hvd
hvd.init()
total = float(hvd.allreduce(np.full(1, 1.0 + hvd.rank()), op=hvd.Sum)[0])
print("found", hvd.rank(), hvd.local_rank(), total, flush=True)
if hvd.rank() == 3:
    raise SystemExit(int(sys.argv[1]))
hvd.shutdown()
"""


def test_a_program_runs_on_the_workers_and_its_exit_code_is_reported(cluster: Any, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "hvdlab", "run", "--launcher", "dask", "-np", "4"),
            *(sys.executable, str(program), "3"),
        ],
        env=os.environ | {"DASK_SCHEDULER_ADDRESS": cluster.scheduler_address},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    found = [line.partition("found ")[2].split() for line in done.stdout.splitlines() if "found" in line]
    assert sorted(found) == [["0", "0", "10.0"], ["1", "1", "10.0"], ["2", "2", "10.0"], ["3", "3", "10.0"]]
    assert "rank 3" in done.stderr, done.stderr
