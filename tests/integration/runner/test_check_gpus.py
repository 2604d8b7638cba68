"""``hvdlab check-gpus`` on simulated GPUs with a simulated NCCL: the table, the file, and ranks that fail or hang."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdlab.collectives.planes.gpu import gpu_plane
from hvdlab.runner import check_gpus, cli
from support.fakes import nccl as fake_nccl
from support.patience import PATIENCE

TESTS = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv(fake_nccl.DIRECTORY, str(tmp_path))
    monkeypatch.setattr(check_gpus, "WORK_SECONDS", 0.1)


def program(gpus: str, more: str = "") -> list[str]:
    """Return the program of a rank on the simulated GPU that its letter names."""
    text = f"""
import os
from support.fakes import cuda as fake_cuda
from support.fakes import nccl as fake_nccl
from hvdlab.runner import check_gpus
gpu = fake_cuda.install()
gpu.identity = {gpus!r}[int(os.environ["HVDLAB_RANK"])] * 32
fake_nccl.install(gpu)
check_gpus.ROUNDS, check_gpus.CALLS, check_gpus.WORK_BYTES = 1, 1, 4096
{more}
check_gpus.rank_main()
"""
    return [sys.executable, "-c", text]


def found_in(file: Path) -> Any:
    return json.loads(file.read_text())


def test_ranks_with_a_gpu_each_are_checked_timed_interrupted_and_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_gpus, "SIZES", {"4 KiB": 4096})
    assert check_gpus.run(3, program("xyz"), tmp_path / "found.json", PATIENCE) == 0
    lines = capsys.readouterr().out
    assert "rank 1             GPU 0 of 1 (yyyyyyyy); cuda/ipc, cuda/nccl; NCCL 2.28.9\n" in lines
    assert "rank 1 reaches     no peer access\n" in lines
    assert "NCCL 2.28.9, checked (link unknown), in" in lines
    assert "torch's NCCL       left out: " in lines
    found = found_in(tmp_path / "found.json")
    assert found["failed"] == ""
    assert set(found["allreduce"]) == {"4 KiB"}
    assert {end["end"] for end in found["interrupt"]["ends"].values()} == {
        "KeyboardInterrupt",
        "AbortedError",
    }
    assert found["interrupt"]["ends"]["0"]["end"] == "KeyboardInterrupt"
    assert set(found["death"]["ends"]) == {"0", "1"}


def test_a_plane_that_fails_its_check_is_in_the_table_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_gpus, "SIZES", {})
    broken = """
def broken(self, *arguments):
    from hvdlab.collectives.planes.gpu.nccl_library import NcclFailed
    raise NcclFailed("NCCL: unhandled cuda error")
fake_nccl.FakeCommunicator.allreduce = broken
"""
    assert check_gpus.run(2, program("xy", broken), tmp_path / "found.json", PATIENCE) == 0
    lines = capsys.readouterr().out
    assert "CUDA tensors through the host" in lines
    assert "`cuda/nccl` failed its check" in lines
    assert "NCCL: unhandled cuda error" in lines


def test_a_rank_that_hangs_is_named_and_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hangs = """
import time
if os.environ["HVDLAB_RANK"] == "1":
    check_gpus.CheckedRank._describe = lambda self, task: time.sleep(3600)
"""
    assert check_gpus.run(2, program("xy", hangs), tmp_path / "found.json", 20.0) == 1
    assert "rank 1 did not answer within 20 s (gpu)" in capsys.readouterr().out
    assert "rank 1 did not answer" in found_in(tmp_path / "found.json")["failed"]


def test_a_machine_without_a_gpu_gets_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_plane, "why_missing", lambda: "there is no NVIDIA driver on this machine.")
    monkeypatch.delenv(gpu_plane.SWITCH, raising=False)
    assert cli.main(["check-gpus"]) == 1
    assert (
        capsys.readouterr().out == "There is nothing to check: there is no NVIDIA driver on this machine.\n"
    )


def test_a_rank_that_is_interrupted_between_two_calls_keeps_no_other_waiting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_gpus, "SIZES", {})
    between = """
import time
work, real = check_gpus.CheckedRank._work, check_gpus.CheckedRank._allreduce
def held(self, buffer):
    check_gpus.CheckedRank._allreduce = real
    time.sleep(3600)
def first(self, task):
    check_gpus.CheckedRank._work = work
    if os.environ["HVDLAB_RANK"] == "0":
        check_gpus.CheckedRank._allreduce = held
    return work(self, task)
check_gpus.CheckedRank._work = first
"""
    monkeypatch.setattr(check_gpus, "WORK_SECONDS", 1.0)
    assert check_gpus.run(2, program("xy", between), tmp_path / "found.json", PATIENCE) == 0
    assert found_in(tmp_path / "found.json")["interrupt"]["ends"]["1"]["end"] == "AbortedError"
