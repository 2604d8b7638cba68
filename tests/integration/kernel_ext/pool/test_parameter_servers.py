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


STORES = """
import os, signal
import numpy as np
import hvdlab.numpy as hvd
from hvdlab import kvstore
hvd.init()
stores = {kind: kvstore.create(kind) for kind in ("dist_sync", "dist_async", "horovod", "byteps")}
"""
USE_STORES = """
found = {}
for kind, kv in stores.items():
    first, total = np.zeros(2, np.float32), np.ones(2, np.float32)
    if kind == "dist_async":
        kv.set_optimizer("test")
    if kind in ("dist_sync", "dist_async"):
        kv.init("new", np.full(2, 5.0, np.float32))
        kv.pull("new", out=first)
        kv.pushpull("new", total, out=total)
        if kind == "dist_async":
            hvd.barrier()
            kv.pull("new", out=total)
            hvd.barrier()
    else:
        kv.broadcast("new", np.full(2, 5.0 + hvd.rank(), np.float32), out=first)
        kv.pushpull("new", total, out=total)
    found[kind] = kv.rank, kv.num_workers, float(total[0])
    if kind != "dist_async":  # of which another worker may have pushed already
        found[kind] += (float(first[0]),)
found
"""


def test_all_kinds_go_on_after_the_loss_of_the_first_worker(start_pool: StartPool) -> None:
    """Others have the numbers of the workers and give the first values then."""
    pool = start_pool(3)
    assert pool.run(STORES).errors == {}
    assert pool.run(
        "if hvd.rank() == 0: os.kill(os.getpid(), signal.SIGKILL)\nhvd.barrier()"
    ).deaths.keys() == {0}
    results = pool.run(USE_STORES)
    assert results.errors == {}
    for number, rank in enumerate((1, 2)):
        assert results[rank] == {
            "dist_sync": (number, 2, 2.0, 5.0),
            "dist_async": (number, 2, 7.0),
            "horovod": (number, 2, 2.0, 6.0),
            "byteps": (number, 2, 2.0, 6.0),
        }
