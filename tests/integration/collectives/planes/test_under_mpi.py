"""Ranks that mpiexec started: MPI is there when the first collective needs it, on any of the ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.planes.planes_under_test import mpi_missing, mpiexec_path
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from support.patience import PROGRAM_PATIENCE

PROGRAM = Path(__file__).with_name("mpi_program.py")


@pytest.mark.parametrize(
    ("hosts", "of_set", "of_world"), [("aaa", "mpi", "mpi"), ("aab", "mpi", "hierarchical")]
)
def test_a_process_set_may_be_first(hosts: str, of_set: str, of_world: str) -> None:
    reason = mpi_missing()
    if reason:
        pytest.skip(reason)
    command = [mpiexec_path() or "mpiexec", "-n", str(len(hosts)), sys.executable, str(PROGRAM)]
    command += [hosts, of_set, of_world]
    coordinator = CoordinatorProcess.start(size=len(hosts))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HVDLAB_COORDINATOR": coordinator.address,
        "HVDLAB_TOKEN": coordinator.token,
    }
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROGRAM_PATIENCE, env=environment, check=False
        )
    finally:
        coordinator.close()
    assert done.returncode == 0, done.stderr
