"""A pool over ssh on two hosts whose ranks are behind relays: interrupts, the death of a relay and that of a rank."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from hosts import Network
from remote_shell import RemoteShell
from two_hosts import finished

SCRIPT = str(Path(__file__).with_name("relayed_pool.py"))


def test_a_pool_behind_relays(network: Network, shell: RemoteShell, tmp_path: Path) -> None:
    first, second = network.hosts
    environment = {
        "OMP_NUM_THREADS": "1",
        "IPYTHONDIR": str(tmp_path),
        "HVDLAB_RELAYS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    code, out, err = finished(
        first, [sys.executable, SCRIPT, first.name, second.name, shell.client], environment, 200
    )
    assert code == 0, err
    shell.wait()
    found = json.loads(out.splitlines()[-1])
    assert found["before"] == [[[rank], True, 4.0] for rank in range(4)]
    assert found["interrupted"] == dict.fromkeys("0123", "KeyboardInterrupt")
    assert found["ok"]
    # No rank has lost what it had, and all go on without relays.
    assert found["after"] == [[[rank], False, 4.0] for rank in range(4)]
    assert found["lost"] == {}
    assert found["deaths"] == [3]
    assert found["repaired"] == [3]
    assert found["again"] == [[[rank], False, 4.0] for rank in range(4)]
