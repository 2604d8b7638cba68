"""The token of a pool is code on all its ranks: mpiexec, which sends variables in the clear, is not given it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.network.mpiexec_agent import mpiexec_agent
from support.network.namespaces import Network

BIN = Path(sys.executable).parent
SCRIPT = str(Path(__file__).with_name("mpi_pool.py"))
pytestmark = pytest.mark.skipif(not (BIN / "mpiexec").exists(), reason="no mpiexec beside this Python")


def test_whoever_listens_between_the_hosts_sees_variables_but_no_token(
    network: Network, tmp_path: Path
) -> None:
    first, second = network.hosts
    # The notebook's process has to see the first processes of all hosts, as mpiexec does; its network is the first host's.
    command = ["nsenter", "-t", str(first.pid), "-n", "--", sys.executable, SCRIPT]
    agent = str(mpiexec_agent(network, tmp_path))
    shells = {"HYDRA_LAUNCHER": "rsh", "HYDRA_LAUNCHER_EXEC": agent, "HVDLAB_SSH": agent}
    process = subprocess.run(
        [*command, f"{first.address}:1,{second.address}:1"],
        check=False,
        env={**os.environ, **shells, "OMP_NUM_THREADS": "1", "IPYTHONDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    assert found["values"] == [[3.0, False], [3.0, False]]
    assert found["variables"], "nothing of what mpiexec sends was seen"
    assert not found["token"]
    (file,) = found["secrets"]
    assert not Path(file).parent.exists()
