"""Parameter servers of a job on several hosts leave none of their directories, which hold keys and tokens."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdlab.kernel_ext.notebook.pool import Pool
from integration.runner.conftest import Launcher
from support.network import loopback as loopback_hosts

SCRIPT = """
import os, tempfile
import numpy as np
from pathlib import Path
from hvdlab import kvstore
import hvdlab.numpy as hvd
from hvdlab.collectives import context
engine = context.init()
kv = kvstore.create("dist_async")
kv.init("w", np.zeros(4, np.float32))
kv.set_optimizer(kvstore.optimizer.create("sgd"))
kv.push("w", np.ones(4, np.float32))
hvd.barrier()
if engine.rank == 0:
    print(len(list(Path(tempfile.gettempdir()).rglob("launch.json"))))
hvd.barrier()
end = "{end}"
if end == "killed":
    os.kill(os.getpid(), 9)
"""

POOLED = """
import numpy as np
from hvdlab import kvstore
kv = kvstore.create("dist_async")
kv.init("w", np.zeros(4, np.float32))
kv.set_optimizer(kvstore.optimizer.create("sgd"))
kv.push("w", np.ones(4, np.float32))
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Yield a directory for the files of a job, with a path that leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(prefix="hvd-", dir="/tmp") as name:
        yield Path(name)


@pytest.mark.parametrize("end", ["returned", "killed"])
def test_nothing_is_left_of_servers_of_two_hosts(
    launcher: Launcher, tmp_path: Path, temporary: Path, end: str
) -> None:
    script = launcher.script(SCRIPT.replace("{end}", end))
    environment = {"TMPDIR": str(temporary), "HVDLAB_SSH": loopback_hosts.options(tmp_path)["shell"]}
    hosts = loopback_hosts.named(2, 1)
    ran = launcher.run("-H", hosts, sys.executable, script, env=environment)
    assert ran.of(0) == ["1"], ran.err  # the hosts are one machine, whose workers share a server
    assert (ran.code == 0) == (end == "returned")
    assert [path.relative_to(temporary) for path in temporary.rglob("*")] == []


def test_nothing_is_left_of_servers_of_a_pool(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(temporary))
    options = loopback_hosts.options(tmp_path)
    pool = Pool.start(2, launcher="ssh", hosts=loopback_hosts.named(2, 1), launcher_options=options)
    try:
        assert pool.start_run(POOLED).wait(60).ok
        assert len(list(temporary.rglob("launch.json"))) == 2
    finally:
        pool.stop()
    assert list(temporary.rglob("kv*")) == []
