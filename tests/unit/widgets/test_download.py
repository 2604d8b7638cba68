"""A recording as a file for the browser."""

from __future__ import annotations

import gzip
import json
import threading
from typing import Any

import msgspec
import pytest

from hvdlab.collectives.tracing import trace_file
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.tracing.trace_file import trace_events
from hvdlab.widgets.timeline import Downloads
from support.patience import PATIENCE
from support.timeline_traces import steps


class Browser:
    def __init__(self) -> None:
        self.got: list[tuple[dict[str, Any], list[bytes]]] = []
        self.came = threading.Event()

    def take(self, message: dict[str, Any], buffers: list[bytes]) -> None:
        self.got.append((message, buffers))
        self.came.set()

    def wait(self) -> tuple[dict[str, Any], list[bytes]]:
        assert self.came.wait(PATIENCE)
        self.came.clear()
        return self.got[-1]


@pytest.fixture
def recording() -> Recording:
    recording = Recording()
    for rank, batch in steps(4, 20):
        recording.feed(rank, batch)
    return recording


def test_the_browser_gets_what_was_recorded(recording: Recording) -> None:
    browser = Browser()
    downloads = Downloads(recording, browser.take, recording.failures)
    downloads.start()
    message, (file,) = browser.wait()
    assert message == {"type": "file", "name": "hvdlab-timeline.json.gz"}
    expected = [event for portion in trace_events(recording) for event in portion]
    assert len(expected) > 1000
    assert json.loads(gzip.decompress(file)) == json.loads(msgspec.json.encode(expected))
    downloads.close()
    downloads.start()
    assert len(browser.got) == 1


def test_a_problem_is_told(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(trace_file, "write_trace", fail)
    browser = Browser()
    downloads = Downloads(recording, browser.take, recording.failures)
    downloads.start()
    assert browser.wait() == ({"type": "problem", "text": "no room"}, [])
    downloads.close()
