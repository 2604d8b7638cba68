"""Views that are open while faults happen: their contents must equal the recording's, and none may have failed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from chaos import census
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.kernel_ext.notebook.pool import Pool
from hvdlab.widgets.metrics import MetricsWidget
from hvdlab.widgets.panel import LONG_LEASE, Panel
from hvdlab.widgets.pool_membership import membership_message
from hvdlab.widgets.rank_tables import MembershipWidget, RanksWidget
from hvdlab.widgets.recording_feed import rank_rows
from hvdlab.widgets.timeline import TimelineWidget
from support.patience import PATIENCE

CATCHES_UP = PATIENCE
"""Seconds that a view gets to show what the recording has."""


class Page:
    """State of a browser after all messages sent to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.rows: dict[int, float] = {}  # arrivals, by number
        self.row = self.point = 0
        self.ranks: list[dict[str, Any]] = []
        self.failures: list[dict[str, str]] = []

    def receive(self, message: dict[str, Any], buffers: list[bytes]) -> None:
        if message["type"] != "rows":
            return
        arrivals = np.frombuffer(buffers[0], "<f8", message["count"]).tolist()
        with self._lock:
            self.rows |= dict(enumerate(arrivals, message["from"]))
            self.row = max(self.row, message["from"] + message["count"])
            self.point = max(self.point, message["pointsTo"])
            self.ranks = message.get("ranks", self.ranks)
            self.failures = message.get("failures", self.failures)

    def wrong(self, recording: Recording, *, rows: bool) -> list[str]:
        """Return its differences from the recording."""
        with self._lock:
            found = [failure["trace"] for failure in self.failures]
            first, kept = recording.rows_since(0)
            arrivals = (kept["arrival"] - (recording.origin_ns or 0)).astype(float).tolist()
            shown = [self.rows.get(number) for number in range(first, first + len(arrivals))]
            if rows and shown != arrivals:
                found.append(f"{sum(one is not None for one in shown)} of {len(arrivals)} rows are shown")
            if self.point < recording.points_end:
                found.append(f"points up to {self.point} of {recording.points_end} are shown")
            return found + _other_ranks(self.ranks, recording)


def _other_ranks(shown: list[dict[str, Any]], recording: Recording) -> list[str]:
    names = ("rank", "pid", "state", "reason", "cell", "paused")
    told, known = (
        [{name: row[name] for name in names} for row in rows] for rows in (shown, rank_rows(recording))
    )
    return [] if told == known else [f"the ranks are shown as {told} and are {known}"]


def _other_membership(shown: Mapping[str, Any], pool: Pool) -> list[str]:
    known = membership_message(pool.elastic())
    different = [name for name in known if shown.get(name) != known[name]]
    return [
        f"the membership's {name} is shown as {shown.get(name)} and is {known[name]}" for name in different
    ]


class _Timeline(TimelineWidget):
    page: Page

    def send(self, content: Any, buffers: Any = None) -> None:
        self.page.receive(content, buffers)


class _Metrics(MetricsWidget):
    page: Page

    def send(self, content: Any, buffers: Any = None) -> None:
        self.page.receive(content, buffers)


class _Desk:
    def __init__(self, pool: Pool, recording: Recording) -> None:
        self._pool, self._recording = pool, recording

    def recording(self, pool: str) -> Recording | None:
        return self._recording

    def changeable(self, pool: str) -> Pool:
        return self._pool

    def pools(self) -> list[dict[str, Any]]:
        return []

    def run_command(self, what: str, content: Mapping[str, Any]) -> dict[str, Any]:
        return {}


class _Words(logging.Handler):
    """Record of the text that a notebook would show under the user's cell."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(self.format(record))


class OpenViews:
    """Timeline, charts, a table of ranks, their coming and going, and the panel, open on one pool."""

    def __init__(self, pool: Pool) -> None:
        self.recording = pool.client.recording
        self.pages = {name: Page() for name in ("the timeline", "the charts", "the panel")}
        _Timeline.page, _Metrics.page = self.pages["the timeline"], self.pages["the charts"]
        self.widgets: list[Any] = [
            _Timeline(self.recording),
            _Metrics(self.recording),
            RanksWidget(self.recording),
            MembershipWidget(self.recording, lambda: pool),
        ]
        self._pool = pool
        for widget in self.widgets[:2]:
            widget._receive(widget, {"type": "hello", "since": 0, "points": 0}, [])
        self.panel = Panel(self.pages["the panel"].receive, _Desk(pool, self.recording))
        self.panel.receive({"type": "hello", "rows": True, "since": 0}, lease=LONG_LEASE)
        self._words = _Words()
        logging.getLogger("hvdlab.collectives.client").addHandler(self._words)
        logging.getLogger("hvdlab.widgets").addHandler(self._words)

    def wrong(self) -> list[str]:
        """Return the wrong contents, once the views had time to catch up."""
        found: list[str] = []

        def look() -> bool:
            found[:] = self._wrong()
            return bool(found)

        census.settled(look, CATCHES_UP, pause=0.1)
        found += self._failed()
        said, self._words.said = self._words.said, []
        return found + [f"written under a cell: {text}" for text in said]

    def _wrong(self) -> list[str]:
        found = [
            f"{name}: {what}"
            for name, page in self.pages.items()
            for what in page.wrong(self.recording, rows=name != "the charts")
        ]
        found += [f"the table: {what}" for what in _other_ranks(self.widgets[2].rows, self.recording)]
        return found + _other_membership(self.widgets[3].membership, self._pool)

    def _failed(self) -> list[str]:
        found: list[str] = []
        for widget in self.widgets:
            repr(widget)  # the picture that stays
            found += [f"{type(widget).__name__}: {one.trace}" for one in widget.failures.all()]
        return found

    def close(self) -> None:
        for widget in self.widgets:
            widget.close()
        self.panel.close()
        for name in ("hvdlab.collectives.client", "hvdlab.widgets"):
            logging.getLogger(name).removeHandler(self._words)
