"""Metrics of a recording on their way to an exporter."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

import hvdlab
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.metrics.export import Point, RecordingExport
from hvdlab.collectives.tracing.record_format import Event, Metric, clock_domain, encode
from hvdlab.collectives.tracing.recording import Recording
from support.patience import PATIENCE
from support.timeline_traces import steps

SECOND = 10**9


class Kept:
    """Exporter that keeps its metrics."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.closed = threading.Event()
        self._came = threading.Condition()

    def write(self, points: Sequence[Point]) -> None:
        with self._came:
            self.points += points
            self._came.notify_all()

    def close(self) -> None:
        self.closed.set()

    def wait_for(self, count: int) -> list[Point]:
        with self._came:
            assert self._came.wait_for(lambda: len(self.points) >= count, PATIENCE), self.points
            return list(self.points)


def feed(recording: Recording, rank: int, *events: Event, clock: int | None = None) -> None:
    recording.feed(rank, encode(rank, events, clock=clock_domain() if clock is None else clock))


def test_what_is_there_and_what_comes_is_handed_over_once() -> None:
    recording, kept = Recording(), Kept()
    begin = time.time()
    feed(recording, 0, Metric("loss", 0.5, 7, time.monotonic_ns()))
    export = hvdlab.export(kept, recording)
    kept.wait_for(1)
    feed(
        recording,
        3,
        Metric("x", 1.5, None, time.monotonic_ns()),
        Metric("loss", 0.25, 8, time.monotonic_ns()),
    )
    assert export.close(10)
    assert [(one.rank, one.name, one.value, one.step) for one in kept.points] == [
        (0, "loss", 0.5, 7),
        (3, "x", 1.5, None),
        (3, "loss", 0.25, 8),
    ]
    assert all(begin - 0.01 < one.time < time.time() + 0.01 for one in kept.points)
    assert kept.closed.is_set()
    assert export.exported == 3


def test_it_ends_with_the_recording() -> None:
    recording, kept = Recording(), Kept()
    export = hvdlab.export(kept, recording)
    feed(recording, 0, Metric("loss", 0.5, 7, SECOND))
    recording.close()
    assert kept.closed.wait(PATIENCE)
    assert [one.value for one in kept.points] == [0.5]
    assert export.close(10)


def test_a_recording_that_is_closed_already_is_exported_whole() -> None:
    recording, kept = Recording(), Kept()
    feed(recording, 0, *(Metric("loss", step, step, step * SECOND) for step in range(2500)))
    recording.close()
    export = hvdlab.export(kept, recording)
    assert kept.closed.wait(PATIENCE)
    assert [one.value for one in kept.points] == list(range(2500))
    assert export.close(10)


class Targeted(Kept):
    target = "here"


def test_exporting_to_the_same_place_again_replaces_the_export() -> None:
    recording, elsewhere = Recording(), Recording()
    first, other, second, third = Targeted(), Targeted(), Targeted(), Targeted()
    exports = [hvdlab.export(first, recording), hvdlab.export(other, elsewhere)]
    feed(recording, 0, Metric("loss", 0.5, 7, SECOND))
    exports.append(hvdlab.export(second, recording))
    assert first.closed.is_set()
    assert not other.closed.is_set()
    feed(recording, 0, Metric("loss", 0.25, 8, SECOND))
    assert [one.value for one in second.wait_for(1)] == [0.25]  # the place has the other one already
    exports.append(hvdlab.export(third, recording, names="lo*"))
    assert [one.value for one in third.wait_for(2)] == [0.5, 0.25]  # but not of these metrics
    for export in exports:
        assert export.close(10)
    assert [one.value for one in first.points] == [0.5]


def test_only_what_is_wanted_goes() -> None:
    recording, kept = Recording(), Kept()
    feed(recording, 0, Metric("loss", 0.5, 7, SECOND), Metric("accuracy", 0.1, 7, SECOND))
    hvdlab.export(kept, recording, names="acc*").close(10)
    assert [one.name for one in kept.points] == ["accuracy"]


def test_what_may_still_change_is_handed_over_once_it_is_final() -> None:
    recording, kept = Recording(), Kept()
    export = RecordingExport(recording, kept, ["*"], ("derived",), interval=0.01)
    feed(recording, 0, Metric("derived", 0.5, None, 10 * SECOND), Metric("first", 0.0, None, 12 * SECOND))
    assert [one.name for one in kept.wait_for(1)] == ["first"]
    feed(recording, 0, Metric("derived", 0.6, None, 10 * SECOND))  # the same second, known better now
    feed(recording, 0, Metric("second", 0.0, None, 14 * SECOND), Metric("derived", 0.9, None, 13 * SECOND))
    found = {(one.name, one.value) for one in kept.wait_for(3)}
    assert found == {("first", 0.0), ("second", 0.0), ("derived", 0.6)}
    assert export.close(10)  # nothing changes it any more
    assert [one.value for one in kept.points[3:]] == [0.9]


def test_what_follows_from_spans_is_exported_too() -> None:
    recording, kept = Recording(), Kept()
    for rank, batch in steps(2, 40):
        recording.feed(rank, batch)
    hvdlab.export(kept, recording, names="hvdlab/*").close(10)
    names = {one.name for one in kept.points}
    assert {"hvdlab/share/wait", "hvdlab/lateness", "hvdlab/bandwidth/bus/allreduce"} <= names
    keys = [(one.rank, one.name, one.time) for one in kept.points]
    assert len(set(keys)) == len(keys)


def test_if_clocks_can_not_be_compared_the_newest_point_is_from_now() -> None:
    recording, kept = Recording(), Kept()
    events = [Metric("loss", 0.0, at, at * SECOND) for at in (100, 102)]
    feed(recording, 0, *events, clock=clock_domain() + 1)
    export = hvdlab.export(kept, recording)
    kept.wait_for(2)
    now = time.time()
    export.close(10)
    assert kept.points[1].time - kept.points[0].time == pytest.approx(2)
    assert kept.points[1].time == pytest.approx(now, abs=5)


def test_what_is_no_exporter_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="this is dict"):
        hvdlab.export({}, Recording())  # type: ignore[arg-type]  # that is the point
