"""When a strip comes, and that it disturbs nothing."""

from __future__ import annotations

import logging
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.kernel_ext.notebook.cells.results import CellResults
from hvdlab.kernel_ext.notebook.output.limit import LimitedSink
from hvdlab.kernel_ext.notebook.output.merge import LineMerger, MergingSink
from hvdlab.kernel_ext.notebook.output.transcript import CellRecorder, Transcript
from hvdlab.kernel_ext.notebook.output_channels import LineTracking
from hvdlab.kernel_ext.wire.cells import CellDone, CellError, Clear, Stream
from hvdlab.magics.cell_strip import COST, DELAY, INTERVAL, Strip, Strips, StripSink, strips_enabled
from hvdlab.magics.screens import NotebookScreen
from support.fakes.notebook_recorder import Clock, Recorder
from support.patience import PATIENCE

EMPTY = {"text/plain": "", "text/html": ""}
STILL = {"text/plain": "2 ranks", "text/html": "2 ranks"}
SUMMARY = {"text/plain": "2 ranks · 9 s"}


class View:
    """View that only counts."""

    def __init__(self) -> None:
        self.refreshed: list[tuple[float, str]] = []
        self.released = False
        self.newcomers: list[int] = []
        self.kept: dict[str, str] | None = SUMMARY

    def bundle(self) -> dict[str, Any]:
        return {"text/plain": "strip"}

    def still(self) -> dict[str, str]:
        return STILL

    def began(self, rank: int) -> None:
        self.newcomers.append(rank)

    def refresh(self, now: float, stalled: str) -> None:
        self.refreshed.append((now, stalled))

    def summary(self, now: float) -> dict[str, str] | None:
        return self.kept

    def cell_ended(self, now: float) -> None:
        self.released = True


class Cell:
    """Cell on two ranks whose clock the test moves."""

    def __init__(self, view: View | None = None, *, limit: int = 0, ranks: int = 2) -> None:
        self.recorder, self.clock = Recorder(), Clock()
        self.view = View() if view is None else view
        self.made = 0
        watched = LineTracking(self.recorder)
        self.strip = Strip(watched, self.load, "strip", 0.0)
        screen = NotebookScreen(watched, range(ranks), "c", self.clock)
        inner: Any = MergingSink(LineMerger(range(ranks)), screen, self.clock)
        if limit:
            inner = LimitedSink(inner, range(ranks), limit)
        transcript = Transcript("c", "[1]", range(ranks), Path("/proc/nowhere"))
        self.sink = CellRecorder(transcript, (inner, StripSink(range(ranks), self.strip, self.clock)))
        self.ranks = ranks

    def load(self) -> Any:
        def make() -> View:
            self.made += 1
            return self.view

        return make

    def run(self, until: float) -> None:
        """Run as the driver of a cell does: tick when called, and when the time has come."""
        at = self.sink.tick(self.clock.now)
        while at is not None and at <= until:
            self.clock.now = max(at, self.clock.now)
            self.loaded()
            at = self.sink.tick(self.clock.now)
        self.clock.now = until
        self.loaded()
        self.sink.tick(until)

    def loaded(self) -> None:
        for thread in threading.enumerate():
            if thread.name == "hvdlab-strip":
                thread.join(PATIENCE)

    def end(self) -> None:
        for rank in range(self.ranks):
            self.sink.done(rank, CellDone("c", None, 0.1))
        self.run_to_end(self.clock.now + 1)

    def run_to_end(self, until: float) -> None:
        """Run as the driver does after the last rank's end: it is over once no sink holds anything back."""
        self.run(until)
        assert self.sink.tick(until) is None
        self.sink.finished(CellResults(range(self.ranks), {}))

    def write(self, text: str, rank: int = 0) -> None:
        self.sink.output(rank, (Stream("stdout", text),))
        self.sink.tick(self.clock.now)

    def shown(self) -> list[Any]:
        return [message for message in self.recorder.sent if message[0] in ("display", "update")]


@pytest.fixture
def cell() -> Cell:
    return Cell()


def test_a_quick_cell_has_none(cell: Cell) -> None:
    cell.run(DELAY - 0.01)
    cell.write("hello\n")
    cell.end()
    assert cell.made == 0
    assert not cell.shown()
    assert cell.sink.tick(cell.clock.now) is None


def test_it_comes_is_brought_up_to_date_and_leaves_a_line(cell: Cell) -> None:
    cell.run(10.0)
    assert cell.shown() == [
        ("display", "strip-0-still", STILL),
        ("display", "strip-0", {"text/plain": "strip"}),
    ]
    times = [at for at, _ in cell.view.refreshed]
    assert times[0] < DELAY + 0.3
    assert all(b - a >= INTERVAL for a, b in pairwise(times))
    assert 15 <= len(times) <= 20
    cell.end()
    assert cell.recorder.areas() == {"strip-0-still": EMPTY, "strip-0": EMPTY, "strip-summary": SUMMARY}
    assert cell.view.released


def test_without_anything_to_tell_it_leaves_nothing(cell: Cell) -> None:
    cell.view.kept = None
    cell.run(2.0)
    cell.end()
    assert cell.recorder.areas() == {"strip-0-still": EMPTY, "strip-0": EMPTY}


@pytest.mark.parametrize("how", [None, CellDone("c", CellError("ValueError", "bad batch", (), 0), 0.1)])
def test_of_a_cell_that_failed_the_cause_is_told_and_nothing_else(cell: Cell, how: CellDone | None) -> None:
    cell.run(2.0)
    cell.sink.done(0, how)
    cell.sink.done(1, CellDone("c", None, 0.1))
    cell.run_to_end(3.0)
    assert cell.recorder.areas() == {"strip-0-still": EMPTY, "strip-0": EMPTY}
    assert cell.view.released


