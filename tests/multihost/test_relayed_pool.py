"""A pool over ssh on two hosts whose ranks are behind relays: interrupts, the death of a relay and that of a rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from hosts import Network
from remote_shell import RemoteShell

SCRIPT = str(Path(__file__).with_name("relayed_pool.py"))


def test_a_pool_behind_relays(network: Network, tmp_path: Path) -> None:
    first, second = network.hosts
    with RemoteShell(network, tmp_path) as shell:
        process = first.popen(
            [sys.executable, SCRIPT, first.name, second.name, shell.client],
            env={"OMP_NUM_THREADS": "1", "IPYTHONDIR": str(tmp_path), "HVDLAB_RELAYS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            out, err = process.communicate(timeout=200)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        assert process.returncode == 0, err.decode()
        shell.wait()
    found = json.loads(out.decode().splitlines()[-1])
    assert found["before"] == [[[rank], True, 4.0] for rank in range(4)]
    assert found["interrupted"] == dict.fromkeys("0123", "KeyboardInterrupt")
    assert found["ok"]
    # No rank has lost what it had, and all go on without relays.
    assert found["after"] == [[[rank], False, 4.0] for rank in range(4)]
    assert found["lost"] == {}
    assert found["deaths"] == [3]
    assert found["repaired"] == [3]
    assert found["again"] == [[[rank], False, 4.0] for rank in range(4)]
