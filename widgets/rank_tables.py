"""Live tables of the ranks as widgets: which hold the others up, and which joined and left, with buttons that change that."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Mapping
from typing import Any

import traitlets

from hvdlab.collectives.text import visible
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.widgets.live_view import STATIC, TableView, unparented
from hvdlab.widgets.pool_membership import (
    ChangeablePool,
    MembershipActions,
    MembershipNews,
    membership_html,
    membership_text,
)
from hvdlab.widgets.recording_feed import HEARTBEAT, STOPPED, cell_runs, heading, rank_rows
from hvdlab.widgets.still_lanes import seconds

RANKS_INTERVAL = 1.0
"""Seconds between two updates of the table of ranks, at least."""
WIDEST = 300
"""Characters of a cell of the still table."""


class RanksWidget(TableView):
    """Table of the ranks, live. Made by :func:`hvdlab.widgets.views.ranks`."""

    _title = "Ranks"
    _esm = (STATIC / "ranks.js").read_text(encoding="utf-8")
    rows: traitlets.List[dict[str, Any]] = traitlets.List().tag(sync=True)
    heading = traitlets.Unicode("").tag(sync=True)

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording)
        self._start_thread()

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
                # Before the update: a page or a change that comes meanwhile counts for the next round.
                reopened, self._reopened, version = self._reopened, False, self.recording.version
                self._update()
                if reopened:
                    self._show_again()
                else:
                    self._draw_still()
            with self.failures.guard("the table of ranks"):
                if runs and time.monotonic() >= sent + HEARTBEAT:
                    sent = time.monotonic()
                    self._send_to_page({"type": "alive"})
            self._closing.wait(RANKS_INTERVAL)

    def _update(self) -> None:
        with self.failures.guard("the table of ranks"):
            unparented(self._set_rows, rank_rows(self.recording))
        with self.failures.guard("what is said about failures"):
            self._show_failures()

    def _set_rows(self, rows: list[dict[str, Any]]) -> None:
        with self.hold_sync():
            self.heading = STOPPED if self.recording.closed else heading(rows)
            self.rows = rows

    def _still_html(self) -> str:
        cells = [[html.escape(cell) for cell in line] for line in self._lines()]
        head = "".join(f"<th>{cell}</th>" for cell in cells[0])
        body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in cells[1:])
        text = f"<div><b>Ranks</b>: {html.escape(self.heading)}</div>"
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f'<div class="hvd-still {self._output.name}">{text}{table}</div>'

    def _still_text(self) -> str:
        lines = self._lines()
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        table = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join([f"Ranks: {self.heading}", *table])

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


MEMBERSHIP_INTERVAL = 0.3
"""Seconds between two questions to the pool."""
STILL_CHANGES = 20
"""Changes that a saved notebook keeps."""


class MembershipWidget(TableView):
    """Table of the ranks, since when and from where, live. Made by :func:`hvdlab.widgets.views.membership`.

    Args:
        recording: Wakes the widget's thread at each change.
        find: Returns the pool to show; None as long as there is none.
    """

    _title = "Membership"
    _esm = (STATIC / "membership.js").read_text(encoding="utf-8")
    membership: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)

    def __init__(self, recording: Recording, find: Callable[[], ChangeablePool | None]) -> None:
        self._find = find
        self._news: MembershipNews | None = None
        self._actions: MembershipActions | None = None
        self._drawn: object = None
        super().__init__(recording)
        self._start_thread()

    def _run(self) -> None:
        version, soon, sent = -1, False, 0.0
        # The pool may end just after a question to it, so ask until no further question is due.
        while not self._closing.is_set() and (
            soon or not self.recording.closed or version != self.recording.version
        ):
            patience = MEMBERSHIP_INTERVAL if soon else HEARTBEAT if cell_runs(self.recording) else None
            self.recording.wait(version, self._wanted, patience)
            # Before the update, which need not include a change that comes during it.
            version = self.recording.version
            self._update()
            soon = self._news is not None and self._news.asks_later
            if self._reopened:
                self._drawn, self._reopened = self.membership, False
                self._show_again()
            elif self._drawn is not self.membership:
                self._drawn = self.membership
                self._draw_still()
            if time.monotonic() >= sent + HEARTBEAT:
                sent = time.monotonic()
                self._send_alive()
            self._closing.wait(MEMBERSHIP_INTERVAL)
        if self._news is not None:
            self._news.close()

    def _send_alive(self) -> None:
        """Show the page that the kernel lives, and whether the next such message comes within ``HEARTBEAT``."""
        with self.failures.guard("which ranks there are"):
            self._send_to_page({"type": "alive", "runs": cell_runs(self.recording)})

    def _update(self) -> None:
        with self.failures.guard("which ranks there are"):
            if self._news is None and (pool := self._find()) is not None:
                self._actions = MembershipActions(pool, self.recording)
                self._news = MembershipNews(pool, self._actions, self.recording)
            if self._news is not None and (news := self._news.next_message()) is not None:
                unparented(setattr, self, "membership", news)
        self._show_failures()

    def _handle(self, content: Mapping[str, Any]) -> None:
        super()._handle(content)
        if content.get("type") != "do":
            return
        request = content.get("request")
        if self._actions is None:
            self._answer(request, {"error": "there are no ranks yet"})
            return
        try:
            self._actions.begin(content, lambda reply: self._answer(request, reply))
        except Exception as error:
            self._answer(request, {"error": str(error) or type(error).__name__})
            raise

    def _answer(self, request: object, reply: dict[str, Any]) -> None:
        self._send_to_page({"type": "answer", "request": request} | reply)

    def _still_html(self) -> str:
        state = self._news.state if self._news is not None else None
        page = "" if state is None else membership_html(state, STILL_CHANGES)
        return f'<div class="hvd-still {self._output.name}">{page}</div>'

    def _still_text(self) -> str:
        state = self._news.state if self._news is not None else None
        return "Ranks: waiting for ranks" if state is None else membership_text(state, STILL_CHANGES)
