"""Feed of one browser view: rows, marks, points and ranks of a recording as messages, sent by a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from hvdlab.collectives.errors import shown_name
from hvdlab.collectives.failures import Failures, as_messages
from hvdlab.collectives.tracing.columns import Points, Rows, distance
from hvdlab.collectives.tracing.rank_activity import RankSummary, shown_rate, slowest_rank, summarize
from hvdlab.collectives.tracing.recording import Annotation, Recording
from hvdlab.collectives.types import LEAVES
from hvdlab.widgets.pool_membership import MembershipNews

Send = Callable[[dict[str, Any], list[bytes]], None]

ROWS_PER_MESSAGE = 20_000
INTERVAL = 0.05
"""Seconds between messages: few large ones, since the Jupyter server drops messages beyond 1000 a second."""
RESEND_AFTER = (0.3, 0.7, 1.5, 3.0, 6.0)
"""Seconds after the start at which everything is sent again if no view has answered."""
MOST_RESENT = 100_000
QUIET = 1.5


class StillPicture(Protocol):
    """Picture that stays in the notebook in a view's place."""

    def refresh(self) -> None:
        """Put the present picture in the place of the last one. The feed's thread."""
        ...


class RecordingFeed:
    """Feed that sends rows in order; until the view has answered, from the beginning again and again.

    The script of a widget begins to listen at some moment after the widget was made, and its first message waits as long as
    a cell runs. So the feed retransmits messages that may have been lost; the view knows rows by their numbers and adds each
    once.

    While a cell runs, a view that listens gets a message at least every ``HEARTBEAT`` seconds, an empty one if nothing is new.

    An error is kept in :attr:`failures` and sent to the view, which shows it; the next news are sent as if
    nothing had happened.

    Args:
        recording: The recording to send.
        send: Sends a message; called on the feed's thread.
        picture: Refreshed there when nothing has come for ``QUIET`` seconds, and at the end, if there is news since the
            last time. None for a page without a picture.
        rows: Whether rows are sent, or only news of the ranks; :meth:`view_ready` changes that.
        points: Whether points of series are sent, also without rows.
        membership: News of the pool's membership; by default none are sent. It is closed with the feed.
        failures: Collection of errors; by default one of the feed's own.

    Attributes:
        failures: Collection of errors.
    """

    def __init__(
        self,
        recording: Recording,
        send: Send,
        picture: StillPicture | None = None,
        *,
        rows: bool = True,
        points: bool = True,
        membership: MembershipNews | None = None,
        failures: Failures | None = None,
    ) -> None:
        self.failures = Failures(recording.failures) if failures is None else failures
        self._recording, self._send, self._picture, self._with_rows = recording, send, picture, rows
        self._with_points = points
        self._closing = threading.Event()
        self._since: tuple[int, int] | None = None  # a row and a point
        self._heard = False
        #: Whether a page listens that is not the first: it may have been loaded again.
        self._reopened = False
        self._row = self._name = self._stamp = 0
        #: Rows that were passed over after failures.
        self._skipped = 0
        self._cleared = 0
        #: The next row at the last failure of a message: rows that fail twice are passed over.
        self._stuck = -1
        #: Whether the last message failed before it was sent.
        self._unmade = False
        self._sent_failures: list[dict[str, str]] = []
        #: When the last message was sent, by ``time.monotonic()``.
        self._sent = 0.0
        self._ranks = RankNews(recording)
        self._series = SeriesNews(recording)
        self._membership = membership
        #: Held while the thread decides to end, while a page finds out whether it has ended, and for its numbers in `_since`.
        self._starting = threading.Lock()
        #: Whether the thread still serves pages. A thread that has decided to end is alive for a moment longer.
        self._serving = False
        self._thread = self._start()

    def _start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name="hvdlab-timeline", daemon=True)
        self._serving = True
        try:
            thread.start()
        except Exception:
            # There may be no room for a thread; the next hello then tries again.
            self._serving = False
            raise
        return thread

    def view_ready(self, since: int, *, rows: bool = True, points: int = 0) -> None:
        """Send a view that listens its rows from ``since`` and its points from ``points`` on. Any thread.

        Args:
            since: Number of the first row that it has not.
            rows: Whether to send rows from now on.
            points: Number of the first point that it has not.
        """
        self._with_rows = rows
        with self._starting:
            # Before `_since`, by which the feed's thread notices this page, to read this flag then.
            self._reopened = self._heard
            # Another page may have said hello just before: from the lower numbers on, both get all that they lack.
            row, point = (since, points) if self._since is None else self._since
            self._since, self._heard = (min(row, since), min(point, points)), True
        self._recording.wake_waiters()
        with self._starting:
            if not self._serving and not self._closing.is_set():
                self._thread = self._start()  # all was sent, but not to this view: the page was loaded again

    def set_wanted(self, *, rows: bool, points: bool) -> None:
        """Send rows, and points, from now on, or no more. Any thread."""
        self._with_rows, self._with_points = rows, points

    def close(self, timeout: float = 5) -> None:
        """End the thread. Idempotent."""
        self._closing.set()
        self._recording.wake_waiters()
        if self._membership is not None:
            self._membership.close()
        # `Panel._forward` closes a feed on the feed's own thread, which can't wait for itself.
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            try:
                self._feed_pages()
            except BaseException:
                # The next hello starts another thread. Not in a `finally`: after the end below, the flag is another thread's.
                with self._starting:
                    self._serving = False
                raise
            with self._starting:
                # A page that said hello while the last messages were made has found the thread serving, and has started no other.
                if self._since is None or self._closing.is_set():
                    self._serving = False
                    return

    def _feed_pages(self) -> None:
        """Send rows and points to the page until the feed is closed, or the recording has ended and all of it was sent."""
        recording = self._recording
        again = [time.monotonic() + seconds for seconds in RESEND_AFTER]
        version, drawn_version = -1, recording.version
        drawn, drawn_at, picture_due = (-1, -1, -1), time.monotonic(), False
        while not self._closing.is_set():
            if recording.closed and version == recording.version and self._since is None:
                break
            news = recording.wait(version, self._wanted, self._patience(again, drawn_version != version))
            if self._closing.is_set():
                return
            if self._since is not None:
                with self._starting:  # a hello between the two stores would be lost
                    since, self._since = self._since, None
                self._again_from(*since)
                if self._reopened:
                    # This page has an old picture: updates of it went to the page before.
                    self._reopened, drawn_version, picture_due = False, -1, True
            elif not self._heard and again and time.monotonic() >= again[0]:
                again.pop(0)
                if max(recording.end, recording.points_end) <= MOST_RESENT:
                    self._again_from(0, 0)
            elif not news:
                if drawn_version == version:
                    self._keep_alive()
                    continue
                drawn_version = version
                if (self._heard or again) and self._is_behind():
                    self._flush()  # what could not be sent; there may be no further news
                elif self._heard or again:
                    # Also without news: by the numbers in it a page finds out that it missed the last message of a burst.
                    self._send_rows(self._news(), 0)
                self._draw_still()
                picture_due = False
                continue
            # Before the rows are read: rows that come meanwhile count as news for the next round.
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
            self._send_rank_changes(last=True)
        if drawn_version != version:
            self._draw_still()

    def _draw_still(self) -> None:
        if self._picture is None:
            return
        with self.failures.guard("the still picture"):
            self._picture.refresh()

    def _again_from(self, row: int, point: int) -> None:
        self._row = row
        self._name = self._stamp = 0
        self._series.rewind(point)
        self._forget_ranks()
        self._sent_failures = []

    def _forget_ranks(self) -> None:
        """Have the next message describe the ranks as a whole again."""
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

    def _send_rank_changes(self, last: bool = False) -> None:
        """Send news of the ranks since the last rows, and of failures, if there are any."""
        if news := self._news(last):
            self._send_rows(news, 0)

    def _news(self, last: bool = False) -> dict[str, Any]:
        """Return news of the ranks and of failures, as much of it as can be found out."""
        news: dict[str, Any] = {}
        with self.failures.guard("the table of ranks"):
            news |= self._ranks.next_message(last)
        if self._membership is not None:
            with self.failures.guard("which ranks there are"):
                if (membership := self._membership.next_message()) is not None:
                    news["membership"] = membership
        failures = as_messages(self.failures.all())
        if failures != self._sent_failures:
            news["failures"] = failures
        return news

    def _is_behind(self) -> bool:
        """Return whether the view lacks rows or points that it has subscribed to."""
        return self._series.more or (self._with_rows and self._row < self._recording.end)

    def _flush(self) -> None:
        """Send the rows and points that the view lacks, in messages of bounded size."""
        while not self._closing.is_set():
            if not self._with_rows and not self._with_points:
                self._send_rank_changes()
                return
            sent = self._send_rows(self._news(), ROWS_PER_MESSAGE if self._with_rows else 0)
            if not sent and not self._skip_failing_rows():
                return
            if self._since is not None or not self._is_behind():
                return
            self._closing.wait(INTERVAL)

    def _skip_failing_rows(self) -> bool:
        """After a failure: whether to go on at once, with the same rows or, if they have failed before, with later ones."""
        if self._stuck != self._row:
            self._stuck = self._row
            return True
        if not self._unmade:
            return (
                False  # it could not be sent: that is tried again when there is news, or after a quiet time
            )
        # There may be no memory for a copy of these rows.
        with self.failures.guard("what is drawn here"):
            first, rows, _ = self._rows(ROWS_PER_MESSAGE if self._with_rows else 0)
            self._row, self._skipped = first + len(rows), self._skipped + len(rows)
            self._send_rank_changes()
            return len(rows) > 0
        return False

    def _rows(self, most: int) -> tuple[int, Rows, int]:
        """Return the number of the first row that comes next, the rows, and the number before which all were cleared at that moment."""
        recording = self._recording
        while True:
            cleared = recording.cleared_end
            first, rows = recording.rows_since(self._row, most)
            # A clear between the two reads would give rows of after it the number of before it.
            if recording.cleared_end == cleared:
                return first, rows, cleared

    def _send_rows(self, news: dict[str, Any], most: int) -> bool:
        """Send a message, and return whether that worked; if not, the next one has the same content."""
        point, series = self._series.place
        self._unmade = True
        with self.failures.guard("what is drawn here"):
            self._send_next(news, most)
            self._sent_failures = news.get("failures", self._sent_failures)
            return True
        self._series.rewind(point, series)
        self._forget_ranks()
        return False

    def _send_next(self, news: dict[str, Any], most: int) -> None:
        recording = self._recording
        first, rows, cleared = self._rows(most)
        # After the rows: all names that they refer to are in the list by now.
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
        series, points = self._series.next_batch(POINTS_PER_MESSAGE if self._with_points else 0)
        origin = recording.origin_ns or 0
        message = {
            "type": "rows",
            # Rows between this number and the next were dropped before they could be sent. A page counts those that it lacks
            # itself: others may have them.
            "after": self._row,
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


ROW_BYTES = 46


def pack_rows(rows: Rows, origin_ns: int) -> bytes:
    """Pack the columns that ``readRows`` in ``ui/src/model/store.ts`` unpacks; wide ones first, so that all are aligned.

    Arrivals are ns since the origin, exact for 104 days; the later times are ns since the arrival with 24 bits.
    """
    columns = [
        (rows["arrival"] - origin_ns).astype("<f8"),
        rows["nbytes"].astype("<f8"),
        *(distance(rows, name).astype("<f4") for name in ("ready", "started", "finished", "wait")),
        rows["name"].astype("<u4"),
        rows["op"].astype("<u4"),
        rows["rank"].astype("<u2"),
        rows["size"].astype("<u2"),
        rows["kind"],
        rows["flags"],
    ]
    return b"".join(column.tobytes() for column in columns)


def pack_marks(marks: Sequence[tuple[int, Annotation]], origin_ns: int) -> list[tuple[int, dict[str, Any]]]:
    """Return marks with their numbers, and times in ns since the origin."""
    return [
        (
            number,
            {
                "kind": mark.kind,
                "rank": mark.rank,
                "begin": mark.begin_ns - origin_ns,
                "end": None if mark.end_ns is None else mark.end_ns - origin_ns,
                "text": mark.text,
                "ok": mark.ok,
            },
        )
        for number, mark in marks
    ]


POINT_BYTES = 32
POINTS_PER_MESSAGE = 20_000


def pack_points(points: Points, origin_ns: int, first: int) -> bytes:
    """Pack the columns that ``readPoints`` in ``ui/src/model/series.ts`` unpacks; wide ones first, so that all are aligned.

    Times are ns since the origin; a point's number is that behind ``first``.
    """
    columns = [
        (points["time"] - origin_ns).astype("<f8"),
        points["value"].astype("<f8"),
        points["step"].astype("<f8"),
        points["series"].astype("<u4"),
        (points["number"] - np.uint64(first)).astype("<u4"),
    ]
    return b"".join(column.tobytes() for column in columns)


class SeriesNews:
    """Points of the series that one view lacks; each message of the feed takes some of them along.

    A message has all points from the number ``pointsFrom`` to below ``pointsTo``, except those that were dropped to make
    room. A view that gets a message which begins behind its last point has missed some.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._point = self._series = 0
        self.more = False

    @property
    def place(self) -> tuple[int, int]:
        """Return the numbers of the next point and of the next definition."""
        return self._point, self._series

    def rewind(self, point: int, series: int = 0) -> None:
        """Go back to the points from a number on, and to the definitions, all or from a number on."""
        self._point, self._series = point, series

    def next_batch(self, most: int = POINTS_PER_MESSAGE) -> tuple[dict[str, Any], bytes]:
        """Return the fields of the next message, and its buffer. Afterwards :attr:`more` is whether points are left."""
        recording, first = self._recording, self._point
        end, points = recording.points_since(first, most)
        series = recording.series(self._series)
        fields = {
            "seriesFrom": self._series,
            "series": [{"rank": one.rank, "name": one.name, "unit": one.unit} for one in series],
            "pointsFrom": first,
            "pointsTo": end,
            "points": len(points),
            "pointsLost": recording.points_lost,
        }
        self._point, self._series = end, self._series + len(series)
        self.more = 0 < most <= len(points)
        return fields, pack_points(points, recording.origin_ns or 0, first)


ACTIVITY_INTERVAL = 1.0
ACTIVITY_ROWS = 50_000
ACTIVITY_SECONDS = 10.0
STOPPED = "stopped"
HEARTBEAT = 2.0
"""Seconds after which a view gets a message although nothing is new, while a cell runs. A view that gets none for
five seconds says so (``ui/src/model/liveness.ts``)."""


def cell_runs(recording: Recording) -> bool:
    """Return whether a cell runs on any rank that is there."""
    if recording.closed:
        return False
    return any(recording.running(member.rank) for member in recording.membership.members)


def rank_rows(recording: Recording) -> list[dict[str, Any]]:
    """Return a row for each rank that is there, is lost or has recorded something."""
    membership = recording.membership
    summaries = {one.rank: one for one in summarize(recording, ACTIVITY_SECONDS, ACTIVITY_ROWS)}
    slowest = slowest_of(summaries.values())
    members = {member.rank: member for member in membership.members}
    deaths = {death.rank: death for death in membership.deaths if death.rank not in members}
    rows = []
    for rank in sorted({*members, *deaths, *membership.expected, *summaries}):
        row = asdict(summaries.get(rank, RankSummary(rank)))
        member, death, cell = members.get(rank), deaths.get(rank), recording.running(rank)
        state = "lost" if death else "starting" if member is None else "running" if cell else "idle"
        if member is None and not death and rank not in membership.expected:
            state = "left"
        if recording.closed and state in ("starting", "running", "idle"):
            state, cell = "ended", ""
        rows.append(
            {
                "rank": rank,
                "host": member.host.split("#")[0] if member else "",
                "pid": member.pid if member else 0,
                "plane": plane_text(recording.planes(rank)) if member else "",
                "state": state,
                "reason": death.reason if death else LEAVES if rank in membership.leaving else "",
                "cell": cell,
                "paused": recording.paused.get(rank, "") if member is not None else "",
                "spans": row["spans"],
                "timesLast": row["times_last"],
                "heldUp": row["held_up_ns"],
                "slowest": rank == slowest,
                "worst": row["worst_ns"],
                "wait": row["wait"],
                "work": row["work"],
                "bandwidth": row["bandwidth"],
            }
        )
    return rows


def slowest_of(summaries: Iterable[RankSummary]) -> int | None:
    """Return the rank that slows the others down; ``None`` if no rank stands out.

    Args:
        summaries: All ranks in the same stretch of time.
    """
    all_ranks = list(summaries)
    length_ns = max((one.length_ns for one in all_ranks), default=0)
    return slowest_rank({one.rank: one.held_up_ns for one in all_ranks}, length_ns)


def heading(rows: list[dict[str, Any]]) -> str:
    """Return the ranks in a line: ``4/4 ranks · running [7]``."""
    if not rows:
        return "waiting for ranks"
    expected = [row for row in rows if row["state"] != "left"]
    here = [row for row in expected if row["state"] in ("idle", "running")]
    cells = sorted({row["cell"] for row in here if row["cell"]})
    paused = paused_text({row["rank"]: row["paused"] for row in rows if row["paused"]})
    parts = [f"{len(here)}/{len(expected)} ranks", f"running {', '.join(cells)}" if cells else "idle", paused]
    return " · ".join(part for part in parts if part)


def paused_text(paused: Mapping[int, str]) -> str:
    """Return which ranks are paused and why: ``rank 3 is at a prompt``; empty if none is."""
    reasons: dict[str, list[str]] = {}
    for rank, why in sorted(paused.items()):
        reasons.setdefault(why, []).append(str(rank))
    return "; ".join(
        f"rank {ranks[0]} is {why}" if len(ranks) == 1 else f"ranks {', '.join(ranks)} are {why}"
        for why, ranks in reasons.items()
    )


def plane_text(planes: Mapping[int, str]) -> str:
    """Return the planes of a rank: ``shm``, with the process sets that use another plane: ``shm; set 1: gloo``."""
    world = planes.get(0, "")
    others: dict[str, list[str]] = {}
    for number, plane in sorted(planes.items()):
        if number and plane != world:
            others.setdefault(plane, []).append(str(number))
    parts = [
        f"{'set' if len(sets) == 1 else 'sets'} {', '.join(sets)}: {plane}" for plane, sets in others.items()
    ]
    return "; ".join(part for part in (world, *parts) if part)


def _pace(recording: Recording, rows: list[dict[str, Any]]) -> str:
    """Steps per second of the cells that run, if their ranks report any."""
    running = [row["rank"] for row in rows if row["state"] == "running"]
    if not running:
        return ""
    begins = [
        mark.begin_ns for mark in recording.annotations() if mark.kind == "cell" and mark.end_ns is None
    ]
    steps = shown_rate(recording, running, min(begins, default=None))
    return "" if steps is None else f" · {steps:.3g} steps/s"


class RankNews:
    """News of the ranks for a view: at most once in ``ACTIVITY_INTERVAL`` seconds, and only if something is new."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.forget()

    def forget(self) -> None:
        """Have the next :meth:`take` return everything again."""
        self._version, self._at = -1, 0.0
        self._returned: dict[str, Any] = {}

    def next_message(self, last: bool = False) -> dict[str, Any]:
        """Return ``ranks`` and ``heading``, or nothing if they are not new or were sent just before; ``last`` ignores the second."""
        recording, now = self._recording, time.monotonic()
        if recording.version == self._version or (now < self._at + ACTIVITY_INTERVAL and not last):
            return {}
        # Before the rows are made: a change that comes meanwhile has a higher version, and is sent with the next.
        self._version, self._at = recording.version, now
        rows = rank_rows(recording)
        news = {
            "ranks": rows,
            "heading": STOPPED if recording.closed else heading(rows) + _pace(recording, rows),
        }
        if news == self._returned:
            return {}
        self._returned = news
        return news
