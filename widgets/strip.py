"""The strip under a running cell as a widget: the cell's pace, and a bar per rank of computing against waiting."""

from __future__ import annotations

import html
import re
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import anywidget
import traitlets

from hvdlab.collectives.failures import Failures
from hvdlab.collectives.tracing.rank_activity import RecentActivity, recent_activity, shown_rate, step_count
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.widgets.live_view import STATIC, unparented
from hvdlab.widgets.recording_feed import HEARTBEAT, paused_text
from hvdlab.widgets.still_lanes import seconds

SUMMARY_ROWS = 100_000
"""How many of the newest rows the summary looks at."""
Show = Callable[[dict[str, Any], dict[str, Any], str, bool], None]
"""``show(data, metadata, area, update)`` shows data in an area (an empty name: in a new one), or updates the area."""


class StripWidget(anywidget.AnyWidget):
    """Live line under a cell that runs for more than a moment.

    Args:
        recording: Has the ranks' spans.
        ranks: The ranks of the cell.
        label: The name that users know the cell by: ``[7]``.
        begun: When the cell began, by ``time.monotonic()``.
        show: Shows the timeline that the user opens under the cell. Any thread.
    """

    _esm = (STATIC / "strip.js").read_text(encoding="utf-8")
    _css = (STATIC / "strip.css").read_text(encoding="utf-8")
    pace: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)
    opened = traitlets.Int(0).tag(sync=True)

    def __init__(
        self, recording: Recording, ranks: Sequence[int], label: str, begun: float, show: Show
    ) -> None:
        self._recording, self._ranks, self._label, self._begun = recording, tuple(ranks), label, begun
        self._show = show
        self.failures = Failures(recording.failures)
        #: When the cell began on its first rank, on the recording's axis; ``None`` until a rank has reported that.
        self._cell_begin_ns: int | None = None
        #: End of the recording as read last, and when that has grown, by `time.monotonic()`; 0 if it has not yet.
        self._end, self._moved = recording.end, 0.0
        self._timeline: Any = None
        #: Activity of the ranks at that end: it costs too much to compute for each refresh.
        self._pace = RecentActivity()
        #: The text of the last refresh, for one that a rank at a prompt causes.
        self._stalled = ""
        self._refreshing = threading.Lock()
        #: When the page was last sent a state, by ``time.monotonic()``.
        self._sent = begun
        self._finished = False
        #: A CSS class by which the script finds the still of this strip, and hides it.
        self._name = f"hvdlab-strip-{uuid.uuid4().hex[:12]}"
        self._closing = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="hvdlab-strip-heartbeat", daemon=True)
        #: How long the cell had run when the strip was made: a page that reads more at first was opened later.
        self._made = round(time.monotonic() - begun, 1)
        unparented(super().__init__, pace=self._bare_state(""))
        self.refresh(time.monotonic(), "")
        self.on_msg(self._receive)
        # While a rank asks the user, the cell's thread waits for the answer and does not refresh the strip.
        recording.when_paused.append(self._paused)
        self._beating.start()

    # -- the lines ----------------------------------------------------------------------------------------------------

    def bundle(self) -> dict[str, Any]:
        """Return the mime bundle that the notebook shows under the cell."""
        data: Any = self._repr_mimebundle_()
        found = data[0] if isinstance(data, tuple) else data
        return {**found, "text/plain": self.text()}

    def still(self) -> dict[str, str]:
        """Return the mime bundle that a saved notebook shows in place of the strip, which needs the kernel."""
        parts = [_count(len(self._ranks), "rank"), self._label, self._elsewhere()]
        text = " · ".join(part for part in parts if part)
        return {
            "text/html": f'<div class="hvd-still {self._name}">{summary_html(text)}</div>',
            "text/plain": text,
        }

    def began(self, rank: int) -> None:
        """Add a rank that has begun the cell later than the others."""
        self._ranks = tuple(sorted({*self._ranks, rank}))

    def refresh(self, now: float, stalled: str) -> None:
        """Bring the strip up to date. Without effect once the cell has ended.

        Args:
            now: ``time.monotonic()``.
            stalled: The collectives that the cell waits for, in words; empty if there are none.
        """
        with self._refreshing:
            if self._finished:
                return
            self._stalled = stalled
            with self.failures.guard("the strip"):
                self._set(self._state(now, stalled))
                return
            with self.failures.guard("the strip"):
                self._set(self._bare_state(stalled))

    def _paused(self) -> None:
        # A widget that was closed has none, and could not send.
        if self.comm is not None:
            self.refresh(time.monotonic(), self._stalled)

    def finish(self, now: float) -> None:
        """Send the last state: pages that show the strip later, such as one that was reloaded, read that the cell ended."""
        with self._refreshing:
            if self._finished:
                return
            self._finished = True
            self._closing.set()
            with self.failures.guard("the strip"):
                elapsed = round(now - self._begun, 1)
                self._send_pace(self._bare_state("") | {"ended": True, "elapsed": elapsed})

    def _beat(self) -> None:
        """Send the state every ``HEARTBEAT`` seconds in which no other thread sent it.

        The thread that drives the cell can't do that: it may wait for the user's answer to a rank. Nothing is computed here,
        since the driver bounds the cost of that.
        """
        while not self._closing.wait(HEARTBEAT):
            now = time.monotonic()
            if self._recording.closed:
                self.finish(now)
                return
            with self._refreshing, self.failures.guard("the strip"):
                if not self._finished and now >= self._sent + HEARTBEAT:
                    silent = round(now - self._moved, 1) if self._moved else -1
                    self._send_pace(self.pace | {"elapsed": round(now - self._begun, 1), "silent": silent})

    def _elsewhere(self) -> str:
        """Return the place of the cell's whole output, in words; empty if the cell has no number."""
        number = re.fullmatch(r"\[(\d+)\]", self._label)
        return "" if number is None else f"`%hvd_output {number[1]}` shows all that it wrote"

    def _present(self) -> tuple[int, ...]:
        """Return the cell's ranks without those that died or left."""
        there = {member.rank for member in self._recording.membership.members}
        return tuple(rank for rank in self._ranks if rank in there) if there else self._ranks

    def _bare_state(self, stalled: str) -> dict[str, Any]:
        """Return the state of the cell without the recording, and the failures that were in the way of reading that."""
        count = _count(len(self._present()), "rank")
        return {
            "ranks": [],
            "heading": f"{count} · running {self._label}",
            "title": f"{count} · {self._label}",
            "elsewhere": self._elsewhere(),
            "made": self._made,
            "still": self._name,
            "ended": False,
            "rate": "",
            "note": "",
            "paused": "",
            "stalled": stalled.partition("\n")[0],
            "elapsed": round(time.monotonic() - self._begun, 1),
            "silent": -1,
            "failed": "; ".join(map(str, self.failures.all())),
        }

    def close(self) -> None:
        """End the widget."""
        self._closing.set()
        if self._paused in self._recording.when_paused:
            self._recording.when_paused.remove(self._paused)
        if self._beating.is_alive() and threading.current_thread() is not self._beating:
            self._beating.join(5)
        super().close()

    def _set(self, state: dict[str, Any]) -> None:
        changed = any(
            state[key] != value for key, value in self.pace.items() if key not in ("elapsed", "silent")
        )
        if changed or time.monotonic() >= self._sent + HEARTBEAT:
            self._send_pace(state)

    def _send_pace(self, state: dict[str, Any]) -> None:
        self._sent = time.monotonic()
        unparented(setattr, self, "pace", state)

    def _state(self, now: float, stalled: str) -> dict[str, Any]:
        end = self._recording.end
        if end != self._end:
            self._end, self._moved = end, now
            since_ns = self._since_ns()
            self._pace = (
                RecentActivity() if since_ns is None else recent_activity(self._recording, since_ns=since_ns)
            )
        known = {one.rank: one for one in self._pace.ranks}
        slowest = self._pace.slowest
        ranks = []
        for rank in self._present():
            one = known.get(rank)
            shares = (0.0, 0.0, 0.0) if one is None else (one.compute, one.wait, one.work)
            ranks.append(
                {
                    "rank": rank,
                    "known": one is not None,
                    **{
                        name: round(share, 2)
                        for name, share in zip(("compute", "wait", "work"), shares, strict=True)
                    },
                    "slowest": slowest is not None and rank == slowest.rank,
                    "paused": self._recording.paused.get(rank, ""),
                }
            )
        note = f"others wait for rank {slowest.rank} ({slowest.held_up:.0%})" if slowest else ""
        return self._bare_state(stalled) | {
            "ranks": ranks,
            "rate": self._rate(self._pace, self._since_ns()),
            "note": note,
            "paused": paused_text({r: why for r, why in self._recording.paused.items() if r in self._ranks}),
            "elapsed": round(now - self._begun, 1),
            "silent": round(now - self._moved, 1) if self._moved else -1,
        }

    def _since_ns(self) -> int | None:
        """Return the time from which on records may be of this cell; ``None`` if that is not known."""
        if self._cell_begin_ns is None:
            offset = self._recording.clock_offset_ns()
            begun_ns = None if offset is None else int(self._begun * 1e9) + offset
            self._cell_begin_ns = cell_begin(self._recording, self._ranks, self._label, begun_ns)
            if self._cell_begin_ns is None:  # the ranks begin no earlier than this process does
                return begun_ns
        return self._cell_begin_ns

    def _rate(self, found: RecentActivity, since_ns: int | None) -> str:
        steps = None if since_ns is None else shown_rate(self._recording, self._present(), since_ns)
        if steps is not None:
            return f"{_digits(steps)} steps/s"
        return f"{_digits(found.per_second)} collectives/s" if found.collectives else ""

    def text(self) -> str:
        """Return the strip in words."""
        return " · ".join(
            part
            for part in (self.pace[name] for name in ("heading", "rate", "paused", "note", "failed"))
            if part
        )

    # -- the still ----------------------------------------------------------------------------------------------------

    def summary(self, now: float) -> str:
        """Return the cell in one line, from all that was recorded of it; empty if nothing was."""
        with self.failures.guard("the summary of the cell"):
            return self._summary(now)
        return str(self.failures.all()[-1])

    def _summary(self, now: float) -> str:
        since_ns = self._since_ns()
        if since_ns is None:
            return ""
        found = recent_activity(self._recording, None, since_ns=since_ns, most=SUMMARY_ROWS)
        if not found.ranks:
            return ""
        compute, wait, work = (
            sum(getattr(one, name) for one in found.ranks) / len(found.ranks)
            for name in ("compute", "wait", "work")
        )
        elapsed = now - self._begun
        parts = [self._took_part(), seconds(elapsed * 1e9)]
        parts.append(self._steps(since_ns, elapsed) or self._rate(found, since_ns))
        where = "" if found.seconds > elapsed / 2 else f" (of the last {seconds(found.seconds * 1e9)})"
        parts.append(
            f"computing {compute:.0%}, waiting for others {wait:.0%}, in collectives {work:.0%}{where}"
        )
        slowest = found.slowest
        if slowest is not None:
            parts.append(
                f"others waited {seconds(slowest.held_up * found.seconds * 1e9)} for rank {slowest.rank}"
            )
        return " · ".join(parts)

    def _took_part(self) -> str:
        """Return the ranks of the cell, and those of them that were gone at its end: ``3 ranks, rank 1 is gone``."""
        gone = [str(rank) for rank in self._ranks if rank not in self._present()]
        count = _count(len(self._ranks), "rank")
        if not gone:
            return count
        return (
            f"{count}, rank {gone[0]} is gone"
            if len(gone) == 1
            else f"{count}, ranks {', '.join(gone)} are gone"
        )

    def _steps(self, since_ns: int, elapsed: float) -> str:
        """Return the steps of the cell, their rate over the whole cell, and their rate at its end; empty if none was reported."""
        steps = step_count(self._recording, self._ranks, since_ns)
        late = shown_rate(self._recording, self._present(), since_ns)
        if steps is None or late is None or elapsed <= 0:
            return ""
        return f"{steps:,} steps, {_digits(steps / elapsed)}/s ({_digits(late)}/s at the end)"

    # -- the browser --------------------------------------------------------------------------------------------------

    def _receive(self, widget: Any, content: Any, buffers: Any) -> None:
        kind = content.get("type") if isinstance(content, dict) else None
        if kind == "hello":
            # Under the lock, so that no older state comes after a newer one.
            with self._refreshing, self.failures.guard("the strip"):
                unparented(self.send_state, "pace")
        elif kind == "open":
            with self.failures.guard("the timeline"):
                self._open()
                unparented(setattr, self, "opened", self.opened + 1)

    def _open(self) -> None:
        """Show the timeline under the cell."""
        from hvdlab.widgets.timeline import TimelineWidget

        if self._timeline is None:
            self._timeline = TimelineWidget(self._recording)
        self._timeline.show_with(self._show)


def cell_begin(
    recording: Recording, ranks: Sequence[int], label: str, not_before_ns: int | None = None
) -> int | None:
    """Return when a cell began on its first rank, on the recording's axis; ``None`` if that is not known.

    Args:
        recording: The recording with the ranks' marks.
        ranks: The ranks of the cell.
        label: The name that users know the cell by. Earlier cells may have had it, if notebooks that have ended ran them.
        not_before_ns: A time before the cell began and after earlier ones of this label. ``None`` if no such time is known: then a cell that
            has ended is taken for an earlier one.
    """
    begins = [
        mark.begin_ns
        for mark in recording.annotations()
        if mark.kind == "cell"
        and mark.text == label
        and mark.rank in ranks
        and (mark.end_ns is None if not_before_ns is None else mark.begin_ns >= not_before_ns)
    ]
    return min(begins, default=None)


def summary_html(text: str) -> str:
    """Return a summary as HTML, for the place under a cell that has ended."""
    return f'<div class="hvd-output" style="opacity:.7;font-size:90%">{html.escape(text)}</div>'


def _count(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
