"""A recording as a file: the same trace as one that was written while the job ran, in each format."""

from __future__ import annotations

import gzip
import io
import math
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.tracing.chrome_trace import ChromeTrace, TraceEvent
from hvdlab.collectives.tracing.record_format import (
    AbortEvent,
    CellBeginEvent,
    CellEndEvent,
    Event,
    Members,
    Metric,
    Span,
    clock_domain,
    decode,
    encode,
)
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.tracing.trace_file import Format, format_of, save_recording, trace_events, write_trace
from hvdlab.collectives.types import DType, Membership, OpKind
from hvdlab.runner.check_trace import check
from support.timeline_traces import steps

START = 5_000_000_000


def recorded(batches: list[tuple[int, bytes]]) -> Recording:
    recording = Recording()
    for rank, batch in batches:
        recording.feed(rank, batch)
    return recording


def saved(recording: Recording) -> list[TraceEvent]:
    return [event for portion in trace_events(recording) for event in portion]


def one(name: str, sequence: int, arrival: int, **more: Any) -> Span:
    times = {
        "submitted_ns": arrival,
        "ready_ns": arrival + 50,
        "started_ns": arrival + 60,
        "finished_ns": arrival + 90,
    }
    values = {
        "name": name,
        "kind": OpKind.ALLREDUCE,
        "dtype": DType.F32,
        "process_set": 0,
        "batch": 0,
        "nbytes": 4,
    }
    return Span(**{**values, "sequence": sequence, **times, **more})


def comparable(events: list[TraceEvent]) -> Counter[bytes]:
    """Return events without the fields that depend on the order of writing."""
    kept = [
        {key: value for key, value in event.items() if key not in ("id2", "tid")}
        for event in events
        if event["ph"] != "M"
    ]
    return Counter(msgspec.json.encode(event, order="sorted") for event in kept)


def test_a_saved_trace_is_what_a_file_written_meanwhile_says() -> None:
    batches = list(steps(4, 30))
    trace = ChromeTrace(hold=math.inf)
    live = [event for _, batch in batches for event in trace.feed(decode(batch), 0.0)]
    live += trace.close()
    recording = recorded(batches)
    assert comparable(saved(recording)) == comparable(live)
    assert check(saved(recording)) == []


def test_who_comes_in_another_order_is_in_the_same_operations() -> None:
    batches = list(steps(3, 20))
    shuffled = [batch for rank in (2, 0, 1) for batch in batches if batch[0] == rank]
    assert comparable(saved(recorded(shuffled))) == comparable(saved(recorded(batches)))


def test_a_number_that_is_used_again_is_another_operation() -> None:
    """As after a coordinator's end, if its successor's news of the generation are lost."""
    events: dict[int, list[Event]] = {rank: [Members(0, 1, 2, START)] for rank in (0, 1)}
    for rank in (0, 1):
        events[rank] += [one("a", 1, START + rank), one("b", 1, START + 5 + rank)]
        events[rank] += [one("a", 1, START + 1000 - rank), one("b", 1, START + 1005 - rank)]
    recording = recorded([(rank, encode(rank, one)) for rank, one in events.items()])
    ran = [event for event in saved(recording) if event["name"] == "ALLREDUCE"]
    assert sorted((event["pid"], event["args"]["tensors"]) for event in ran) == [
        (0, 2),
        (0, 2),
        (1, 2),
        (1, 2),
    ]
    last = [e["args"]["last_rank"] for e in saved(recording) if e["name"] == "LAST_ARRIVAL"]
    assert sorted(last) == [0, 0, 1, 1]


def test_cells_lost_ranks_aborts_and_numbers_are_saved() -> None:
    happened: list[Event] = [
        CellBeginEvent("7", START),
        Metric("loss", 0.5, 3, START + 10),
        Metric("loss", math.nan, None, START + 30),
        one("x", 1, START + 20),
        AbortEvent(0, 1, START + 400, "rank 1 died"),
        CellEndEvent("7", START + 500, False),
        CellBeginEvent("8", START + 600),
    ]
    recording = recorded([(0, encode(0, happened, clock=clock_domain()))])
    members = (m.Member(0, "h", 1, "", ()), m.Member(1, "h", 2, "", ()))
    recording.take_membership(Membership((0, 1), members))
    death = m.Death(1, 2, 0.0, "killed by SIGKILL")
    recording.take_membership(Membership((0, 1), members[:1], (death,)))
    events = saved(recording)
    assert check(events) == []
    assert [e["args"]["status"] for e in events if e["ph"] == "E"] == [
        "failed",
        "running when the trace ended",
    ]
    assert [(e["name"], e["args"]["value"]) for e in events if e["ph"] == "C"] == [("loss", 0.5)]
    assert {"ABORT", "METRIC_NOT_FINITE", "RANK_LEFT"} <= {e["name"] for e in events}


