"""Call sites on their way to the browser."""

from __future__ import annotations

import threading
from typing import Any

from hvdlab.collectives.tracing.record_format import Span, encode
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.types import DType, OpKind
from hvdlab.widgets.recording_feed import RecordingFeed
from support.patience import PATIENCE


def test_a_view_gets_the_line_of_each_name() -> None:
    recording = Recording()
    for sequence, (name, site) in enumerate(
        [("loss", "cell [7] line 4"), ("loss", "cell [9] line 2"), ("x", "")]
    ):
        span = Span(name, OpKind.ALLREDUCE, DType.F32, 0, sequence, 0, 4, 1, 2, 3, 4, site=site)
        recording.feed(0, encode(0, [span], clock=1))
    came, messages = threading.Event(), []

    def send(message: dict[str, Any], buffers: list[bytes]) -> None:
        messages.append(message)
        came.set()

    publisher = RecordingFeed(recording, send)
    try:
        assert came.wait(PATIENCE)
    finally:
        publisher.close()
    assert messages[0]["names"] == ["", "loss", "loss", "x"]
    assert messages[0]["sites"] == ["", "cell [7] line 4", "cell [9] line 2", ""]
