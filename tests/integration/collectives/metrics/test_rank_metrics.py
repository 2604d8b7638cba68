"""``metric()`` on ranks, and its values in a recording elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives.client import Client
from hvdlab.collectives.time_limits import Deadline
from hvdlab.collectives.tracing.recording import Recording
from support.patience import PATIENCE
from support.ranks.resident import Ranks, resident_ranks

two = resident_ranks(2)


@pytest.fixture
def recording(two: Ranks) -> Iterator[Recording]:
    with Client.connect(two.coordinator.address, two.coordinator.client_token) as client:
        yield client.recording


def named(recording: Recording, name: str, count: int) -> list[tuple[int, float, float, int]]:
    """Wait until there are ``count`` metrics of that name: rank, value, step (NaN: none) and time of each."""
    deadline = Deadline(PATIENCE)
    while True:
        version = recording.version
        found = [
            (rank, *point)
            for rank in (0, 1)
            for point in recording.points(rank, name)[["value", "step", "time"]].tolist()
        ]
        if len(found) >= count:
            return found
        assert recording.wait(version, timeout=deadline.remaining()), f"{len(found)} of {count} came"


def record(name: str, value: float) -> tuple[int, int]:
    begin = time.monotonic_ns()
    hvd.metric(name, value, 7)
    hvd.metric(name, value * 2)
    return begin, time.monotonic_ns()


def test_what_ranks_record_is_in_a_recording_at_once(two: Ranks, recording: Recording) -> None:
    times = two.run(record, per_rank=[("loss", 0.5), ("loss", 1.5)])
    found = named(recording, "loss", 4)
    assert {(rank, value, None if math.isnan(step) else step) for rank, value, step, _ in found} == {
        (0, 0.5, 7),
        (0, 1.0, None),
        (1, 1.5, 7),
        (1, 3.0, None),
    }
    for rank, _, _, time_ns in found:
        assert times[rank][0] <= time_ns <= times[rank][1]
