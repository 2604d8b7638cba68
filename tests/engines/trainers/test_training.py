"""Accelerate, Lightning and the Trainer of ``transformers`` on ranks of a pool: their results, and the leftovers when a
training ends early."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engines.trainers.trainings import LIBRARIES
from hvdlab.kernel_ext.notebook.pool import Pool
from support.patience import PATIENCE
from support.pool_recorder import Recorder

GROUP = "import torch.distributed as dist; dist.init_process_group('hvdlab')"
TRAINED = "trainings.difference(trainings.LIBRARIES[{!r}](trainings.Rows()))"
FAILING = "trainings.LIBRARIES[{!r}](trainings.Rows({}))"

libraries = pytest.mark.parametrize("library", LIBRARIES)


@libraries
def test_it_ends_with_the_parameters_of_one_process(pool: Pool, library: str) -> None:
    for _ in range(2):  # the group, and the library's state, outlive their cell
        pool.run(GROUP)
        results = pool.run(TRAINED.format(library), timeout=PATIENCE)
        assert results.errors == {}
        assert max(results) < 1e-6


@libraries
def test_libraries_may_make_the_group(pool: Pool, library: str) -> None:
    cell = "import os; os.environ['HVDLAB_C10D'] = '1'\n" + TRAINED.format(library)
    results = pool.run(cell, timeout=PATIENCE)
    assert results.errors == {}
    assert max(results) < 1e-6


@libraries
def test_a_bad_row_is_named_on_all_ranks_and_the_next_training_is_good(pool: Pool, library: str) -> None:
    pool.run(GROUP)
    results = pool.run(FAILING.format(library, "fails_on=1"), timeout=PATIENCE)
    assert results.errors[1].ename == "ValueError"
    assert results.errors[0].aborted
    assert "rank 1 failed: ValueError: row" in results.errors[0].evalue
    assert max(pool.run(TRAINED.format(library), timeout=PATIENCE)) < 1e-6


@libraries
def test_a_training_is_interrupted_and_the_next_one_is_good(pool: Pool, library: str) -> None:
    pool.run(GROUP)
    said = Recorder()
    run = pool.start_run(FAILING.format(library, "waits_on=1"), out=said)
    said.wait_for("waits", [1], PATIENCE)
    run.interrupt()
    errors = run.wait(PATIENCE).errors
    assert {rank: error.ename for rank, error in errors.items()} == dict.fromkeys(
        range(2), "KeyboardInterrupt"
    )
    assert max(pool.run(TRAINED.format(library), timeout=PATIENCE)) < 1e-6


@libraries
def test_a_script_under_hvdlab_run(library: str, watch: str, tmp_path: Path) -> None:
    script = ["-m", "engines.trainers.trainings", library]
    command = [sys.executable, "-m", "hvdlab", "run", "-np", "2", sys.executable, *script]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HVDLAB_C10D_WATCH": watch,
    }
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("differs by") == 2
    assert all(
        float(line.rpartition(" ")[2]) < 1e-6 for line in done.stdout.splitlines() if "differs by" in line
    )
