"""The job that a pool's ranks run in: its place in the queue, and its ends."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from hvdlab.collectives.errors import StartError
from hvdlab.kernel_ext.notebook.pool import Pool
from support.clusters.slurm import CPUS, NODES, SlurmCluster
from support.patience import PATIENCE, eventually

FULL = len(NODES) * CPUS


KILL_THE_AGENT = """\
import os, psutil, time
psutil.Process(os.getppid()).parent().kill()
time.sleep(600)
"""


def test_an_agent_that_is_killed_is_started_again_and_a_node_that_fails_takes_only_its_ranks(
    slurm: SlurmCluster,
) -> None:
    pool = Pool.start(2, launcher="slurm", launcher_options={"args": "--ntasks-per-node=1"}, timeout=PATIENCE)
    try:
        pool.run("kept = 41")
        dying = pool.start_run(KILL_THE_AGENT, ranks=[1]).wait(PATIENCE)
        assert dying.deaths[1].reason.startswith("`srun` for n2 ended with exit code 137")
        assert pool.repair(timeout=PATIENCE) == (1,)
        assert pool.run("__import__('os').environ['SLURMD_NODENAME']").value(1) == "n2"
        job = slurm.job()
        running = pool.start_run("import time; time.sleep(600)", ranks=[1])
        slurm.run("scontrol", "update", "nodename=n2", "state=down", "reason=flood")
        assert running.wait(PATIENCE).deaths
        assert pool.lost[1].startswith(f"node n2 of Slurm's job {job} failed")
        assert pool.run("kept", ranks=[0]).value(0) == 41
    finally:
        pool.stop()
        slurm.run("scontrol", "update", "nodename=n2", "state=resume", check=False)  # it may be back already


def test_the_end_of_the_job_is_told_as_the_reason(slurm: SlurmCluster) -> None:
    pool = Pool.start(2, launcher="slurm", timeout=PATIENCE)
    try:
        job = slurm.job()
        running = pool.start_run("import time; time.sleep(600)")
        slurm.run("scancel", job)
        said = f"Slurm's job {job} was cancelled"
        assert {death.reason for death in running.wait(PATIENCE).deaths.values()} == {said}
        assert pool.lost == {0: said, 1: said}
        with pytest.raises(StartError, match=said):
            pool.repair(timeout=PATIENCE)
    finally:
        pool.stop()


@pytest.fixture
def full(slurm: SlurmCluster) -> Iterator[str]:
    """Start another user's job that has all of the cluster."""
    job = slurm.run("sbatch", "--parsable", "-o", "/dev/null", f"-n{FULL}", "-t5", "--wrap=sleep 600").strip()
    eventually(lambda: job in slurm.run("squeue", "-h", "-t", "running", "-o", "%i"), lambda: job)
    yield job
    slurm.run("scancel", job)


def test_a_pool_waits_in_the_queue_and_says_so(slurm: SlurmCluster, full: str) -> None:
    said: list[str] = []

    def heard(text: str) -> None:
        said.append(text)
        if "PENDING (Resources), expected at " in text:
            slurm.run("scancel", full)

    pool = Pool.start(2, launcher="slurm", timeout=PATIENCE, on_progress=heard)
    try:
        assert pool.size == 2
        assert any("PENDING (Resources), expected at " in text for text in said)
    finally:
        pool.stop()


def test_an_interrupt_of_the_wait_cancels_the_job(slurm: SlurmCluster, full: str) -> None:
    def heard(text: str) -> None:
        if "PENDING" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Pool.start(2, launcher="slurm", timeout=PATIENCE, on_progress=heard)
    assert slurm.jobs() == [full]


NOTEBOOK = """\
import sys, time
from hvdlab.kernel_ext.notebook.pool import Pool
pool = Pool.start(2, launcher="slurm", on_progress=lambda text: print(text, flush=True))
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("when", ["PENDING", "up"])
def test_a_kernel_that_is_killed_leaves_no_job(
    slurm: SlurmCluster, when: str, request: pytest.FixtureRequest
) -> None:
    others = [request.getfixturevalue("full")] if when == "PENDING" else []
    with subprocess.Popen([sys.executable, "-c", NOTEBOOK], stdout=subprocess.PIPE, text=True) as notebook:
        assert notebook.stdout is not None
        next(line for line in notebook.stdout if when in line)
        assert len(slurm.jobs()) == 1 + len(others)
        notebook.kill()
    eventually(lambda: slurm.jobs() == others, lambda: slurm.run("squeue"))


def test_a_start_that_fails_leaves_no_job_and_says_why(slurm: SlurmCluster) -> None:
    said = r"execve.*/no/such/python: No such file or directory\. The interpreter .* is not on that host .*python=PATH"
    with pytest.raises(StartError, match=said):
        Pool.start(2, launcher="slurm", launcher_options={"python": "/no/such/python"}, timeout=PATIENCE)
    assert slurm.jobs() == []


def test_what_slurm_refuses_is_told_in_its_own_words(slurm: SlurmCluster) -> None:
    refused = {
        "partition=nowhere": "Slurm refused the job: .*Invalid partition name specified",
        "constraint=gold": "Slurm refused the job: .*Invalid feature specification",
        "gpus_per_rank=1": "Slurm refused the job: .*Invalid generic resource",
        "partition=closed": "Slurm would never run job .*can't use this partition",
        "partition=short time=10": r"Slurm would never run job \d+: Partition",
    }
    for words, said in refused.items():
        options = dict(word.split("=") for word in words.split())
        with pytest.raises(StartError, match=said):
            Pool.start(2, launcher="slurm", launcher_options=options, timeout=PATIENCE)
        assert slurm.jobs() == []
    with pytest.raises(StartError, match=r"Slurm would never run job \d+: PartitionConfig"):
        Pool.start(FULL + 1, launcher="slurm", timeout=PATIENCE)
