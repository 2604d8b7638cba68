"""A rank of another host is debugged over the pool's connection: it listens nowhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.network.mpiexec_agent import mpiexec_agent
from support.network.namespaces import Network

pytest.importorskip("debugpy")
BIN = Path(sys.executable).parent
SCRIPT = str(Path(__file__).with_name("debugged.py"))
pytestmark = pytest.mark.skipif(not (BIN / "mpiexec").exists(), reason="no mpiexec beside this Python")


def test_a_rank_of_another_host_is_debugged_from_here(network: Network, tmp_path: Path) -> None:
    first, second = network.hosts
    # The notebook's process has to see the first processes of all hosts, as mpiexec does; its network is the first host's.
    command = ["nsenter", "-t", str(first.pid), "-n", "--", sys.executable, SCRIPT]
    hydra = {"HYDRA_LAUNCHER": "rsh", "HYDRA_LAUNCHER_EXEC": str(mpiexec_agent(network, tmp_path))}
    hydra["HVDLAB_SSH"] = hydra["HYDRA_LAUNCHER_EXEC"]
    process = subprocess.run(
        [*command, f"{first.address}:1,{second.address}:1"],
        check=False,
        env={**os.environ, **hydra, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    assert (found["line"], found["ok"]) == (3, True)
    assert found["value"] == repr(second.name)
    assert found["here"] != second.name
    assert found["sums"] == [3.0, 3.0]
