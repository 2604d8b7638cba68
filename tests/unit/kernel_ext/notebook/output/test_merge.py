"""Merging the output of ranks: per-rank order is kept, nothing is lost, equal lines are shown once."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.kernel_ext.notebook.output.merge import (
    HOLD,
    LONGEST_LINE,
    MOST_ROWS,
    REFRESH,
    Cleared,
    LineMerger,
    LineSplitter,
    LiveLines,
    Piece,
    Shown,
    Text,
    hold_time,
)
from hvdlab.kernel_ext.wire.cells import Clear, Display, Stream

LABEL = re.compile(r"^\[([0-9,\-]+)\] (.*)$", re.DOTALL)


def out(text: str) -> tuple[Stream, ...]:
    return (Stream("stdout", text),)


def err(text: str) -> tuple[Stream, ...]:
    return (Stream("stderr", text),)


def lines_of(pieces: list[Piece]) -> list[str]:
    return "".join(p.text for p in pieces if isinstance(p, Text)).splitlines()


def live_of(pieces: list[Piece]) -> list[str]:
    return [p.text() for p in pieces if isinstance(p, LiveLines)]


def ranks_in(spec: str) -> set[int]:
    found: set[int] = set()
    for part in spec.split(","):
        low, _, high = part.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found


def test_what_all_ranks_print_is_shown_once() -> None:
    merger = LineMerger(range(8))
    for rank in range(8):
        merger.feed(rank, out("epoch 3\n"), 0.0)
    assert lines_of(merger.take(0.0)) == ["[0-7] epoch 3"]
    assert merger.deadline is None


def test_what_differs_is_labelled_by_rank() -> None:
    merger = LineMerger(range(2))
    merger.feed(0, out("start\nloss 1\nend\n"), 0.0)
    merger.feed(1, out("start\nloss 2\nend\n"), 0.0)
    assert lines_of(merger.take(0.0)) == ["[0,1] start", "[0] loss 1", "[1] loss 2", "[0,1] end"]


def test_a_line_more_on_one_rank_does_not_split_the_following_ones() -> None:
    merger = LineMerger(range(3))
    merger.feed(0, out("saving\nepoch 1\nepoch 2\n"), 0.0)
    for rank in (1, 2):
        merger.feed(rank, out("epoch 1\nepoch 2\n"), 0.0)
    assert lines_of(merger.take(0.0)) == ["[0] saving", "[0-2] epoch 1", "[0-2] epoch 2"]


def test_lines_that_span_several_rows_stay_together() -> None:
    merger = LineMerger(range(2))
    merger.feed(0, out("tensor([1,\n        2])\n"), 0.0)
    merger.feed(1, out("tensor([3,\n        4])\n"), 0.0)
    assert lines_of(merger.take(0.0)) == [
        "[0] tensor([1,",
        "[0]         2])",
        "[1] tensor([3,",
        "[1]         4])",
    ]


def test_a_line_waits_for_the_others_and_not_longer() -> None:
    merger = LineMerger(range(2))
    merger.feed(0, out("a\n"), 1.0)
    assert merger.take(1.0) == []
    assert merger.deadline == 1.0 + HOLD
    assert lines_of(merger.take(1.0 + HOLD)) == ["[0] a"]
    merger.feed(1, out("a\n"), 2.0)
    assert lines_of(merger.take(2.0 + HOLD)) == ["[1] a"]


def test_a_rank_whose_cell_ended_is_not_waited_for() -> None:
    merger = LineMerger(range(3))
    merger.end(2, 0.0)
    merger.feed(0, out("a\n"), 0.0)
    merger.feed(1, out("a\n"), 0.0)
    assert lines_of(merger.take(0.0)) == ["[0,1] a"]


def test_lines_in_different_order_are_kept_per_rank() -> None:
    merger = LineMerger(range(2))
    merger.feed(0, out("a\nb\n"), 0.0)
    merger.feed(1, out("b\na\n"), 0.0)
    merger.end(0, 0.0)
    merger.end(1, 0.0)
    assert lines_of(merger.take(0.0)) == ["[0] a", "[0,1] b", "[1] a"]


def test_stderr_stays_stderr_and_in_order() -> None:
    merger = LineMerger(range(2))
    for rank in range(2):
        merger.feed(rank, out("1\n") + err("2\n") + out("3\n"), 0.0)
    assert merger.take(0.0) == [
        Text("stdout", "[0,1] 1\n"),
        Text("stderr", "[0,1] 2\n"),
        Text("stdout", "[0,1] 3\n"),
    ]


def test_the_same_text_on_different_streams_is_not_merged() -> None:
    merger = LineMerger(range(2))
    merger.feed(0, out("a\n"), 0.0)
    merger.feed(1, err("a\n"), 0.0)
    assert merger.take(0.0) == [Text("stdout", "[0] a\n"), Text("stderr", "[1] a\n")]


def test_one_rank_alone_is_passed_on_without_label() -> None:
    merger = LineMerger([3])
    merger.feed(3, out("10%\r20%\r"), 0.0)
    merger.feed(3, out("ready"), 0.0)
    assert merger.take(0.0) == [Text("stdout", "10%\r20%\rready")]


def test_an_unfinished_line_is_shown_at_the_end() -> None:
    merger = LineMerger(range(2))
    for rank in range(2):
        merger.feed(rank, out("no newline"), 0.0)
        merger.end(rank, 0.1)
    assert lines_of(merger.take(0.1)) == ["[0,1] no newline"]


def test_a_rank_that_joins_gives_labels_to_what_comes_from_then_on() -> None:
    merger = LineMerger([0])
    merger.feed(0, out("done\nloss "), 0.0)
    assert merger.take(0.0) == [Text("stdout", "done\nloss ")]
    assert merger.deadline is None
    merger.begin(1)
    merger.feed(0, out("1\n"), 0.0)
    merger.feed(1, out("1\n"), 0.0)
    assert lines_of(merger.take(0.0)) == ["[0,1] 1"]


def test_streaming_labels_each_line_at_once() -> None:
    merger = LineMerger(range(2), merge=False)
    merger.feed(0, out("a\n"), 0.0)
    assert lines_of(merger.take(0.0)) == ["[0] a"]
    merger.feed(1, out("a\n"), 0.0)
    assert lines_of(merger.take(0.0)) == ["[1] a"]


# -- progress bars ----------------------------------------------------------------------------------------------------


def test_progress_is_live_until_its_newline() -> None:
    merger = LineMerger(range(2))
    for rank in range(2):
        merger.feed(rank, err("\r 0%"), 0.0)
    assert live_of(merger.take(0.0)) == ["[0,1]  0%"]
    merger.feed(0, err("\r50%"), 0.01)
    assert merger.take(0.01) == []
    assert merger.deadline == REFRESH
    assert live_of(merger.take(REFRESH)) == ["[0] 50%\n[1]  0%"]
    for rank in range(2):
        merger.feed(rank, err("\r100%\nready\n"), 0.2)
    assert merger.take(0.2) == [LiveLines(()), Text("stderr", "[0,1] 100%\n[0,1] ready\n")]


def test_an_unfinished_line_becomes_live_after_a_while() -> None:
    merger = LineMerger(range(2))
    merger.feed(0, out("loading ..."), 0.0)
    assert merger.take(0.0) == []
    assert merger.deadline == HOLD
    assert live_of(merger.take(HOLD)) == ["[0] loading ..."]
    assert merger.deadline is None
    merger.feed(0, out(" done\n"), 1.0)
    assert merger.take(1.0) == [LiveLines(())]
    assert lines_of(merger.take(1.0 + HOLD)) == ["[0] loading ... done"]


def test_windows_newlines_are_newlines() -> None:
    merger = LineMerger(range(2))
    for rank in range(2):
        merger.feed(rank, out("a\r\nb\r\n"), 0.0)
    assert lines_of(merger.take(0.0)) == ["[0,1] a", "[0,1] b"]


def test_a_newline_may_come_apart_from_its_return() -> None:
    merger = LineMerger(range(2))
    for rank in range(2):
        merger.feed(rank, out("a\r"), 0.0)
        merger.feed(rank, out("\nb\n"), 0.0)
    assert lines_of(merger.take(0.0)) == ["[0,1] a", "[0,1] b"]


# -- nested progress bars ---------------------------------------------------------------------------------------------


class Writes(io.StringIO):
    """Stream that keeps each write as a chunk of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: list[str] = []

    def write(self, text: str, /) -> int:
        self.chunks.append(text)
        return len(text)


