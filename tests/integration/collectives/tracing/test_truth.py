"""A trace of real ranks compared with the ranks' own readings of the clock."""

from __future__ import annotations

import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.runner.check_trace import check, load
from support.engine_probe import EngineProbe
from support.patience import PATIENCE
from support.ranks.resident import Ranks, resident_ranks

LATE = 0.08  # seconds that one rank lets pass in each step after the other has come
STEPS = 6


ranks = resident_ranks(2)


def train(path: str) -> list[tuple[str, int, int, int]]:
    """Allreduces for which the ranks are late in turn; when each was submitted (between two looks) and done."""
    engine = context.engine()
    other_came = threading.Semaphore(0)
    engine.on_mail("came", lambda sender, body: other_came.release())
    if engine.rank == 0:
        engine.start_timeline(path, True)
    hvd.barrier(name="begin")
    seen = []
    for step in range(STEPS):
        is_late = step % 2 == engine.rank
        if is_late:
            assert other_came.acquire(timeout=PATIENCE), "the other rank does not come"
            time.sleep(LATE)
        before = time.monotonic_ns()
        handle = hvd.allreduce_async(np.ones(100_000, np.float32), name=f"grad{step}")
        after = time.monotonic_ns()
        if not is_late:
            engine.post("came", b"", [1 - engine.rank])
        hvd.synchronize(handle)
        seen.append((f"grad{step}", before, after, time.monotonic_ns()))
        engine.recorder.metric("loss", 1 / (step + 1), step)
    EngineProbe(engine).wait_for_records()
    hvd.barrier(name="end")
    if engine.rank == 0:
        engine.stop_timeline()
    return seen


def nanos(event: dict[str, Any]) -> int:
    at: float = event["ts"]
    return round(at * 1000)


def test_the_trace_agrees_with_the_clock_of_each_rank(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    seen = ranks.run(train, str(path))
    events = load(path.read_text())
    assert check(events) == []
    negotiations = {
        (event["pid"], event["args"]["tensor"]): event for event in events if event["name"] == "NEGOTIATE_ALLREDUCE" and event["ph"] == "b"
    }  # fmt: skip
    operations = {
        (event["pid"], event["args"]["tensor"]): event for event in events if event["name"] == "ALLREDUCE"
    }
    ends = {
        (event["pid"], event["id2"]["local"]): event for event in events if event["name"] == "NEGOTIATE_ALLREDUCE" and event["ph"] == "e"
    }  # fmt: skip
    assert len(negotiations) == len(operations) == 2 * STEPS
    for rank in range(2):
        for name, before, after, done in seen[rank]:
            begin, operation = negotiations[rank, name], operations[rank, name]
            ready = nanos(ends[rank, begin["id2"]["local"]])
            assert before <= nanos(begin) <= after
            assert nanos(begin) <= ready <= nanos(operation)
            assert nanos(operation) + round(operation["dur"] * 1000) <= done
            phases = sum(operation["args"][f"{phase}_us"] for phase in ("pack", "transfer", "wait", "unpack"))
            assert 0 < phases <= operation["dur"]


def test_the_rank_that_was_late_is_named_and_by_how_much(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    seen = ranks.run(train, str(path))
    events = load(path.read_text())
    marks = {event["args"].get("tensor"): event for event in events if event["name"] == "LAST_ARRIVAL"}
    for step in range(STEPS):
        mark = marks[f"grad{step}"]["args"]
        late, early = seen[step % 2][step], seen[1 - step % 2][step]
        assert mark["last_rank"] == step % 2
        assert (late[1] - early[2]) / 1000 <= mark["spread_us"] <= (late[2] - early[1]) / 1000
        assert mark["arrival_offset_us"][f"rank {step % 2}"] == mark["spread_us"]
    cycles = [nanos(event) for event in events if event["name"] == "CYCLE_START" and event["pid"] == 0]
    assert len(cycles) >= STEPS
    assert all(first <= second for first, second in pairwise(cycles))
    assert sum(event["name"] == "loss" for event in events) >= 2 * STEPS
