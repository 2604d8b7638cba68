"""The example of a notebook's ranks on the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.jupyter.notebook_in_kernel import run_notebook


def test_the_notebook(cluster: Any, tmp_path: Path) -> None:
    run_notebook("ray", tmp_path, {"RAY_ADDRESS": cluster.address})