class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """Bar without a thread that watches it."""

    monitor_interval = 0
    order = 1  # in which tqdm erases and draws its bars again when a line is written above them

    def __hash__(self) -> int:
        return self.order


class InnerBar(Bar):
    """Bar inside another one."""

    order = 2


def nested_bars(outer: int = 2, inner: int = 5, *, leave: bool = False, said: str = "") -> list[str]:
    """Return the writes of two nested bars of tqdm, each a line ``epoch 1/2`` or ``batch 3/5``."""
    stream = Writes()
    for _ in Bar(range(outer), file=stream, mininterval=0, bar_format="epoch {n}/{total}"):
        for _ in InnerBar(
            range(inner), file=stream, mininterval=0, bar_format="batch {n}/{total}", leave=leave
        ):
            if said:
                Bar.write(said, file=stream)
    return stream.chunks


def show_bars(chunks: Iterable[str], ranks: int = 3) -> tuple[list[str], list[str]]:
    """Return the lines and the live states that come of writes that all ranks make, one after another."""
    merger = LineMerger(range(ranks))
    pieces: list[Piece] = []
    now = 0.0
    for chunk in chunks:
        now += 0.01
        for rank in range(ranks):
            merger.feed(rank, err(chunk), now)
        pieces += merger.take(now)
    for rank in range(ranks):
        merger.end(rank, now)
    pieces += merger.take(now)
    return lines_of(pieces), live_of(pieces)


