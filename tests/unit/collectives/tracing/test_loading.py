"""A trace file read back, and a recording as text."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.tracing import rank_activity, trace_file
from hvdlab.collectives.tracing.chrome_trace import CLOCK_COMPARED
from hvdlab.collectives.tracing.record_format import (
    CellBeginEvent,
    CellEndEvent,
    ClockSample,
    Event,
    Members,
    Metric,
    Span,
    encode,
)
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.tracing.timeline_file import TimelineFile
from hvdlab.collectives.tracing.trace_file import load_trace, save_recording
from hvdlab.collectives.types import DType, Membership, OpKind
from support.timeline_traces import steps

MS = 1_000_000
START = 5_000 * MS


def recorded(count: int = 20) -> Recording:
    recording = Recording()
    for rank, batch in steps(4, count):
        recording.feed(rank, batch)
    return recording


def one(name: str, sequence: int, arrival: int, ready: int, **more: Any) -> Span:
    return Span(
        name,
        OpKind.ALLREDUCE,
        DType.F32,
        0,
        sequence,
        0,
        4096,
        arrival,
        ready,
        ready + 1000,
        ready + MS,
        **more,
    )


@pytest.mark.parametrize("format", ["json", "json.gz"])
def test_a_saved_trace_comes_back_as_it_was(tmp_path: Path, format: str) -> None:
    recording = recorded()
    first = save_recording(recording, tmp_path / f"first.{format}")
    again = load_trace(first)
    assert (
        save_recording(again, tmp_path / "again.json").stat().st_size
        == save_recording(recording, tmp_path / "x.json").stat().st_size
    )
    columns = [
        name for name in recording.table() if name not in ("operation", "arrival", "ready", "start", "end")
    ]
    order = ["rank", "sequence", "name"]
    ours, theirs = (r.table().sort_values(order)[columns] for r in (recording, again))
    assert ours.to_csv(index=False) == theirs.to_csv(index=False)


def test_what_failed_never_began_or_is_of_another_kind_comes_back(tmp_path: Path) -> None:
    events: list[Event] = [
        Members(0, 1, 1, START),
        CellBeginEvent("[7]", START - 5),
        Span(
            "a",
            OpKind.ALLGATHER,
            DType.I64,
            0,
            0,
            0,
            8,
            START,
            None,
            None,
            START + 9,
            ok=False,
            site="x.py:3",
        ),
        Span("b", OpKind.BROADCAST, DType.U8, 0, 2, 1, 8, START, START + 5, None, START + 9, ok=False),
        Span(
            "c",
            OpKind.ALLTOALL,
            DType.F64,
            0,
            3,
            0,
            8,
            START,
            START + 5,
            START + 7,
            START + 9,
            1,
            0,
            0,
            1,
            ok=False,
        ),
        Metric("loss", 0.5, None, START + 3),
        CellEndEvent("[7]", START + 20, False),
    ]
    recording = Recording()
    recording.feed(0, encode(0, events))
    again = load_trace(save_recording(recording, tmp_path / "run.json"))
    columns = ["name", "kind", "dtype", "bytes", "site", "ok", "waiting", "duration", "pack_sum", "sequence"]
    ours, theirs = (r.table().sort_values("name")[columns] for r in (recording, again))
    assert ours.to_csv(index=False) == theirs.to_csv(index=False)
    assert [(m.kind, m.text, m.ok) for m in again.annotations()] == [("cell", "[7]", False)]
    assert [(s.rank, s.name) for s in again.series()][:1] == [(0, "loss")]


def test_a_file_of_a_killed_process_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    file = TimelineFile.start(path)
    for rank, batch in steps(2, 10):
        file.feed(rank, batch)
    file.close()
    whole = load_trace(path).count
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert 0 < load_trace(path).count < whole == 2 * 10 * 40


@pytest.mark.parametrize(
    "text",
    ["", "[]\n", "not json\n", '[\n{"ph":"X"}\n]\n', "[\n[1]\n]\n", '{"traceEvents": []}\n', "\x1f\x8bxx"],
)
def test_another_file_is_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidRequestError, match=r"run\.json is no trace of hvdlab: [^\n]*$"):
        load_trace(path)


def two_hosts() -> Recording:
    """Rank 1 is on another host, whose clock is known to within 70 ns."""
    recording = Recording()
    world = Members(0, 0, 2, START)
    recording.feed(0, encode(0, [world, ClockSample(START, 0, 40), one("a", 1, START, START + 300)], clock=1))
    there = one("a", 1, START + 5060, START + 5300)
    recording.feed(1, encode(1, [world, ClockSample(START, -5000, 30), there], clock=2))
    member = m.Member(1, "far#2", 12)
    recording.take_membership(Membership((0, 1), (m.Member(0, "near#1", 11), member)))
    return recording


def test_a_saved_trace_tells_how_well_clocks_are_known(tmp_path: Path) -> None:
    recording = two_hosts()
    assert recording.clock_errors() == {1: 70}
    path = save_recording(recording, tmp_path / "run.json")
    again = load_trace(path)
    assert again.clock_errors() == {1: 70}
    assert not recording.table()["certain"].any()
    assert not again.table()["certain"].any(), "who was last is as uncertain as before"
    notes = [event["args"] for event in json.loads(path.read_text()) if event["name"] == CLOCK_COMPARED]
    assert notes == [{"error_us": 0.07, "host": "far"}]


def test_a_summary_tells_how_well_clocks_are_known(tmp_path: Path) -> None:
    recording = two_hosts()
    assert rank_activity.report_head(recording).splitlines()[1:] == [
        "clock of rank 1 (far): known to within 70 ns"
    ]
    again = load_trace(save_recording(recording, tmp_path / "run.json.gz"))
    assert rank_activity.report_head(again).splitlines()[1:] == ["clock of rank 1: known to within 70 ns"]
    assert len(rank_activity.report_head(recorded()).splitlines()) == 1


# -- in text ------------------------------------------------------------------------------------------------------


def late_rank() -> Recording:
    """Rank 1 is 40 ms late to `loss` three times out of four."""
    recording = Recording()
    for rank in (0, 1):
        events: list[Event] = [Members(0, 1, 2, START)]
        for n in range(1, 5):
            begin = START + n * 100 * MS
            late = 40 * MS if n != 2 else -5 * MS
            events.append(one("loss", n, begin + rank * late, begin + 41 * MS, site="train.py:3"))
        recording.feed(rank, encode(rank, events))
    return recording


def test_ranks_are_told_by_who_holds_the_others_up() -> None:
    recording = late_rank()
    assert rank_activity.report_head(recording) == "8 spans of 2 ranks in 0.342 s"
    lines = [line.split() for line in rank_activity.report_ranks(recording).splitlines()]
    assert [line[0] for line in lines] == ["rank", "1", "0"]
    assert lines[1][1:5] == ["4", "3", "120", "ms"]
    assert lines[2][1:5] == ["4", "1", "5", "ms"]


def test_collectives_are_told_by_how_long_they_were_waited_in() -> None:
    (titles, line) = rank_activity.report_collectives(late_rank()).splitlines()
    assert titles.split()[:4] == ["tensor", "collective", "line", "spans"]
    assert line.split()[:8] == ["loss", "allreduce", "train.py:3", "8", "125", "ms", "40", "ms"]
    assert line.endswith("rank 1 (75%)")


def test_nothing_recorded_is_told() -> None:
    assert rank_activity.report_head(Recording()) == "nothing was recorded"
    assert rank_activity.format_table([("a", "b"), ("ccc", "d")], "lr") == "a    b\nccc  d"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7, "7 ns"), (1500, "1.5 us"), (2_345_678, "2.35 ms"), (3e9, "3 s"), (12_345e9, "12,345 s")],
)
def test_durations_have_three_digits(value: float, text: str) -> None:
    assert rank_activity.format_duration(value) == text
    assert rank_activity.format_size(1_234_000) == "1.23 MB"


def test_a_small_file_does_not_take_much_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A foreign file of some hundred kilobytes could unpack to a line of a gigabyte."""
    monkeypatch.setattr(trace_file, "UNPACKED_FREE", 1 << 20)
    line = json.dumps({"ph": "C", "pid": 0, "ts": 1, "name": "x", "args": {"value": 1}}).encode()
    bombs = {
        "a line without end": b"[" + b" " * (8 << 20),
        "a name without end": line.replace(b"x", b"x" * (8 << 20)) + b",\n",
        "lines without end": (line + b",\n") * 100_000,
    }
    for name, content in bombs.items():
        path = tmp_path / "bomb.json.gz"
        path.write_bytes(gzip.compress(content))
        tracemalloc.start()
        with pytest.raises(
            InvalidRequestError, match=r"no trace of hvdlab: ValueError: (a line of|it unpacks)"
        ):
            load_trace(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 16 << 20, name
    (tmp_path / "long.json").write_bytes(b"[" + b" " * (4 << 20))
    with pytest.raises(InvalidRequestError, match="a line of"):
        load_trace(tmp_path / "long.json")


def test_traces_stay_far_below_the_ratio_that_is_refused(tmp_path: Path) -> None:
    recording = recorded(30)
    packed, plain = (
        save_recording(recording, tmp_path / "x.json.gz"),
        save_recording(recording, tmp_path / "x.json"),
    )
    assert plain.stat().st_size < trace_file.RATIO_MOST / 2 * packed.stat().st_size


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"ph": "C", "pid": 0, "ts": 1e308, "name": "x", "args": {"value": 1}},\n',
        b'{"ph": "C", "pid": -1, "ts": 1, "name": "x", "args": {"value": 1}},\n',
        b'{"ph": "C", "pid": 1e400, "ts": 1, "name": "x", "args": {"value": 1}},\n',
        b'{"ph": "b", "pid": 0, "ts": 1, "name": "QUEUE", "args": []},\n{"ph": "e", "pid": 0, "ts": 2},\n',
        gzip.compress(b"[]")[:-9] + b"\xff" * 9,
        gzip.compress(b"x" * 100_000)[:60],
    ],
    ids=range(7),
)
def test_whatever_is_in_a_foreign_file_the_error_is_one(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign.json"
    path.write_bytes(content)
    with pytest.raises((InvalidRequestError, OSError)):
        load_trace(path)
