"""Recording, views and files of the ranks' operations continue when the coordinator was replaced."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.kernel_ext.notebook.trace_file import TraceFileWriter
from support.patience import PATIENCE
from support.pool_probe import PoolProbe

StartPool = Callable[..., Pool]

SET_UP = """
import numpy as np
import hvdlab.numpy as hvd
from hvdlab.collectives import context
rank = context.init().rank
"""
STEP = "hvd.allreduce(np.ones(1000), '{name}')\nhvd.metric('{name}', rank)"


def wait_until_seen(pool: Pool, name: str) -> None:
    """Wait until the recording has a span and a point of this name from each rank."""
    recording, deadline = pool.client.recording, Deadline(PATIENCE)
    while True:
        version = recording.version
        table = recording.table()
        spans = set(table.loc[table["name"] == name, "rank"])
        points = {rank for rank in (0, 1) if len(recording.points(rank, name))}
        if spans == points == {0, 1}:
            return
        assert recording.wait(version, timeout=deadline.remaining()), (spans, points)


def test_recordings_go_on_with_another_coordinator(start_pool: StartPool, tmp_path: Path) -> None:
    pool = start_pool(2)
    assert pool.run(SET_UP).errors == {}
    file = TraceFileWriter(pool.client, tmp_path / "trace.json")
    for number in range(3):
        name = f"with_coordinator_{number}"
        assert pool.run(STEP.format(name=name)).errors == {}
        wait_until_seen(pool, name)
        again = threading.Event()

        def reconnected(membership: object, again: threading.Event = again) -> None:
            again.set()

        pool.client.on_reconnected(reconnected)
        os.kill(PoolProbe(pool).coordinator.pid, signal.SIGKILL)
        assert again.wait(30)
    assert pool.run(STEP.format(name="last")).errors == {}
    wait_until_seen(pool, "last")
    file.stop()
    written = (tmp_path / "trace.json").read_text()
    names = [f"with_coordinator_{number}" for number in range(3)] + ["last"]
    assert [name for name in names if f'"tensor":"{name}"' not in written] == []