def test_a_nested_bar_overwrites_its_own_line() -> None:
    lines, live = show_bars(nested_bars())
    assert lines == ["[0-2] epoch 2/2"]
    assert all(len(state.splitlines()) <= 2 for state in live)
    assert any(re.fullmatch(r"\[0-2\] epoch 1/2\n\[0-2\] batch \d/5", state) for state in live)


@pytest.mark.parametrize(
    ("cut", "erased"),
    [(0, ""), (1, "\repoch 0/2\r         \r"), (3, "\repoch 0/2\n\rbatch 0/5\r         \r")],
)
def test_nested_bars_of_one_rank_overwrite_their_lines_too(cut: int, erased: str) -> None:
    merger, pieces = LineMerger([0]), list[Piece]()
    bars = nested_bars()
    first = [part for part in ("".join(bars[:cut]), "".join(bars[cut:4])) if part]
    for number, chunk in enumerate(["\r100%\n", "ready\n", *first, *bars[4:], "ready\n"]):
        merger.feed(0, err(chunk), number / 100)
        pieces += merger.take(number / 100)
    # Output before the cursor went up has been passed on as it was: the bar of its last line is erased.
    text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    assert text == f"\r100%\nready\n{erased}epoch 2/2\nready\n"
    live = live_of(pieces)
    assert any(re.fullmatch(r"epoch 1/2\nbatch \d/5", state) for state in live), live
    assert live[-1] == ""


def test_bars_that_stay_are_lines_at_their_end() -> None:
    lines, _ = show_bars(nested_bars(leave=True))
    assert lines == ["[0-2] batch 5/5", "[0-2] batch 5/5", "[0-2] epoch 2/2"]


@pytest.mark.parametrize("order", [0, 2])
def test_lines_written_beside_nested_bars_are_above_them(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InnerBar, "order", order)
    lines, live = show_bars(nested_bars(2, 2, said="step"))
    assert lines == ["[0-2] step"] * 4 + ["[0-2] epoch 2/2"]
    assert not any("step" in state for state in live)


