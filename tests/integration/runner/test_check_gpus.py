"""``hvdlab check-gpus`` on simulated GPUs with a simulated NCCL: the table, the file, and ranks that fail or hang."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdlab.collectives.planes.gpu import gpu_plane
from hvdlab.runner import check_gpus, cli
from support.fakes import nccl as fake_nccl
from support.fakes.checked_gpus import rank_program as program
from support.patience import PATIENCE

CAT = ("cat",)


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(fake_nccl.DIRECTORY, str(tmp_path))
    monkeypatch.setattr(check_gpus, "WORK_SECONDS", 0.1)


def found_in(file: Path) -> Any:
    return json.loads(file.read_text())


def test_ranks_with_a_gpu_each_are_checked_timed_interrupted_and_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_gpus, "SIZES", {"4 KiB": 4096})
    assert check_gpus.run(3, program("xyz", torch=True), tmp_path / "found.json", PATIENCE) == 0
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


def test_ranks_of_a_checker_in_the_background_are_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_gpus, "SIZES", {})
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as shells start it then
    try:
        assert check_gpus.run(2, program("xy"), tmp_path / "found.json", PATIENCE) == 0
    finally:
        signal.signal(signal.SIGINT, usual)
    assert found_in(tmp_path / "found.json")["interrupt"]["ends"]["0"]["end"] == "KeyboardInterrupt"


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
    real(self, buffer)
    check_gpus.CheckedRank._allreduce = interrupted
def interrupted(self, buffer):
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


def test_a_rank_that_begins_a_call_after_another_was_interrupted_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_gpus, "SIZES", {})
    late = f"""
import pathlib, time
withdrawn = pathlib.Path({str(tmp_path / "withdrawn")!r})
withdraw, real = check_gpus.CheckedRank._withdraw, check_gpus.CheckedRank._allreduce
def withdraws(self, task):
    found = withdraw(self, task)
    withdrawn.touch()
    return found
def late(self, buffer):
    real(self, buffer)
    check_gpus.CheckedRank._allreduce = after_it
def after_it(self, buffer):
    check_gpus.CheckedRank._allreduce = real
    while not withdrawn.exists():
        time.sleep(0.01)
    real(self, buffer)
def waits(self, buffer):
    real(self, buffer)
    check_gpus.CheckedRank._allreduce = lambda self, buffer: time.sleep(3600)
def first(self, task):
    check_gpus.CheckedRank._work = work
    check_gpus.CheckedRank._allreduce = waits if self._engine.rank == 0 else late
    try:
        return work(self, task)
    finally:
        check_gpus.CheckedRank._allreduce = real
check_gpus.CheckedRank._withdraw = withdraws
work, check_gpus.CheckedRank._work = check_gpus.CheckedRank._work, first
"""
    assert check_gpus.run(2, program("xy", late), tmp_path / "found.json", PATIENCE) == 0
    assert found_in(tmp_path / "found.json")["interrupt"]["ends"]["1"]["end"] == "AbortedError"


def test_answers_that_come_together_are_both_read() -> None:
    code = r"""
import os, sys
for line in sys.stdin:
    os.write(1, b'{"is": "first"}\n{"is": "second"}\n')
"""
    ranks = check_gpus.GpuRanks(1, (sys.executable, "-c", code), PATIENCE)
    try:
        assert ranks.ask("work") == {0: {"is": "first"}}
        assert ranks.answers("interrupt") == {0: {"is": "second"}}
    finally:
        ranks.close()


def test_checker_that_cannot_start_a_rank_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    popen, started = subprocess.Popen, list[Any]()

    def refuse(command: Any, **options: Any) -> Any:
        if command is not CAT:
            return popen(command, **options)
        if started:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(popen(command, **options))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(BlockingIOError):
        check_gpus.GpuRanks(2, CAT, PATIENCE)
    assert started[0].returncode == 0
