"""A pool over real ssh: an agent on the other host, which is killed, and the message where hvdlab is missing there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.network.namespaces import Network
from support.patience import PATIENCE

SCRIPT = str(Path(__file__).parents[2] / "system/hosts/ssh_pool.py")
LACKING = """\
import sys
from hvdlab.collectives.errors import StartError
from hvdlab.kernel_ext.notebook.pool import Pool
for python in ("/no/such/python", sys.argv[3]):
    options = {"shell": sys.argv[2], "python": python}
    try:
        Pool.start(1, launcher="ssh", hosts=sys.argv[1], launcher_options=options)
    except StartError as error:
        print(error)
"""


def on_first(network: Network, directory: Path, *words: str) -> str:
    """Return the output of a Python script on the first host."""
    environment = {"OMP_NUM_THREADS": "1", "IPYTHONDIR": str(directory)}
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with network.hosts[0].popen([sys.executable, *words], env=environment, **streams) as process:
        try:
            out, err = process.communicate(timeout=3 * PATIENCE)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0, err.decode()
    return str(out.decode())


def test_ranks_of_a_host_that_lost_its_agent_are_replaced_there(
    network: Network, ssh: str, tmp_path: Path
) -> None:
    first, second = network.hosts
    found = json.loads(on_first(network, tmp_path, SCRIPT, first.name, second.name, ssh).splitlines()[-1])
    places = [
        [first.name, 0, 2, 0, 10.0],
        [first.name, 1, 2, 0, 10.0],
        [second.name, 0, 2, 1, 10.0],
        [second.name, 1, 2, 1, 10.0],
    ]
    assert found["before"] == found["after"] == places
    assert found["repaired"] == [2, 3]
    assert found["kept"] == [41, 41, None, None]
    assert all(said.startswith(f"`ssh` for {second.name} ended") for said in found["deaths"].values()), found
    for host in network.hosts:
        assert [line for line in host.run("ps", "-eo", "args").splitlines() if "hvdlab." in line] == []


def test_what_the_other_host_lacks_is_said(network: Network, ssh: str, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    said = on_first(network, tmp_path, "-c", LACKING, network.hosts[1].name, ssh, str(bare)).splitlines()
    assert (
        "/no/such/python: No such file or directory. The interpreter of the ranks is not on that host"
        in said[0]
    )
    assert "lacks `hvdlab`: install hvdlab for it, or --launcher-option python=PATH" in said[1]
