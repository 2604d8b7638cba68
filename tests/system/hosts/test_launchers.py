"""Scripts that know of no launcher, started on two hosts by mpiexec, torchrun and Slurm's variables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.network.mpiexec_agent import mpiexec_agent
from support.network.namespaces import Host, Network

SCRIPT = str(Path(__file__).parents[2] / "integration/collectives/rendezvous/script.py")
BIN = Path(sys.executable).parent
PLACES = [(0, 4, 0, 2, 0, 2), (1, 4, 1, 2, 0, 2), (2, 4, 0, 2, 1, 2), (3, 4, 1, 2, 1, 2)]


def lines(plane: str) -> list[str]:
    return [f"{place} 6.0 {plane}" for place in PLACES]


def finish(
    processes: Sequence[subprocess.Popen[bytes]], timeout: float = 100
) -> tuple[list[int], list[str], str]:
    """Exit codes, sorted lines and errors of all."""
    deadline = time.monotonic() + timeout
    out, err = b"", b""
    try:
        for process in processes:
            said = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            out, err = out + said[0], err + said[1]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return [p.returncode for p in processes], sorted(out.decode().splitlines()), err.decode()


def start(host: Host, argv: Sequence[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    return host.popen(argv, {"OMP_NUM_THREADS": "1", **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.skipif(not (BIN / "mpiexec").exists(), reason="no mpiexec beside this Python")
def test_mpiexec(network: Network, tmp_path: Path) -> None:
    """Its ranks learn of the coordinator by an MPI broadcast."""
    agent = mpiexec_agent(network, tmp_path)
    first = network.hosts[0]
    options = ["-launcher", "rsh", "-launcher-exec", str(agent), "-localhost", first.address]
    options += ["-hosts", ",".join(f"{host.address}:2" for host in network.hosts), "-n", "4"]
    # mpiexec itself only needs the network of its host, but has to see the first processes of all.
    command = ["nsenter", "-t", str(first.pid), "-n", "--", str(BIN / "mpiexec"), *options]
    process = subprocess.Popen(
        [*command, sys.executable, SCRIPT, "train"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    codes, said, err = finish([process])
    assert (codes, said) == ([0], lines("hierarchical")), err


@pytest.mark.skipif(not (BIN / "torchrun").exists(), reason="no torchrun beside this Python")
def test_torchrun(network: Network) -> None:
    """Its ranks learn of the coordinator by the store of the first host's agent."""
    options = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "host0", "--master-port", "29600"]
    processes = [
        start(host, [str(BIN / "torchrun"), *options, "--node-rank", str(number), SCRIPT, "train"], {})
        for number, host in enumerate(network.hosts)
    ]
    codes, said, err = finish(processes)
    assert (codes, said) == ([0, 0], lines("hierarchical")), err


def slurm(network: Network, env: dict[str, str], *arguments: str) -> list[subprocess.Popen[bytes]]:
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_LAUNCH_NODE_IPADDR": network.hosts[0].address,
        "HVDLAB_PLANE": "gloo",
        **env,
    }
    found = []
    for rank in range(4):
        node, local = divmod(rank, 2)
        own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}
        found.append(start(network.hosts[node], [sys.executable, SCRIPT, *arguments], {**step, **own}))
    return found


def test_srun_with_a_shared_directory(network: Network, tmp_path: Path) -> None:
    codes, said, err = finish(slurm(network, {"XDG_CACHE_HOME": str(tmp_path)}, "train"))
    assert (codes, said) == ([0] * 4, lines("gloo")), err
    assert list(tmp_path.iterdir()) == []


def test_srun_without_one_says_what_to_do(network: Network) -> None:
    codes, _, err = finish(slurm(network, {"HVDLAB_START_TIMEOUT": "8"}, "train"))
    assert codes == [1] * 4
    # The one that gives up first is missed by the other.
    assert re.search("ranks (2,3|1-3|0,2,3) did not come", err), err
    assert "not on a file system that all hosts share, set HVDLAB_RENDEZVOUS_DIR" in err


def test_hosts_that_were_taken_for_one(network: Network, tmp_path: Path) -> None:
    env = {"SLURM_STEP_NUM_NODES": "1", "HVDLAB_RENDEZVOUS_DIR": str(tmp_path), "HVDLAB_START_TIMEOUT": "8"}
    codes, _, err = finish(slurm(network, env, "train"))
    assert codes == [1] * 4
    assert "the launcher's variables say that there is one host only" in err
