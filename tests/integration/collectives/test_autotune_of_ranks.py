"""Tuning with real ranks: the log shows the trials and the choice, and results are right all the while."""

from __future__ import annotations

import csv
import itertools
import time
from pathlib import Path

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from support.ranks.resident import Ranks

COUNTS = (3, 1_000, 70_000, 200_000)


def train(until: str, limit: float) -> int:
    """Run steps with right results until ``until`` has the last line of a finished tuner; returns how many."""
    rank, size = context.engine().rank, context.engine().size
    deadline = time.monotonic() + limit
    for step in range(100_000):
        handles = [
            hvd.allreduce_async(np.full(count, rank + step, np.float32), f"g{i}", op=hvd.Sum)
            for i, count in enumerate(COUNTS)
        ]
        expected = sum(r + step for r in range(size))
        for handle, count in zip(handles, COUNTS, strict=True):
            result = np.asarray(hvd.synchronize(handle))
            assert result.shape == (count,)
            assert (result == expected).all()
        if step % 20 == 0:
            done = Path(until).exists() and "best" in Path(until).read_text()
            if np.asarray(hvd.allreduce(np.array([float(done)]), "done", op=hvd.Min))[0]:
                return step
        assert time.monotonic() < deadline
    raise AssertionError("it never ended")


@pytest.mark.parametrize("size", [2, 3])
def test_the_log_tells_what_was_tried(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "tuning.csv"
    for name, value in {
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_LOG": str(log),
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
        "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "3",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "8",
        "HOROVOD_FUSION_THRESHOLD": "2000000",
    }.items():
        monkeypatch.setenv(name, value)
    with Ranks(size) as ranks:
        ranks.start(train, str(log), 60).results(timeout=70)
        rows = list(csv.DictReader(log.read_text().splitlines()))
        ranks.run(train, str(log), 20)  # with the setting that is kept
        assert log.read_text().count("\n") == len(rows) + 1, "it goes on after the end"
    phases = [phase for phase, _ in itertools.groupby(row["phase"] for row in rows)]
    assert phases == ["warmup", "sample", "check", "best"]
    assert sum(row["phase"] == "sample" for row in rows) == 8
    assert rows[0]["fusion_threshold_bytes"] == "2000000"
    settings = [tuple(row.values())[2:5] for row in rows]
    assert len(set(settings[1:-1])) > 3, "nothing was tried"
    assert settings[-1] in settings[1:-1]
    assert all(float(row["score_bytes_per_second"]) > 0 for row in rows)


def test_without_the_switch_nothing_is_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "tuning.csv"
    monkeypatch.setenv("HOROVOD_AUTOTUNE_LOG", str(log))
    with Ranks(1) as ranks:
        ranks.run(_one)
    assert not log.exists()


def _one() -> None:
    for _ in range(50):
        hvd.allreduce(np.ones(10_000), "x")