def test_the_summary_stands_below_all_output() -> None:
    cell = Cell()
    cell.run(1.0)
    cell.write("x" * 3_000_000 + "\n")
    cell.write("x" * 3_000_000 + "\n", rank=1)
    cell.run(1.5)
    assert cell.sink.backlog() > 0
    for rank in range(2):
        cell.sink.done(rank, CellDone("c", None, 0.1))
    cell.sink.tick(cell.clock.now)
    assert not cell.view.released
    cell.run_to_end(60.0)
    assert [message[0] for message in cell.recorder.sent][-2:] == ["update", "display"]
    assert cell.recorder.sent[-1][1] == "strip-summary"


def test_it_does_not_come_in_the_middle_of_a_line() -> None:
    cell = Cell(ranks=1)
    cell.write("10 %")
    cell.run(3.0)
    assert not cell.shown()
    cell.write(" 20 %\n")
    cell.run(4.0)
    assert len(cell.shown()) == 2
    assert [m[1] for m in cell.recorder.sent if m[0] == "stdout"] == ["10 %", " 20 %\n"]


def test_it_comes_again_after_everything_was_cleared(cell: Cell) -> None:
    cell.run(2.0)
    for rank in range(2):
        cell.sink.output(rank, (Clear(True),))
    cell.run(4.0)
    assert ("clear", True) in cell.recorder.sent
    assert [m[1] for m in cell.shown()] == ["strip-0-still", "strip-0", "strip-1-still", "strip-1"]
    for rank in range(2):
        cell.sink.output(rank, (Clear(False),))
    cell.end()
    assert [m[1] for m in cell.shown()][4:] == ["strip-summary"], "what is gone is not updated"


def test_it_is_told_what_the_cell_waits_for(cell: Cell) -> None:
    cell.sink.status("rank 1 waits", final=False)
    cell.run(1.0)
    cell.sink.status("went on", final=True)
    cell.run(2.0)
    assert cell.view.refreshed[0][1] == "rank 1 waits"
    assert cell.view.refreshed[-1][1] == ""
    assert cell.recorder.areas()["hvdlab-c-status-0"] == {"text/plain": "went on"}


def test_a_rank_that_joins_the_cell_is_shown_whether_the_strip_is_there_yet_or_not(cell: Cell) -> None:
    cell.sink.began(2)
    cell.run(1.0)
    assert cell.view.newcomers == [2]
    cell.sink.began(3)
    cell.run(2.0)
    assert cell.view.newcomers == [2, 3]


def test_output_is_as_without_it() -> None:
    with_strip, without = Cell(limit=1 << 20), Cell(limit=1 << 20)
    without.strip._at = None
    for one in (with_strip, without):
        for step in range(40):
            for rank in range(2):
                one.write(f"step {step}\nof rank {rank}\n", rank)
            one.run(one.clock.now + 0.1)
        one.end()
    written = [
        [m for m in one.recorder.sent if m[0] in ("stdout", "stderr")] for one in (with_strip, without)
    ]
    assert written[0] == written[1]
    assert len(with_strip.shown()) == 5


class Slow(View):
    def __init__(self, cell_clock: dict[str, float]) -> None:
        super().__init__()
        self.clock = cell_clock

    def refresh(self, now: float, stalled: str) -> None:
        super().refresh(now, stalled)
        self.clock["now"] += 0.1


def test_what_takes_long_is_done_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 0.0}
    monkeypatch.setattr("hvdlab.magics.cell_strip.time.monotonic", lambda: clock["now"])
    cell = Cell(Slow(clock))
    cell.run(30.0)
    assert len(cell.view.refreshed) <= 30 / (COST * 0.1) + 1


class Broken(View):
    def refresh(self, now: float, stalled: str) -> None:
        raise RuntimeError("no such thing")


def test_if_it_can_not_be_shown_its_place_says_so_and_the_cell_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cell = Cell(Broken())
    with caplog.at_level(logging.INFO):
        cell.run(5.0)
    assert caplog.text == ""
    (told,) = cell.shown()
    assert "the strip under the cell could not be brought up to date: RuntimeError: no such thing" in str(
        told
    )
    cell.view.refresh = View().refresh  # type: ignore[method-assign]  # it works again
    cell.run(12.0)
    assert "'strip'" in str(cell.shown()[-1])
    cell.write("goes on\n")
    cell.write("goes on\n", rank=1)
    cell.end()
    assert ("stdout", "[0,1] goes on\n") in cell.recorder.sent


def test_without_its_packages_it_never_comes(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hvdlab.widgets.strip", None)  # its import raises ModuleNotFoundError
    kernel = SimpleNamespace(session=None, iopub_socket=None, get_parent=lambda channel: {})
    shell, pool = cast(Any, SimpleNamespace(kernel=kernel)), cast(Any, SimpleNamespace(client=None))
    strip = Strips().strip(shell, pool, "[1]", [0], LineTracking(cell.recorder), "strip")
    now = time.monotonic() + DELAY
    while (at := strip.tick(now)) is not None:
        cell.loaded()
        now = max(now, at)
    strip.end(now, ok=True)
    assert not cell.shown()


def test_a_setting_turns_it_off() -> None:
    assert strips_enabled({})
    assert strips_enabled({"HVDLAB_STRIP": "1"})
    assert not strips_enabled({"HVDLAB_STRIP": "0"})
    with pytest.raises(InvalidRequestError, match="HVDLAB_STRIP"):
        strips_enabled({"HVDLAB_STRIP": "perhaps"})
