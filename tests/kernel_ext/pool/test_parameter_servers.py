"""Parameter servers in a pool: they outlive ranks and the coordinator, and end with the pool."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvdlab.kernel_ext.pool import Pool
from hvdlab.magics.status_table import StatusTable
from patience import GONE, PATIENCE
from pool_recorder import Recorder

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

    coordinator = pool._base._base.coordinator
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
    pool.sync()  # the rank that was started anew takes part in the store that there is
    assert pulled(pool, [1]) == {7.0}
    assert pool.run(PUSH).errors == {}
    assert pulled(pool, [0, 1]) == {9.0}
    assert pool.run(MAKE).errors == {}  # the ranks there are now have a new store, on the same server
    assert set(pool.pull("server").values()) == {server}
    assert process.is_running()
    pool.stop()
    process.wait(GONE)


TOGETHER = """
import numpy as np
from hvdlab import kvstore
kv = kvstore.create("dist_sync")
values = {"a": np.zeros(3), "b": np.zeros(3), "large": np.zeros(4000)}
kv.init(list(values), list(values.values()))
kv.set_optimizer("test")

def step():
    for key in values:
        kv.push(key, np.ones_like(values[key]))
    for key in values:
        kv.pull(key, out=values[key])
    return [float(value.sum()) / value.size for value in values.values()]
"""


def test_a_worker_that_will_not_push_ends_the_rounds_on_all_servers(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "HVDLAB_KV_UPDATE": "servers",
        "HVDLAB_KV_SERVERS": "2",
        "MXNET_KVSTORE_BIGARRAY_BOUND": "1000",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    pool = start_pool(3)
    assert pool.run(TOGETHER).errors == {}
    assert list(pool.run("step()")) == [[3.0] * 3] * 3
    done = 1
    for cell, before, why in (
        ("if kv.rank != 1: step()", 0, "rank 1 finished its cell without it"),
        ("step()\nif kv.rank != 1: step()", 1, "rank 1 finished its cell without it"),
        (
            "step()\nif kv.rank == 1: raise ValueError('no data')\nstep()",
            1,
            "rank 1 failed: ValueError: no data",
        ),
        ("step()\nif kv.rank == 1: kv.barrier()\nelse: step()", 1, "all wait for each other"),
        (
            "step()\nif kv.rank != 1: kv.push('a', np.ones(3))",
            1,
            "",
        ),  # it is seen in the next one that nobody waits
    ):
        done += before
        errors = pool.run(cell).errors
        for rank in (0, 2) if why else ():
            # The pool interrupts those that wait in no collective where another has failed.
            assert why in errors[rank].evalue or errors[rank].interrupted, (cell, errors)
        for _ in range(2):  # nothing is left of what was pushed, and no error comes twice
            done += 1
            found = pool.run("step()")
            assert found.errors == {}, cell
            assert list(found) == [[3.0 * done] * 3] * 3, cell


LAGGING = """
import os, threading
if kv.rank == 0:
    kv.push("w", np.ones(3))
    kv.push("w", np.ones(3))
else:
    while not os.path.exists(release):
        threading.Event().wait(0.05)
    kv.push("w", np.ones(3))
kv.pull("w", out=np.zeros(3))
"""


def test_the_status_names_whom_a_bounded_push_waits_for(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HVDLAB_KV_STALENESS", "0")
    pool = start_pool(2)
    release = tmp_path / "release"
    assert pool.run(f"{MAKE}\nrelease = {str(release)!r}").errors == {}
    run = pool.start_run(LAGGING)
    waits: list[str] = []
    deadline = time.monotonic() + PATIENCE
    while not waits and time.monotonic() < deadline:
        waits = [one.collective for one in pool.status()[0].pending]
    release.touch()
    assert waits == ["wait for rank 1 (a push of key 'w' that others lack)"]
    assert run.wait(PATIENCE).errors == {}
    assert pool.status()[0].pending == ()
