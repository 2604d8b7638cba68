"""Series on their way to the browser."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hvdlab.collectives.tracing.record_format import Metric, encode
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.widgets import recording_feed
from hvdlab.widgets.recording_feed import POINT_BYTES, RecordingFeed
from support.patience import PATIENCE

START = 5_000_000_000
COLUMNS = [("time", "<f8"), ("value", "<f8"), ("step", "<f8"), ("series", "<u4"), ("number", "<u4")]


class Browser:
    """Browser that takes points as the script does: by their numbers, none twice."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.series: list[dict[str, Any]] = []
        self.points: dict[int, tuple[float, float, str]] = {}
        self.next = 0
        self.rows = 0

    def send(self, message: dict[str, Any], buffers: list[bytes]) -> None:
        columns, at = {}, 0
        for name, kind in COLUMNS:
            columns[name] = np.frombuffer(buffers[1], kind, message["points"], at)
            at += columns[name].nbytes
        assert at == len(buffers[1]) == message["points"] * POINT_BYTES
        with self.changed:
            self.changed.notify_all()
            self.rows += message["count"]
            assert message["pointsFrom"] <= self.next
            self.series[message["seriesFrom"] :] = message["series"]
            for number, series, time, value in zip(
                *(columns[name].tolist() for name in ("number", "series", "time", "value")), strict=True
            ):
                self.points[message["pointsFrom"] + number] = (time, value, self.series[series]["name"])
            self.next = max(self.next, message["pointsTo"])

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.points) >= count, PATIENCE), (
                f"{len(self.points)} points"
            )


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Recording:
    monkeypatch.setattr(recording_feed, "INTERVAL", 0.005)
    monkeypatch.setattr(recording_feed, "POINTS_PER_MESSAGE", 100)
    return Recording()


@pytest.fixture
def browser() -> Browser:
    return Browser()


@pytest.fixture(params=[True, False], ids=["with rows", "without rows"])
def sender(request: pytest.FixtureRequest, recording: Recording, browser: Browser) -> Iterator[RecordingFeed]:
    one = RecordingFeed(recording, browser.send, rows=request.param)
    one.view_ready(0, rows=request.param)
    yield one
    one.close()


def feed(recording: Recording, rank: int, begin: int, end: int) -> None:
    recording.feed(rank, encode(rank, [Metric("loss", float(k), k, START + k) for k in range(begin, end)]))


def test_a_view_gets_all_points_also_in_parts(
    recording: Recording, browser: Browser, sender: RecordingFeed
) -> None:
    feed(recording, 0, 0, 250)
    browser.wait(250)
    feed(recording, 1, 250, 300)
    browser.wait(300)
    assert browser.series == [{"rank": rank, "name": "loss", "unit": ""} for rank in (0, 1)]
    assert [browser.points[k] for k in range(300)] == [(float(k), float(k), "loss") for k in range(300)]


def test_a_view_that_comes_back_gets_what_it_has_not(
    recording: Recording, browser: Browser, sender: RecordingFeed
) -> None:
    feed(recording, 0, 0, 250)
    browser.wait(250)
    browser.points.clear()
    sender.view_ready(0, rows=sender._with_rows, points=220)
    browser.wait(30)
    assert min(browser.points) == 220
    sender.view_ready(0, rows=sender._with_rows)
    browser.wait(250)
    assert len(browser.series) == 1