def test_bars_of_ranks_that_differ_are_live_by_position() -> None:
    merger = LineMerger(range(2))
    bars = "\repoch 1/2\n\rbatch {}/5\x1b[A"
    for rank in range(2):
        merger.feed(rank, err(bars.format(rank)), 0.0)
    assert live_of(merger.take(0.0)) == ["[0,1] epoch 1/2\n[0] batch 0/5\n[1] batch 1/5"]


def test_three_bars_at_positions_are_three_lines() -> None:
    stream = Writes()
    bars = [
        Bar(range(2), file=stream, mininterval=0, position=i, bar_format=f"bar {i} {{n}}/{{total}}")
        for i in (0, 2, 1)
    ]
    for _ in range(2):
        for bar in bars:
            bar.update()
    merger = LineMerger(range(2))
    for chunk in stream.chunks:
        for rank in range(2):
            merger.feed(rank, err(chunk), 0.0)
    assert live_of(merger.take(0.0)) == ["[0,1] bar 0 2/2\n[0,1] bar 1 2/2\n[0,1] bar 2 2/2"]
    written = len(stream.chunks)
    for bar in bars:
        bar.close()
    for chunk in stream.chunks[written:]:
        for rank in range(2):
            merger.feed(rank, err(chunk), 1.0)
    for rank in range(2):
        merger.end(rank, 1.0)
    assert sorted(lines_of(merger.take(1.0))) == [f"[0,1] bar {i} 2/2" for i in range(3)]


def test_output_after_an_outer_bar_ends_its_line_at_once() -> None:
    merger = LineMerger(range(2))
    text = "".join(nested_bars())
    for rank in range(2):
        merger.feed(rank, (*err(text), *out("ready\n")), 0.0)
    assert lines_of(merger.take(0.0)) == ["[0,1] epoch 2/2", "[0,1] ready"]
    for rank in range(2):
        merger.feed(rank, err(text + "ready\n"), 1.0)
    assert lines_of(merger.take(1.0)) == ["[0,1] epoch 2/2", "[0,1] ready"]


def test_the_line_of_an_ended_bar_waits_for_a_bar_below_it_no_longer_than_for_other_ranks() -> None:
    merger = LineMerger(range(2))
    for rank in range(2):
        merger.feed(rank, err("\r100%\n"), 0.0)
    assert merger.take(0.0) == [LiveLines((((0, 1), "100%"),))]
    assert merger.deadline == HOLD
    assert merger.take(HOLD) == [LiveLines(()), Text("stderr", "[0,1] 100%\n")]
    assert merger.deadline is None


def test_a_cursor_that_goes_above_all_lines_makes_room_and_no_empty_lines() -> None:
    lines, live = show_bars(["first\n", "second\n", *["\x1b[2A", "\rone\n", "\rtwo\n"] * 30, "\x1b[999A"])
    assert lines == ["[0-2] first", "[0-2] second", "[0-2] one", "[0-2] two"]
    assert live[-2:] == ["[0-2] one\n[0-2] two", ""], live


@given(st.lists(st.integers(1, 40), max_size=30), st.booleans(), st.sampled_from(["", "step"]), st.booleans())
def test_how_the_writes_of_nested_bars_are_cut_does_not_matter(
    sizes: list[int], leave: bool, said: str, inner_first: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InnerBar, "order", 0 if inner_first else 2)
        text = "".join(nested_bars(2, 3, leave=leave, said=said))
    chunks, at = [], 0
    for size in sizes:
        chunks.append(text[at : at + size])
        at += size
    assert show_bars([*chunks, text[at:]])[0] == show_bars([text])[0]


def test_the_rows_of_a_cursor_that_moves_are_bounded() -> None:
    splitter = LineSplitter()
    lines = splitter.feed("".join(f"\rrow {i}\n" for i in range(3 * MOST_ROWS)), 0.0)
    assert lines == [f"row {i}" for i in range(len(lines))]
    assert len(lines) >= 2 * MOST_ROWS - 1
    assert splitter.feed("\x1b[999A" * 3, 0.0) == []
    assert len(splitter.flush()) == 3 * MOST_ROWS - len(lines)


