"""The ranks as a widget: which are there, and which hold the others up."""

from __future__ import annotations

import html
import threading
import time
from typing import Any

import anywidget
import traitlets

from hvdlab.collectives.failures import Failures, as_messages
from hvdlab.collectives.text import visible
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.widgets.output import Output, text_of
from hvdlab.widgets.picture import seconds
from hvdlab.widgets.rank_rows import HEARTBEAT, STOPPED, cell_runs, heading, rank_rows
from hvdlab.widgets.timeline import STATIC
from hvdlab.widgets.unparented import unparented

INTERVAL = 1.0
WIDEST = 300
"""Characters of a cell of the still table."""


class RanksWidget(anywidget.AnyWidget):
    """A table of the ranks, live. Made by :func:`hvdlab.widgets.views.ranks`.

    Attributes:
        recording: The recording that is shown.
        failures: Errors of the widget, which it shows itself.
    """

    _esm = (STATIC / "ranks.js").read_text(encoding="utf-8")
    _css = (STATIC / "views.css").read_text(encoding="utf-8")
    rows: traitlets.List[dict[str, Any]] = traitlets.List().tag(sync=True)
    heading = traitlets.Unicode("").tag(sync=True)
    failed: traitlets.List[dict[str, str]] = traitlets.List().tag(sync=True)
    still = traitlets.Unicode("").tag(sync=True)

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.failures = Failures(recording.failures)
        self._output = Output("ranks", self._still, self.failures)
        self._closing = threading.Event()
        #: Whether a page was loaded again, whose picture is old: updates of it went to the page before.
        self._reopened = False
        super().__init__(still=self._output.name)
        self.on_msg(self._receive)
        self._update()
        self._thread = threading.Thread(target=self._run, name="hvdlab-ranks", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        version, sent = -1, 0.0
        while not self._closing.is_set() and not (
            self.recording.closed and version == self.recording.version
        ):
            runs = cell_runs(self.recording)
            news = self.recording.wait(version, self._wanted, HEARTBEAT if runs else None)
            if self._closing.is_set():
                return
            if news:
                self._reopened, version = False, self.recording.version
                self._update()
                with self.failures.guard("the still picture"):
                    self._output.refresh()
            with self.failures.guard("the table of ranks"):
                if runs and self.comm is not None and time.monotonic() >= sent + HEARTBEAT:
                    sent = time.monotonic()
                    unparented(self.send, {"type": "alive"})
            self._closing.wait(INTERVAL)

    def _wanted(self) -> bool:
        return self._closing.is_set() or self._reopened

    def _receive(self, widget: Any, content: Any, buffers: Any) -> None:
        with self.failures.guard("what the page asked for"):
            if not isinstance(content, dict) or content.get("type") != "hello":
                return
            self._reopened = True
            self.recording.wake_waiters()
            if not self._thread.is_alive():
                self._output.refresh()

    def _update(self) -> None:
        with self.failures.guard("the table of ranks"):
            rows = rank_rows(self.recording)
            with self.hold_sync():
                self.heading = STOPPED if self.recording.closed else heading(rows)
                self.rows = rows
        with self.failures.guard("what is said about failures"):
            self.failed = as_messages(self.failures.all())

    def _still(self) -> dict[str, Any]:
        cells = [[html.escape(cell) for cell in line] for line in self._lines()]
        head = "".join(f"<th>{cell}</th>" for cell in cells[0])
        body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in cells[1:])
        text = f"<div><b>Ranks</b>: {html.escape(self.heading)}</div>"
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return {
            "text/html": f'<div class="hvd-still {self._output.name}">{text}{table}</div>',
            "text/plain": self._text(),
        }

    def _lines(self) -> list[list[str]]:
        lines = [["rank", "state", "where", "plane", "waits", "came last", "held others up"]]
        for row in self.rows:
            state = f"running {row['cell']}" if row["state"] == "running" else row["state"]
            if row["paused"]:
                state = f"{state}, {row['paused']}"
            lines.append(
                [
                    str(row["rank"]),
                    f"{state}: {row['reason']}" if row["reason"] else state,
                    f"{row['host']} {row['pid']}" if row["pid"] else "",
                    row["plane"],
                    f"{row['wait']:.0%}" if row["spans"] else "",
                    f"{row['timesLast']}x" if row["spans"] else "",
                    seconds(row["heldUp"]) if row["heldUp"] else "",
                ]
            )
        return [[visible(cell, WIDEST) for cell in line] for line in lines]

    def _ipython_display_(self) -> None:
        self._output.show(self._repr_mimebundle_())

    def close(self) -> None:
        """End the widget; the still table remains."""
        self._closing.set()
        self.recording.wake_waiters()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)
        super().close()

    def __repr__(self) -> str:
        with self.failures.guard("the still picture"):
            return self._text()
        return "Ranks" + text_of(self.failures.all())

    def _text(self) -> str:
        lines = self._lines()
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        table = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join([f"Ranks: {self.heading}", *table])
