"""Metrics of a pool's ranks, from their cells to the process that started the pool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hvdlab
from hvdlab.collectives.time_limits import Deadline
from hvdlab.exporters import JsonLines
from hvdlab.kernel_ext.notebook.pool import Pool
from support.patience import PATIENCE

SETUP = """\
import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.bindings.monitoring import StepMeter
rank = context.init().rank
meter = StepMeter()
"""
TRAIN = """\
for step in range(3):
    hvd.metric("loss", rank + step / 10, step)
    meter.step()
"""


def values(pool: Pool, name: str) -> dict[int, list[float]]:
    found = {rank: pool.client.recording.points(rank, name)["value"].tolist() for rank in range(2)}
    return {rank: list(some) for rank, some in found.items()}


def wait_for(pool: Pool, name: str, count: int) -> None:
    """Wait until each rank's series has so many points."""
    recording, deadline = pool.client.recording, Deadline(PATIENCE)
    while True:
        version = recording.version
        if all(len(some) >= count for some in values(pool, name).values()):
            return
        assert recording.wait(version, timeout=deadline.remaining()), values(pool, name)


def test_cells_record_metrics_and_ranks_are_sampled_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HVDLAB_METRICS_INTERVAL", "0.05")
    path = tmp_path / "metrics.jsonl"
    with Pool.start(2) as pool:
        export = hvdlab.export(JsonLines(path), pool, names=["loss", "hvdlab/rss"])
        assert not pool.run(SETUP).errors
        assert not pool.run(TRAIN).errors
        assert not pool.run(TRAIN).errors
        wait_for(pool, "loss", 6)
        wait_for(pool, "hvdlab/step_time", 4)
        wait_for(pool, "hvdlab/rss", 1)
        assert values(pool, "loss") == {rank: [rank + step / 10 for step in (0, 1, 2) * 2] for rank in (0, 1)}
        # Two of each cell's three: the first has no step before it, or one in another cell.
        assert all(len(some) == 4 for some in values(pool, "hvdlab/step_time").values())
        assert all(10e6 < size < 10e9 for some in values(pool, "hvdlab/rss").values() for size in some)
        assert export.close(10)
    exported = [json.loads(line) for line in path.read_text().splitlines()]
    assert {(one["rank"], one["name"]) for one in exported} == {
        (rank, name) for rank in (0, 1) for name in ("loss", "hvdlab/rss")
    }
