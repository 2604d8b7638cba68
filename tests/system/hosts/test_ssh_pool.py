"""A pool over ssh on two hosts, of one of which the agent is killed, or the cable pulled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.network.namespaces import Network
from support.network.remote_shell import RemoteShell
from support.network.two_hosts import finished

SCRIPT = str(Path(__file__).with_name("ssh_pool.py"))
CUT = str(Path(__file__).with_name("cut_pool.py"))
DEAD_AFTER = 2.0  # seconds of silence after which a host is lost: short, for a short test


def test_ranks_of_a_host_that_lost_its_agent_are_replaced_there(
    network: Network, shell: RemoteShell, tmp_path: Path
) -> None:
    first, second = network.hosts
    environment = {"OMP_NUM_THREADS": "1", "IPYTHONDIR": str(tmp_path)}
    code, out, err = finished(
        first, [sys.executable, SCRIPT, first.name, second.name, shell.client], environment, 200
    )
    assert code == 0, err
    shell.wait()
    found = json.loads(out.splitlines()[-1])
    places = [
        [first.name, 0, 2, 0, 10.0],
        [first.name, 1, 2, 0, 10.0],
        [second.name, 0, 2, 1, 10.0],
        [second.name, 1, 2, 1, 10.0],
    ]
    assert found["before"] == places
    program = Path(sys.executable).name  # stands for ssh
    reason = f"`{program}` for {second.name} ended with exit code 137"
    assert set(found["deaths"]) == {"2", "3"}
    assert all(said.startswith(reason) for said in found["deaths"].values()), found["deaths"]
    assert found["lost"] == found["deaths"]
    assert found["repaired"] == [2, 3]
    assert found["after"] == places
    assert found["kept"] == [41, 41, None, None]
    assert [(rank, state) for rank, _, state in found["status"]] == [(rank, "idle") for rank in range(4)]
    assert len(shell.commands) == 2  # an agent, and the one after it
    for host in network.hosts:
        left = [line for line in host.run("ps", "-eo", "args").splitlines() if "hvdlab" in line]
        assert left == []


def test_ranks_of_a_host_that_was_cut_off_have_their_variables(
    network: Network, shell: RemoteShell, tmp_path: Path
) -> None:
    first, second = network.hosts
    process = first.popen(
        [sys.executable, CUT, first.name, second.name, shell.client],
        env={
            "OMP_NUM_THREADS": "1",
            "IPYTHONDIR": str(tmp_path),
            "HVDLAB_PING_AFTER": "0.5",
            "HVDLAB_DEAD_AFTER": str(DEAD_AFTER),
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for wanted, act in ((b"cut\n", second.cut), (b"lost\n", second.mend)):
            assert process.stdout.readline() == wanted
            act()
            process.stdin.write(b"\n")
            process.stdin.flush()
        out, err = process.communicate(timeout=200)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    finally:
        second.mend()
    assert process.returncode == 0, err.decode()
    shell.wait()
    found = json.loads(out.decode().splitlines()[-1])
    assert found["ok"], "the cell ran on the ranks that were cut off, too, when they were back"
    assert found["after"] == found["before"]
    assert found["sum"] == [10.0] * 4
    assert found["lost"] == {}
