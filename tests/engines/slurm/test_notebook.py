"""The example of a notebook's ranks in a job of Slurm's."""

from __future__ import annotations

from pathlib import Path

from support.clusters.slurm import SlurmCluster
from support.jupyter.notebook_in_kernel import run_notebook


def test_the_notebook(slurm: SlurmCluster, tmp_path: Path) -> None:
    run_notebook("slurm", tmp_path, {})