# -- rich output ------------------------------------------------------------------------------------------------------


def test_equal_displays_are_merged_and_keep_their_place() -> None:
    merger = LineMerger(range(2))
    shown = Display({"text/plain": "x"}, {})
    for rank in range(2):
        merger.feed(rank, (*out("before\n"), shown, *out("after\n")), 0.0)
    assert merger.take(0.0) == [
        Text("stdout", "[0,1] before\n"),
        Shown((0, 1), shown),
        Text("stdout", "[0,1] after\n"),
    ]


def test_different_displays_belong_to_their_ranks() -> None:
    merger = LineMerger(range(2))
    shown = [Display({"text/plain": str(rank)}, {}) for rank in range(2)]
    for rank in range(2):
        merger.feed(rank, (shown[rank],), 0.0)
    assert merger.take(0.0) == [Shown((0,), shown[0]), Shown((1,), shown[1])]


def test_displays_that_can_be_updated_are_not_shared() -> None:
    merger = LineMerger(range(2))
    shown = Display({"text/plain": "0%"}, {}, display_id="bar")
    for rank in range(2):
        merger.feed(rank, (shown,), 0.0)
    assert merger.take(0.0) == [Shown((0,), shown), Shown((1,), shown)]


def test_clear_output_of_all_ranks_is_one() -> None:
    merger = LineMerger(range(2))
    for rank in range(2):
        merger.feed(rank, (Clear(True),), 0.0)
    assert merger.take(0.0) == [Cleared((0, 1), True)]


# -- properties -------------------------------------------------------------------------------------------------------

RANKS = 3
steps = st.lists(
    st.tuples(
        st.integers(0, RANKS - 1),
        st.sampled_from(["stdout", "stderr"]),
        st.lists(st.sampled_from(["a", "b", "c", "", "epoch 1", " x"]), max_size=5),
        st.sampled_from([0.0, 0.01, 0.1, 0.3]),
        st.booleans(),
    ),
    max_size=30,
)


@pytest.mark.parametrize("merge", [True, False])
@given(schedule=steps, ended=st.sets(st.integers(0, RANKS - 1)))
def test_each_rank_reads_its_own_lines_in_order(
    merge: bool, schedule: list[tuple[int, str, list[str], float, bool]], ended: set[int]
) -> None:
    merger = LineMerger(range(RANKS), merge=merge)
    wanted: dict[int, list[tuple[str, str]]] = {r: [] for r in range(RANKS)}
    pieces: list[Piece] = []
    now = 0.0
    for rank, name, lines, pause, take in schedule:
        now += pause
        if rank in ended and rank not in merger.running:
            continue
        merger.feed(rank, (Stream(name, "".join(f"{line}\n" for line in lines)),), now)
        wanted[rank] += [(name, line) for line in lines]
        if take:
            pieces += merger.take(now)
            assert merger.deadline is None or merger.deadline > now
        if rank in ended:
            merger.end(rank, now)
    for rank in merger.running.copy():
        merger.end(rank, now)
    pieces += merger.take(now)
    assert merger.deadline is None
    assert projections(pieces) == wanted


def projections(pieces: list[Piece]) -> dict[int, list[tuple[str, str]]]:
    """Return the text that a reader of one rank's labels sees."""
    seen: dict[int, list[tuple[str, str]]] = {r: [] for r in range(RANKS)}
    for piece in pieces:
        assert isinstance(piece, Text)
        for line in piece.text.split("\n")[:-1]:
            match = LABEL.match(line)
            assert match, line
            for rank in ranks_in(match[1]):
                seen[rank].append((piece.name, match[2]))
    return seen


@given(st.lists(st.text(alphabet="ab\r\n", max_size=6), max_size=12))
def test_how_text_is_cut_into_chunks_does_not_matter(parts: list[str]) -> None:
    def shown(chunks: list[str]) -> list[str]:
        merger = LineMerger(range(2))
        for rank in range(2):
            for chunk in chunks:
                merger.feed(rank, out(chunk), 0.0)
            merger.end(rank, 0.0)
        return lines_of(merger.take(0.0))

    assert shown(parts) == shown(["".join(parts)])


