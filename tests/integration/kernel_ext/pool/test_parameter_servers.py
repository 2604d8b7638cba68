"""Parameter servers in a pool: they outlive ranks and the coordinator, and end with the pool."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import psutil

from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.magics.pool_magics import StatusTable
from support.patience import GONE, PATIENCE
from support.pool_probe import PoolProbe
from support.pool_recorder import Recorder

StartPool = Callable[..., Pool]

MAKE = """
import numpy as np
from hvdlab import kvstore
kv = kvstore.create("dist_async")
kv.set_optimizer("test")
kv.init("w", np.zeros(3))
server = kv.servers()[0].pid
"""
PUSH = """
kv.push("w", np.ones(3))
out = np.zeros(3)
kv.pull("w", out=out)
"""
INTERRUPTED = """
kv.push("w", np.ones(3))
print("at it", flush=True)
while True:
    kv.pushpull("w", np.zeros(3), out=out)
"""


def pulled(pool: Pool, ranks: list[int]) -> set[Any]:
    assert pool.run("kv.pull('w', out=out)", ranks=ranks).errors == {}
    return set(pool.pull("float(out[0])", ranks).values())


def test_servers_outlive_ranks_and_the_coordinator_and_end_with_the_pool(start_pool: StartPool) -> None:
    pool = start_pool(2)
    assert pool.run(MAKE).errors == {}
    (server,) = set(pool.pull("server").values())
    process = psutil.Process(server)
    assert [row[2:5] for row in StatusTable(pool.status()).server_cells()] == [(str(server), "1", "24 B")]
    assert pool.run(PUSH).errors == {}
    assert pulled(pool, [0, 1]) == {2.0}

    out = Recorder()
    run = pool.start_run(INTERRUPTED, out=out)
    out.wait_for("at it", [0, 1])
    pool.interrupt()
    assert set(run.wait(PATIENCE).errors) == {0, 1}
    assert pulled(pool, [0, 1]) == {4.0}

    coordinator = PoolProbe(pool).coordinator
    recovered = threading.Event()
    pool.client.on_reconnected(lambda world: recovered.set())
    os.kill(coordinator.pid, signal.SIGKILL)
    assert recovered.wait(PATIENCE)
    assert pool.run(PUSH).errors == {}
    assert pulled(pool, [0, 1]) == {6.0}

    os.kill(pool.pull("__import__('os').getpid()")[1], signal.SIGKILL)
    pool.client.wait_for(lambda membership: membership.ranks == (0,), PATIENCE)
    assert pool.run(PUSH, ranks=[0]).errors == {}
    assert pulled(pool, [0]) == {7.0}
    pool.repair()
    pool.sync()  # the restarted rank takes part in the store that there is
    assert pulled(pool, [1]) == {7.0}
    assert pool.run(PUSH).errors == {}
    assert pulled(pool, [0, 1]) == {9.0}
    assert pool.run(MAKE).errors == {}  # the ranks there are now have a new store, on the same server
    assert set(pool.pull("server").values()) == {server}
    assert process.is_running()
    pool.stop()
    process.wait(GONE)
