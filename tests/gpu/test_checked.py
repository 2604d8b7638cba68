"""The check of the plane on real GPUs: one that ranks share, and, where there are several, one for each rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdlab.runner.check_gpus import ANSWER_WITHIN
from support.ranks.resident import Ranks
from support.real_gpu import why_no_gpu

SIZE = 2
COUNT_GPUS = "from hvdlab.collectives.planes.gpu import gpu_plane; print(gpu_plane.gpus().count())"


def gpus_of_machine() -> int:
    """Return how many GPUs there are. A process of its own asks the driver: one that has used it can't fork ranks."""
    if why_no_gpu():
        return 0
    return int(subprocess.check_output([sys.executable, "-c", COUNT_GPUS], timeout=60))


@pytest.fixture
def two() -> Iterator[Ranks]:
    pytest.importorskip("torch")
    with Ranks(SIZE, imports=["hvdlab.torch"]) as ranks:
        yield ranks


def hvd() -> Any:
    import hvdlab.torch

    return hvdlab.torch


def total(is_apart: bool) -> tuple[tuple[str, ...], float]:
    """Reduce on this rank's own GPU, or on the first; return the planes that were used, and the sum."""
    import torch

    from hvdlab.collectives import context

    torch.cuda.set_device(hvd().local_rank() if is_apart else 0)
    found = float(hvd().allreduce(torch.ones(1000, device="cuda"), op=hvd().Sum)[-1])
    return context.engine().device_planes(), found


def test_ranks_that_share_a_gpu_pass_the_check(two: Ranks) -> None:
    assert two.run(total, False, timeout=120) == [(("cuda/ipc, checked",), 2.0)] * SIZE


def test_ranks_with_a_gpu_each_use_nccl_without_a_variable(two: Ranks) -> None:
    if gpus_of_machine() < SIZE:
        pytest.skip("there are not two GPUs")
    for planes, found in two.run(total, True, timeout=120):
        assert found == 2.0
        assert planes[0].startswith("NCCL 2.")
        assert planes[0].endswith(", checked")


def test_the_command_that_owners_run_finds_no_fault(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    environment = {name: value for name, value in os.environ.items() if name != "HVDLAB_CUDA_PLANE"}
    done = subprocess.run(
        [sys.executable, "-m", "hvdlab", "check-gpus", "--json", str(file)],
        capture_output=True, text=True, timeout=5 * ANSWER_WITHIN, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(file.read_text())["failed"] == ""
