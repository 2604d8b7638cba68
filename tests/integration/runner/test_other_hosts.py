"""``hvdlab run`` on two hosts, which are namespaces of this one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.network.namespaces import Network
from support.network.remote_shell import RemoteShell
from support.network.two_hosts import finished
from support.patience import PATIENCE, PROGRAM_PATIENCE, eventually

pytestmark = pytest.mark.root

SCRIPT = """
import json, os, socket
import numpy as np
import hvdlab.numpy as hvd
from hvdlab.collectives import context
engine = context.init()
total = hvd.allreduce(np.full(3, engine.rank + 1.0), op=hvd.Sum)
print(json.dumps({
    "place": [engine.rank, engine.size, engine.local_rank, engine.local_size, engine.cross_rank, engine.cross_size],
    "host": socket.gethostname(), "sum": total.tolist(), "token": context.take_settings().token,
    "address": os.environ["HVDLAB_ADDRESS"], "mine": os.environ.get("MINE"), "local": os.environ["LOCAL_RANK"],
}))
"""


def run_on(network: Network, shell: RemoteShell, *arguments: str) -> tuple[int, str, str]:
    """``hvdlab`` on the first host; exit code, stdout and stderr."""
    environment = {"HVDLAB_SSH": shell.client, "MINE": "all mine"}
    return finished(
        network.hosts[0], [sys.executable, "-m", "hvdlab", "run", *arguments], environment, PROGRAM_PATIENCE
    )


def test_two_hosts(network: Network, shell: RemoteShell, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    code, out, err = run_on(network, shell, "-np", "4", "-H", "host0:2,host1:2", sys.executable, str(script))
    assert code == 0, err
    found = {int(line[1]): json.loads(line.partition(":")[2]) for line in out.splitlines()}
    assert [found[rank]["place"] for rank in range(4)] == [
        [0, 4, 0, 2, 0, 2],
        [1, 4, 1, 2, 0, 2],
        [2, 4, 0, 2, 1, 2],
        [3, 4, 1, 2, 1, 2],
    ]
    assert [found[rank]["host"] for rank in range(4)] == ["host0", "host0", "host1", "host1"]
    assert [found[rank]["local"] for rank in range(4)] == ["0", "1", "0", "1"]
    assert all(rank["sum"] == [10.0] * 3 for rank in found.values())
    assert [found[rank]["address"] for rank in (0, 2)] == [host.address for host in network.hosts]
    assert {rank["mine"] for rank in found.values()} == {"all mine"}
    # Nothing secret is on a command line, where everybody on the host could read it.
    assert len(shell.commands) == 1
    assert found[0]["token"] not in shell.commands[0]
    assert "CERTIFICATE" not in shell.commands[0]


def test_a_failure_on_another_host(network: Network, shell: RemoteShell) -> None:
    program = "if [ $RANK = 1 ]; then echo oops >&2; exit 3; fi; sleep 1000"
    code, _, err = run_on(network, shell, "-H", "host0:1,host1:1", "bash", "-c", program)
    assert code == 3
    assert "hvdlab: rank 1 on host1 failed first: exit code 3" in err
    assert "hvdlab:   oops" in err
    assert not _running(network, "sleep 1000")


def test_a_host_that_can_not_be_reached(network: Network, shell: RemoteShell) -> None:
    code, _, err = run_on(
        network, shell, "-H", "host0:1,nowhere:1", "--network-interface", "eth0", "sleep", "1000"
    )
    assert code == 1
    assert "Could not resolve hostname nowhere" in err
    assert "rank 1 on nowhere failed first" in err
    assert not _running(network, "sleep 1000")


def test_ranks_of_other_hosts_end_with_the_launcher(network: Network, shell: RemoteShell) -> None:
    process = network.hosts[0].popen(
        [sys.executable, "-m", "hvdlab", "run", "-H", "host0:1,host1:1", "bash", "-c", "echo up; sleep 1000"],
        env={"HVDLAB_SSH": shell.client},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    lines = {process.stdout.readline(), process.stdout.readline()}
    assert lines == {b"[0]<stdout>:up\n", b"[1]<stdout>:up\n"}
    process.kill()
    process.communicate(timeout=PATIENCE)
    shell.wait()
    # The launcher, whose child the first host's agent was, has been killed: this test can't wait for the agent's end.
    eventually(lambda: not _running(network, "sleep 1000"), lambda: _running(network, "sleep 1000"))


def test_a_function_on_two_hosts(network: Network, shell: RemoteShell, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, socket, hvdlab\nprint(hvdlab.run(lambda x: (x, socket.gethostname()), (7,), hosts='host0:1,host1:2'))"
    )
    _, out, err = finished(
        network.hosts[0], [sys.executable, str(script)], {"HVDLAB_SSH": shell.client}, PROGRAM_PATIENCE
    )
    assert out == "[(7, 'host0'), (7, 'host1'), (7, 'host1')]\n", err


def _running(network: Network, command: str) -> list[str]:
    found = [host.run("ps", "-ef") for host in network.hosts]
    return [line for text in found for line in text.splitlines() if command in line and "bash" not in line]


def test_a_host_that_is_cut_off(network: Network, shell: RemoteShell, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time\nimport numpy as np\nimport hvdlab.numpy as hvd\nfrom hvdlab.collectives import context\n"
        "context.init()\nprint('up')\n"
        "while True:\n    hvd.allreduce(np.ones(1), name='loss')\n    time.sleep(0.05)\n"
    )
    process = network.hosts[0].popen(
        [sys.executable, "-m", "hvdlab", "run", "-H", "host0:1,host1:1", sys.executable, str(script)],
        env={"HVDLAB_SSH": shell.client, "HVDLAB_PING_AFTER": "1", "HVDLAB_DEAD_AFTER": "3"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    lines = {process.stdout.readline(), process.stdout.readline()}
    assert lines == {b"[0]<stdout>:up\n", b"[1]<stdout>:up\n"}
    network.hosts[1].cut()
    try:
        _, err = process.communicate(timeout=PROGRAM_PATIENCE)
    finally:
        network.hosts[1].mend()
    assert process.returncode == 1
    # Either side may be the first to give the other up.
    said = ("failed first: exit code 1", "failed first: no sign of life for ")
    assert any(f"rank 1 on host1 {how}" in err.decode() for how in said), err.decode()
    shell.wait()
