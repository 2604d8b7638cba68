"""Reactions of the launcher `slurm` to Slurm's output; tests/engines/slurm has a real one."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import pytest

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.launch import registry
from hvdlab.launch.hosts import Host
from hvdlab.launch.slurm import JobState, Slurm, SlurmAllocation, hosts_with_slots, plain
from support.patience import PATIENCE

NOW = datetime(2026, 11, 23, 20, 0)


def test_what_a_waiting_job_waits_for_is_one_line() -> None:
    lines = {
        JobState(
            "PENDING", "Priority", "2026-11-23T21:30:00"
        ): "job 7 is PENDING (Priority), expected at 21:30",
        JobState("PENDING", "Resources", "2026-11-25T01:00:00"): (
            "job 7 is PENDING (Resources), expected at 2026-11-25 01:00"
        ),
        JobState("PENDING", "None", "N/A"): "job 7 is PENDING",
        JobState("CONFIGURING", "None", "N/A"): "job 7 is CONFIGURING",
        JobState("RUNNING", "None", "2026-11-23T19:00:00", "n[1-2]"): "job 7 has n[1-2]; its script begins",
    }
    for state, line in lines.items():
        assert state.waiting_text("7", NOW) == line


def test_the_end_of_a_job_is_told_in_words() -> None:
    ends = {
        JobState("CANCELLED"): "Slurm's job 7 was cancelled",
        JobState("TIMEOUT", "TimeLimit"): "Slurm's job 7 came to its time limit",
        JobState("OUT_OF_MEMORY", "OutOfMemory"): "Slurm's job 7 had no memory left",
        JobState("NODE_FAIL"): "Slurm's job 7: a node of it failed",
        JobState("PREEMPTED"): "Slurm's job 7 was preempted",
        JobState("FAILED", "NonZeroExitCode"): "Slurm's job 7 failed (NonZeroExitCode)",
        JobState("NEWLY_INVENTED"): "Slurm's job 7 is NEWLY_INVENTED",
    }
    for state, text in ends.items():
        assert not state.waits
        assert not state.runs
        assert state.end_text("7") == text


def test_a_job_that_would_wait_for_ever_is_known_by_its_reason() -> None:
    for reason in (
        "PartitionTimeLimit",
        "Job's account not known, so it can't use this partition (a allows b)",
    ):
        assert JobState("PENDING", reason).never
    for reason in ("Resources", "Priority", "PartitionDown", "ReqNodeNotAvail, UnavailableNodes:n1"):
        assert not JobState("PENDING", reason).never
    assert not JobState("RUNNING", "PartitionConfig").never


def test_ranks_are_divided_as_slurm_has_divided_the_tasks() -> None:
    nodes = ["a", "b", "c"]
    assert hosts_with_slots(nodes, "2(x2),1", 5) == [Host("a", 2), Host("b", 2), Host("c", 1)]
    assert hosts_with_slots(nodes, "4,2,1", 7) == [Host("a", 4), Host("b", 2), Host("c", 1)]
    assert hosts_with_slots(nodes, "", 5) == [Host("a", 2), Host("b", 2), Host("c", 1)]
    assert hosts_with_slots(nodes, "", 2) == [Host("a", 1), Host("b", 1)]
    assert JobState("RUNNING", nodes="n1").settled
    assert not JobState("RUNNING", nodes="n[1-2]").settled
    assert JobState("RUNNING", nodes="n[1-2]", tasks="2(x2)").settled


def test_slurms_complaints_are_one_line() -> None:
    said = "sbatch: error: invalid partition\nsbatch: error: Batch job submission failed: Invalid\n\n"
    assert plain(said) == "invalid partition; Batch job submission failed: Invalid"


def fake(directory: Path, name: str, script: str) -> None:
    """A command of Slurm's that does this instead."""
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, str]:
    """Return the environment in which fakes of Slurm's commands are found first."""
    fake(tmp_path, "sbatch", 'echo "7;cluster"')
    fake(tmp_path, "scancel", f'echo "$1" >> {tmp_path}/cancelled')
    return {"PATH": f"{tmp_path}:/usr/bin:/bin"}


def test_a_job_is_cancelled_once_it_is_not_held_any_more(commands: dict[str, str], tmp_path: Path) -> None:
    job = SlurmAllocation(["--wrap=true"], commands)
    assert job.submitted() == "7"
    assert not (tmp_path / "cancelled").exists()
    job.cancel()
    assert job.wait(PATIENCE)
    assert (tmp_path / "cancelled").read_text() == "7\n"


def test_a_job_that_nobody_waits_for_is_submitted_and_cancelled(
    commands: dict[str, str], tmp_path: Path
) -> None:
    """The notebook is gone before Slurm has answered: the job's number has no reader."""
    fake(tmp_path, "sbatch", f"read line < {tmp_path}/go; echo 8")
    os.mkfifo(tmp_path / "go")
    job = SlurmAllocation(["--wrap=true"], commands)
    job.cancel()
    (tmp_path / "go").write_text("go\n")
    assert job.wait(PATIENCE)
    assert (tmp_path / "cancelled").read_text() == "8\n"


def test_a_controller_that_does_not_answer_is_not_taken_for_the_end(
    commands: dict[str, str], tmp_path: Path
) -> None:
    slurm = Slurm(commands)
    fake(tmp_path, "squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(StartError, match="Unable to contact slurm controller"):
        slurm.job("7")
    fake(tmp_path, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert slurm.job("7") is None


def test_without_slurm_the_launcher_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launcher = registry.find("slurm")
    assert launcher is not None
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        StartError, match=r"needs Slurm's commands, and `sbatch` is not on the PATH; .*choose another"
    ):
        launcher.check(2, "")
    for name in ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo"):
        fake(tmp_path, name, "true")
    launcher.check(2, "")
    with pytest.raises(InvalidRequestError, match="has its nodes from Slurm: name no hosts"):
        launcher.check(2, "a:2")