def steps_of_each_line(ranks: int, count: int, alike: bool) -> float:
    """Return the lines of Python that the merger executes for each line of output.

    Args:
        ranks: Number of ranks, which write in turn.
        count: Lines that each of them writes.
        alike: Whether all ranks write the same.
    """
    merger, steps, shown, before = LineMerger(range(ranks)), 0, 0, sys.gettrace()
    batches = [
        [
            out("".join(f"{'' if alike else rank} line {i}\n" for i in range(n, n + 500)))
            for rank in range(ranks)
        ]
        for n in range(0, count, 500)
    ]

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal steps
        steps += event == "line"
        return trace

    for batch in batches:
        sys.settrace(trace)
        try:
            for rank, chunks in enumerate(batch):
                merger.feed(rank, chunks, 0.0)
            pieces = merger.take(0.0)
        finally:
            sys.settrace(before)
        shown += len(lines_of(pieces))
    assert shown == count * (1 if alike else ranks)
    return steps / (count * ranks)


@pytest.mark.parametrize("alike", [True, False])
def test_a_line_costs_few_steps_however_many_there_were_before(alike: bool) -> None:
    few, many = (steps_of_each_line(4, count, alike) for count in (1000, 5000))
    assert 1 < many < 40
    assert many == pytest.approx(few, rel=0.01)


@pytest.mark.parametrize("alike", [True, False])
def test_many_ranks_cost_no_more_for_each_line(alike: bool) -> None:
    few, many = (steps_of_each_line(ranks, 500, alike) for ranks in (4, 64))
    assert many <= 1.01 * few


def test_a_very_long_line_is_broken_and_nothing_is_lost() -> None:
    splitter = LineSplitter()
    text = "x" * (3 * LONGEST_LINE + 5)
    lines = [line for at in range(0, len(text), 1000) for line in splitter.feed(text[at : at + 1000], 0.0)]
    assert len(splitter.partial) <= LONGEST_LINE
    assert [len(line) for line in lines] == [LONGEST_LINE] * 3
    assert splitter.feed("\n", 0.0) == ["x" * 5]
    assert [len(line) for line in splitter.feed(f"{text}\nend\n", 0.0)] == [LONGEST_LINE] * 3 + [5, 3]


def test_a_growing_line_costs_little_each_time_it_is_shown() -> None:
    merger = LineMerger([0, 1], hold=0.0, refresh=0.0)
    merger.feed(0, [Stream("stdout", "x" * 50_000)], 0.0)
    (live,) = [piece for piece in merger.take(1.0) if isinstance(piece, LiveLines)]
    assert len(live.text()) < 500
    merger.end(0, 1.0)
    merger.end(1, 1.0)
    assert sum(len(piece.text) for piece in merger.take(1.0) if isinstance(piece, Text)) > 50_000


def test_how_long_lines_wait_can_be_set() -> None:
    merger = LineMerger(range(2), hold=hold_time({"HVDLAB_OUTPUT_HOLD": "3"}))
    merger.feed(0, out("same\n"), 0.0)
    assert lines_of(merger.take(2.9)) == []
    merger.feed(1, out("same\n"), 2.9)
    assert lines_of(merger.take(2.9)) == ["[0,1] same"]
    assert hold_time({}) == HOLD
    with pytest.raises(InvalidRequestError, match="HVDLAB_OUTPUT_HOLD='long'"):
        hold_time({"HVDLAB_OUTPUT_HOLD": "long"})


def test_at_the_end_no_line_waits_any_longer() -> None:
    merger = LineMerger(range(2))
    merger.feed(0, out("whole\nunfinished"), 0.0)
    assert lines_of(merger.take(0.0)) == []
    pieces = merger.take_all(0.0)
    assert (lines_of(pieces), live_of(pieces)) == (["[0] whole"], ["[0] unfinished"])
