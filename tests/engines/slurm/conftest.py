"""Tests on a real Slurm of two nodes on this machine. They are collected where they are named, as by ``make engines``.

Each node counts as a host of its own (``HVDLAB_HOST``), though both are this one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support import shared_memory
from support.clusters.slurm import SlurmCluster, running
from support.patience import PATIENCE, eventually

collect_ignore_glob = [] if any("engines/slurm" in word for word in sys.argv) else ["test_*.py"]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Yield the cluster: it takes a second, and the packages are brought once."""
    with running(tmp_path_factory.mktemp("slurm")) as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        yield cluster


@pytest.fixture(autouse=True)
def nothing_left(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Beside the check of all tests: no job is left on the cluster, no process of a step's, and no file where the user is."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    jobs, steps, memory = set(slurm.jobs()), set(slurm.steps()), shared_memory.entries()
    yield
    eventually(lambda: set(slurm.jobs()) <= jobs, lambda: f"jobs are left: {slurm.run('squeue')}")
    _, left = psutil.wait_procs([step for step in slurm.steps() if step not in steps], timeout=PATIENCE)
    assert left == []
    assert list(here.iterdir()) == []
    assert shared_memory.left(memory) == set()
