"""Brings a recording to one browser view, on a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from hvdlab.collectives.errors import shown_name
from hvdlab.collectives.failures import Failures, as_messages
from hvdlab.collectives.tracing.columns import Rows
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.widgets.membership_news import MembershipNews
from hvdlab.widgets.messages import pack_marks, pack_rows
from hvdlab.widgets.points import POINTS_PER_MESSAGE, SeriesNews
from hvdlab.widgets.rank_rows import HEARTBEAT, RankNews, cell_runs

Send = Callable[[dict[str, Any], list[bytes]], None]

ROWS_PER_MESSAGE = 20_000
INTERVAL = 0.05
"""Seconds between messages: few large ones, since the Jupyter server drops what exceeds 1000 a second."""
AGAIN = (0.3, 0.7, 1.5, 3.0, 6.0)
"""Seconds after the start at which everything is sent again if no view has answered."""
MOST_UNHEARD = 100_000
QUIET = 1.5


class Publisher:
    """Sends rows in order; until the view has said hello, from the beginning again and again.

    The script of a widget begins to listen at some moment after the widget was made, and its hello waits as long as a
    cell runs. So the publisher retransmits what may have got lost; the view knows rows by their numbers and takes each once.

    While a cell runs, a view that listens gets a message at least every ``HEARTBEAT`` seconds, an empty one if nothing is new.

    An error is kept in :attr:`failures` and sent to the view, which shows it; the next news are sent as if
    nothing had happened.

    Args:
        recording: The recording that is sent.
        send: Sends a message; called on the publisher's thread.
        quiet: Called there when nothing has come for ``QUIET`` seconds, and at the end, if there is news since the
            last time.
        rows: Whether rows are sent, or only news of the ranks; :meth:`hello` changes that.
        points: Whether points of series are sent, also without rows.
        membership: Has the news of the pool's membership; by default none are sent. It is closed with the publisher.
        failures: Where errors are kept; by default in a collection of the publisher's own.

    Attributes:
        failures: Where errors are kept.
    """

    def __init__(
        self,
        recording: Recording,
        send: Send,
        quiet: Callable[[], None],
        *,
        rows: bool = True,
        points: bool = True,
        membership: MembershipNews | None = None,
        failures: Failures | None = None,
    ) -> None:
        self.failures = Failures(recording.failures) if failures is None else failures
        self._recording, self._send, self._quiet, self._with_rows = recording, send, quiet, rows
        self._with_points = points
        self._closing = threading.Event()
        self._since: tuple[int, int] | None = None  # a row and a point
        self._heard = False
        #: Whether a page listens that is not the first: it may have been loaded again.
        self._reopened = False
        self._row = self._name = self._stamp = 0
        self._skipped = self._cleared = 0
        #: The next row at the last failure of a message: rows that fail twice are passed over.
        self._stuck = -1
        #: Whether the last message failed before it was sent.
        self._unmade = False
        self._told_failures: list[dict[str, str]] = []
        #: When the last message was sent, by ``time.monotonic()``.
        self._sent = 0.0
        self._ranks = RankNews(recording)
        self._series = SeriesNews(recording)
        self._membership = membership
        self._starting = threading.Lock()
        self._thread = self._start()

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="hvdlab-timeline", daemon=True)
        thread.start()
        return thread

    def hello(self, since: int, *, rows: bool = True, points: int = 0) -> None:
        """The view listens, and has all rows before ``since`` and all points before ``points``. Any thread.

        ``rows`` says whether it wants rows.
        """
        self._with_rows = rows
        self._reopened = self._heard
        self._since, self._heard = (since, points), True
        self._recording.wake_waiters()
        with self._starting:
            if not self._thread.is_alive() and not self._closing.is_set():
                self._thread = self._start()  # all was sent, but not to this view: the page was loaded again

    def want(self, *, rows: bool, points: bool) -> None:
        """Send rows, and points, from now on, or no more. Any thread."""
        self._with_rows, self._with_points = rows, points

    def close(self, timeout: float = 5) -> None:
        """End the thread. Idempotent."""
        self._closing.set()
        self._recording.wake_waiters()
        if self._membership is not None:
            self._membership.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        recording = self._recording
        again = [time.monotonic() + seconds for seconds in AGAIN]
        version, drawn_version = -1, recording.version
        drawn, drawn_at, picture_due = (-1, -1, -1), time.monotonic(), False
        while not self._closing.is_set():
            if recording.closed and version == recording.version and self._since is None:
                break
            news = recording.wait(version, self._wanted, self._patience(again, drawn_version != version))
            if self._closing.is_set():
                return
            if self._since is not None:
                since, self._since = self._since, None
                self._again_from(*since)
                if self._reopened:
                    # This page has an old picture: updates of it went to the page before.
                    self._reopened, drawn_version, picture_due = False, -1, True
            elif not self._heard and again and time.monotonic() >= again[0]:
                again.pop(0)
                if max(recording.end, recording.points_end) <= MOST_UNHEARD:
                    self._again_from(0, 0)
            elif not news:
                if drawn_version == version:
                    self._keep_alive()
                    continue
                drawn_version = version
                if (self._heard or again) and self._is_behind():
                    self._flush()  # what could not be sent; there may be no further news
                elif self._heard or again:
                    self._say_ranks()
                self._draw_still()
                picture_due = False
                continue
            version = recording.version
            if self._heard or again:
                self._flush()
                self._keep_alive()
            # Only these count as news for the picture: ranks that do nothing still report their memory every second.
            if drawn != (drawn := (recording.end, self._stamp, recording.cleared_end)):
                drawn_at, picture_due = time.monotonic(), True
            elif picture_due and time.monotonic() - drawn_at >= QUIET:
                picture_due = False
                self._draw_still()
            self._closing.wait(INTERVAL)
        if self._heard and not self._closing.is_set():
            self._say_ranks(last=True)
        if drawn_version != version:
            self._draw_still()

    def _draw_still(self) -> None:
        with self.failures.guard("the still picture"):
            self._quiet()

    def _again_from(self, row: int, point: int) -> None:
        self._row = row
        self._name = self._stamp = 0
        self._series.again_from(point)
        self._forget_ranks()
        self._told_failures = []

    def _forget_ranks(self) -> None:
        """Have the next message say everything about the ranks again."""
        self._ranks.forget()
        if self._membership is not None:
            self._membership.forget()

    def _wanted(self) -> bool:
        return self._closing.is_set() or self._since is not None

    def _patience(self, again: list[float], news: bool) -> float | None:
        if not self._heard and again:
            return max(0.0, again[0] - time.monotonic())
        if news:
            return QUIET
        return HEARTBEAT if self._heard and cell_runs(self._recording) else None

    def _keep_alive(self) -> None:
        """Send an empty message if the view has got none for some time while a cell runs."""
        if self._heard and time.monotonic() >= self._sent + HEARTBEAT and cell_runs(self._recording):
            self._send_rows({}, 0)

    def _say_ranks(self, last: bool = False) -> None:
        """Send what is new about the ranks since the last rows, and what failed, if there is any of it."""
        if news := self._news(last):
            self._send_rows(news, 0)

    def _news(self, last: bool = False) -> dict[str, Any]:
        """Return news of the ranks and of failures, as much of it as can be found out."""
        news: dict[str, Any] = {}
        with self.failures.guard("the table of ranks"):
            news |= self._ranks.take(last)
        if self._membership is not None:
            with self.failures.guard("which ranks there are"):
                if (membership := self._membership.take()) is not None:
                    news["membership"] = membership
        failures = as_messages(self.failures.all())
        if failures != self._told_failures:
            news["failures"] = failures
        return news

    def _is_behind(self) -> bool:
        """Whether the view lacks something that it wants."""
        return self._series.more or (self._with_rows and self._row < self._recording.end)

    def _flush(self) -> None:
        """Send what the view has not got, in messages of bounded size."""
        while not self._closing.is_set():
            if not self._with_rows and not self._with_points:
                self._say_ranks()
                return
            sent = self._send_rows(self._news(), ROWS_PER_MESSAGE if self._with_rows else 0)
            if not sent and not self._pass_over():
                return
            if self._since is not None or not self._is_behind():
                return
            self._closing.wait(INTERVAL)

    def _pass_over(self) -> bool:
        """After a failure: whether to go on at once, with the same rows or, if they have failed before, with later ones."""
        if self._stuck != self._row:
            self._stuck = self._row
            return True
        if not self._unmade:
            return (
                False  # it could not be sent: that is tried again when there is news, or after a quiet time
            )
        first, rows, _ = self._rows(ROWS_PER_MESSAGE if self._with_rows else 0)
        self._row, self._skipped = first + len(rows), self._skipped + len(rows)
        self._say_ranks()
        return len(rows) > 0

    def _rows(self, most: int) -> tuple[int, Rows, int]:
        """The number of the first row that comes next, the rows, and the number before which all were cleared at that moment."""
        recording = self._recording
        while True:
            cleared = recording.cleared_end
            first, rows = recording.rows_since(self._row, most)
            if recording.cleared_end == cleared:
                return first, rows, cleared

    def _send_rows(self, news: dict[str, Any], most: int) -> bool:
        """Send a message. Returns whether that worked; if not, the next one has what this one had."""
        point, series = self._series.place
        self._unmade = True
        with self.failures.guard("what is drawn here"):
            self._send_next(news, most)
            self._told_failures = news.get("failures", self._told_failures)
            return True
        self._series.again_from(point, series)
        self._forget_ranks()
        return False

    def _send_next(self, news: dict[str, Any], most: int) -> None:
        recording = self._recording
        first, rows, cleared = self._rows(most)
        names = recording.names[self._name :]
        sites = recording.sites[self._name : self._name + len(names)]
        if cleared != self._cleared:
            self._cleared, self._stamp = (
                cleared,
                0,
            )  # views then forget all marks, so marks that go on are sent again
        stamp, marks = recording.annotations_since(self._stamp)
        if (before := recording.cleared_ns) is not None:
            marks = [(number, mark) for number, mark in marks if mark.end_ns is None or mark.end_ns > before]
        series, points = self._series.take(POINTS_PER_MESSAGE if self._with_points else 0)
        origin = recording.origin_ns or 0
        self._skipped = (
            max(self._skipped, first - recording.cleared)
            if self._row == 0
            else self._skipped + first - min(first, max(self._row, cleared))
        )
        message = {
            "type": "rows",
            "after": self._row,  # rows between this number and the next were dropped before they could be sent
            "from": first,
            "count": len(rows),
            "namesFrom": self._name,
            "names": [shown_name(name) for name in names],
            "sites": sites,
            "marks": pack_marks(marks, origin),
            "cleared": cleared,
            "lost": recording.lost + self._skipped,
            "clockErrors": list(recording.clock_errors().items()),
        }
        buffers = [pack_rows(rows, origin), points]
        self._unmade = False
        self._send(message | series | news, buffers)
        self._sent = time.monotonic()
        self._row, self._name, self._stamp = first + len(rows), self._name + len(names), stamp
