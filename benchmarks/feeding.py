"""Costs of each arriving span for the notebook's process: taking it in, deriving series from it, sending it to a view.

    python benchmarks/feeding.py [--seconds 30] [--json FILE]

Batches are made as ranks make them (8 ranks, 161 gradients per step in fused operations, 20,000 spans per second, ten batches
per rank and second) but without waiting for the time to pass. Figures are processor time of the quickest of several rounds.
``memory`` is the growth of the process after the given number of seconds of such a stream.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from hvdlab.collectives.planes.base import PhaseTimes
from hvdlab.collectives.tracing.recorder import Recorder
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.types import DType, OpKind
from hvdlab.widgets.recording_feed import SeriesNews, pack_rows, rank_rows

SECOND = 1_000_000_000  # in nanoseconds, the unit of spans
GRADIENTS = 161  # of a ResNet-50
METRICS = 5  # points of each sample

Batches = list[tuple[int, bytes]]


class Ranks:
    """Ranks that record steps, on a clock that is not the real one."""

    def __init__(self, size: int, rate: float) -> None:
        self.recorders = [Recorder(rank) for rank in range(size)]
        self.now = 1000 * SECOND
        self._pause = round(size * GRADIENTS / rate * SECOND)
        self._random = random.Random(1)
        self._sequence = 0
        self._sampled = 0

    def batches(self, seconds: float) -> Iterator[Batches]:
        """Yield the batches of each tenth of a second."""
        end, due = self.now + round(seconds * SECOND), self.now + SECOND // 10
        while self.now < end:
            self._step()
            self.now += self._pause
            if self.now >= due:
                due += SECOND // 10
                yield self._flush()

    def _step(self) -> None:
        begins = [self.now + self._random.randrange(200_000) for _ in self.recorders]
        phases = PhaseTimes()
        first = 0
        while first < GRADIENTS:
            end = min(GRADIENTS, first + self._random.randrange(3, 12))
            self._sequence += 1
            ready = max(begins) + end * 20_000 + 100_000
            phases.wait, phases.transfer = self._random.randrange(40_000), 30_000
            times = (ready, ready + 20_000, ready + 40_000 + 40_000 * (end - first))
            for begin, recorder in zip(begins, self.recorders, strict=True):
                tensors = [
                    (recorder.name_id(f"grad.{i}", "cell [2] line 24"), 64, begin + i * 20_000)
                    for i in range(first, end)
                ]
                order = (0, self._sequence, self._sequence)
                recorder.spans(OpKind.ALLREDUCE, DType.F32, *order, *times, phases, True, tensors)
            first = end

    def _flush(self) -> Batches:
        sample = self.now // SECOND != self._sampled
        self._sampled = self.now // SECOND
        for recorder in self.recorders:
            recorder.members(0, 0, len(self.recorders))
            recorder.clock(self.now, self.now, self.now)
            for i in range(METRICS if sample else 0):
                recorder.metric(f"metric {i}", self._random.random(), None, self.now)
        return [(rank, batch) for rank, one in enumerate(self.recorders) for batch in one.drain()]


def rss() -> float:
    return float(psutil.Process().memory_info().rss / 1e6)


def fed(size: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Return microseconds of the processor per row."""
    before = rss()
    recording, ranks = Recording(), Ranks(size, 20_000)
    for tenth in ranks.batches(seconds):
        for rank, batch in tenth:
            recording.feed(rank, batch)
    times: dict[str, list[float]] = {"feed": [], "pack": [], "points": []}
    news = SeriesNews(recording)
    while news.next_batch() and news.more:
        pass
    for _ in range(rounds):
        prepared = list(ranks.batches(2))
        begin, first = time.process_time(), recording.end
        for tenth in prepared:
            for rank, batch in tenth:
                recording.feed(rank, batch)
        fed_at = time.process_time()
        rows = recording.rows_since(first)[1]
        pack_rows(rows, recording.origin_ns or 0)
        packed = time.process_time()
        news.next_batch()
        for name, length in (
            ("feed", fed_at - begin), ("pack", packed - fed_at), ("points", time.process_time() - packed)
        ):  # fmt: skip
            times[name].append(length / len(rows) * 1e6)
    looks = []
    for _ in range(rounds):
        begin = time.process_time()
        rank_rows(recording)
        looks.append((time.process_time() - begin) * 1000)
    return {
        **{f"{name}_us_per_row": round(min(found), 2) for name, found in times.items()},
        **{f"{name}_us_per_row_median": round(statistics.median(found), 2) for name, found in times.items()},
        "ranks_ms_per_look": round(min(looks), 1),
        "refused": recording.refused + sum(one.refused for one in ranks.recorders),
        "memory_mb": round(rss() - before),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=30, help="of the stream before it is measured")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {load:.0f} before",
        **fed(options.ranks, options.seconds, options.rounds),
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
