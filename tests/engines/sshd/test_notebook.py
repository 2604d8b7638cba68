"""The example of a notebook's ranks on hosts that are reached by ssh."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from support.jupyter.notebook_in_kernel import command
from support.network.namespaces import Network
from support.patience import PATIENCE


def test_the_notebook(network: Network, ssh: str, tmp_path: Path) -> None:
    first, second = network.hosts
    wrapper = tmp_path / "bin/ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {ssh} "$@"\n')
    wrapper.chmod(0o755)
    environment = {
        "HOSTS": f"{first.name}:1,{second.name}:1",
        "PATH": f"{wrapper.parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with first.popen(command("ssh"), env=environment, cwd=tmp_path, **streams) as process:
        try:
            out, _ = process.communicate(timeout=5 * PATIENCE)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0, out.decode()
    for host in network.hosts:
        assert [line for line in host.run("ps", "-eo", "args").splitlines() if "hvdlab." in line] == []