def test_spans_tell_their_line_and_lost_ones_are_counted() -> None:
    recording = Recording(limit=16384)
    spans: list[Event] = [one("x", n, START + 100 * n, site="train.py:3") for n in range(1, 40_000)]
    for begin in range(0, len(spans), 4000):
        recording.feed(0, encode(0, spans[begin : begin + 4000]))
    events = saved(recording)
    lost = [event["args"]["records"] for event in events if event["name"] == "RECORDS_LOST"]
    assert lost == [recording.dropped]
    ran = [event for event in events if event["name"] == "ALLREDUCE"]
    assert len(ran) == recording.count == len(spans) - recording.dropped
    assert {event["args"]["site"] for event in ran} == {"train.py:3"}


# -- files --------------------------------------------------------------------------------------------------------


def test_each_format_has_the_same_events(tmp_path: Path) -> None:
    recording = recorded(list(steps(4, 20)))
    plain, packed = (save_recording(recording, tmp_path / f"run.{kind}") for kind in ("json", "json.gz"))
    events = msgspec.json.decode(plain.read_bytes())
    assert check(events) == []
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert packed.stat().st_size < plain.stat().st_size / 5


def test_an_empty_recording_is_an_empty_trace(tmp_path: Path) -> None:
    assert save_recording(Recording(), tmp_path / "run.json").read_bytes() == b"[]\n"


def test_what_can_not_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    path.write_text("before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hvdlab.collectives.tracing.trace_file.write_trace", full)
    with pytest.raises(OSError, match="No space"):
        save_recording(recorded(list(steps(2, 2))), path)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("run.json", "before")]


@pytest.mark.parametrize(
    ("name", "format", "found"),
    [
        ("a.json", None, "json"),
        ("a.json.gz", None, "json.gz"),
        ("a", "json", "json"),
    ],
)
def test_a_name_says_the_format_unless_it_is_given(name: str, format: str | None, found: str) -> None:
    assert format_of(name, format) == found


@pytest.mark.parametrize(
    ("name", "format"),
    [("a.txt", None), ("a.gz", None), ("a.pftrace", None), ("a.json", "xml"), ("json", None)],
)
def test_an_unknown_format_is_refused(name: str, format: str | None) -> None:
    with pytest.raises(InvalidRequestError, match=r"use \.json or \.json\.gz"):
        format_of(name, format)


@pytest.mark.parametrize("format", ["json", "json.gz"])
def test_events_are_written_as_they_come(format: Format) -> None:
    """Nothing of a portion is kept, so the memory that a trace takes does not grow with it."""
    written: list[int] = []

    class Counting(io.BytesIO):
        def write(self, data: Any) -> int:
            written.append(len(data))
            return len(data)

    sizes = []
    event = {"ph": "X", "name": "A", "cat": "c", "pid": 0, "tid": 1, "dur": 1.0}

    def portions() -> Any:
        for begin in range(0, 80_000, 8_000):
            yield [{**event, "ts": float(n), "args": {"n": n * 7919}} for n in range(begin, begin + 8_000)]
            sizes.append(sum(written))

    write_trace(portions(), Counting(), format)
    assert sizes[-1] > sizes[4] > sizes[0]


def test_what_was_cleared_is_in_no_trace() -> None:
    before: list[Event] = [
        CellBeginEvent("7", START),
        one("x", 1, START + 10),
        CellEndEvent("7", START + 50, True),
    ]
    before += [Metric("loss", 1.0, 1, START + 20), one("x", 2, START + 200)]
    recording = recorded([(0, encode(0, before))])
    assert recording.clear() == 2
    assert (recording.count, recording.dropped) == (0, 0)
    after: list[Event] = [
        CellBeginEvent("8", START + 1000),
        one("y", 3, START + 1010),
        Metric("loss", 2.0, 2, START + 1020),
    ]
    recording.feed(0, encode(0, after))
    assert [name for name in recording.table()["name"]] == ["y"]
    events = saved(recording)
    assert [e["args"]["cell"] for e in events if e["ph"] == "B"] == ["8"]
    assert [e["args"]["value"] for e in events if e["ph"] == "C"] == [2.0]
    assert [e["args"]["tensor"] for e in events if e["name"] == "ALLREDUCE"] == ["y"]
