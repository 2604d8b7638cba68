"""The check of the plane on real GPUs: one that ranks share, and, where there are several, one for each rank."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdlab.collectives.planes.base import THROUGH_HOST
from hvdlab.collectives.planes.gpu import gpu_plane
from hvdlab.runner.check_gpus import ANSWER_WITHIN
from support.ranks.resident import Ranks
from support.real_gpu import choose_gpu, why_no_gpu

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


class Lines(logging.Handler):
    """Lines that hvdlab has logged in this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


LINES = Lines()


def break_check(how: str) -> None:
    """Make the check of the plane fail on rank 1, of its own numbers or of an error."""
    from hvdlab.collectives.planes.base import PlaneBroken
    from hvdlab.collectives.planes.gpu.staged_plane import PinnedMemory

    logging.getLogger("hvdlab").addHandler(LINES)
    choose_gpu(hvd().local_rank(), hvd().local_size())
    if hvd().rank() != 1:
        return
    store = PinnedMemory.store

    def wrong(self: Any, places: Any, buffers: Any) -> None:
        PinnedMemory.store = store  # type: ignore[method-assign]
        if how == "raises":
            raise PlaneBroken("made to fail")
        places[0].array[0] += 1
        store(self, places, buffers)

    PinnedMemory.store = wrong  # type: ignore[method-assign]


def sums() -> tuple[list[float], tuple[str, ...], list[str], list[str]]:
    """Reduce twice on the GPU. Returns the sums, the planes and links that the status shows, and the lines that were logged."""
    import torch

    from hvdlab.collectives import context

    found = [float(hvd().allreduce(torch.ones(n, device="cuda"), op=hvd().Sum)[-1]) for n in (1000, 1 << 20)]
    engine = context.engine()
    return found, engine.device_planes(), list(engine.links()), LINES.lines


@pytest.mark.parametrize("plane", ["ipc", "nccl"])
@pytest.mark.parametrize(
    ("how", "words"), [("wrong", "of 65536 sums were wrong"), ("raises", "made to fail")]
)
def test_after_a_check_that_fails_ranks_go_through_the_host_and_one_sentence_says_why(
    plane: str, how: str, words: str
) -> None:
    pytest.importorskip("torch")
    with Ranks(SIZE, imports=["hvdlab.torch"], env={gpu_plane.CHOICE: plane}) as ranks:
        ranks.run(break_check, how, timeout=120)
        found = ranks.run(sums, timeout=120)
    assert [(values, planes, links) for values, planes, links, _ in found] == [
        ([2.0, 2.0], ("",), [THROUGH_HOST])
    ] * SIZE
    assert [len(lines) for *_, lines in found] == [1, 0]
    assert "are copied through the host until one of them is restarted" in found[0][-1][0]
    assert f"`cuda/{plane}` failed its check on rank" in found[0][-1][0]
    assert words in found[0][-1][0]


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
