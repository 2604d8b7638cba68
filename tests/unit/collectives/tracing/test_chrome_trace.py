"""The trace has the measured values: same times, same ranks, no more."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlab.collectives.tracing import chrome_trace
from hvdlab.collectives.tracing.chrome_trace import ARRIVALS_PID, ChromeTrace
from hvdlab.collectives.tracing.record_format import (
    AbortEvent,
    CellBeginEvent,
    CellEndEvent,
    ClockSample,
    Event,
    Members,
    Metric,
    Span,
    decode,
    encode,
)
from hvdlab.collectives.types import DType, OpKind
from hvdlab.runner.check_trace import check
from support.timeline_traces import steps

TraceEvent = dict[str, Any]
BASE = 7_000_000_001


def span(
    sequence: int, submitted: int, ready: int | None, started: int | None, finished: int, **changes: Any
) -> Span:
    fields: dict[str, Any] = {
        "name": "grad",
        "kind": OpKind.ALLREDUCE,
        "dtype": DType.F32,
        "process_set": 0,
        "batch": 0,
        "nbytes": 4000,
    }
    fields |= changes
    return Span(
        sequence=sequence,
        submitted_ns=BASE + submitted,
        ready_ns=None if ready is None else BASE + ready,
        started_ns=None if started is None else BASE + started,
        finished_ns=BASE + finished,
        **fields,
    )


class Converter:
    """Converter that is fed batches and collects the output, with a clock of its own."""

    def __init__(self, **options: Any) -> None:
        self.trace = ChromeTrace(**options)
        self.now = 100.0
        self.events: list[TraceEvent] = []

    def feed(
        self, rank: int, *events: Event, clock: int = 1, dropped: int = 0, refused: int = 0
    ) -> list[TraceEvent]:
        batch = decode(encode(rank, events, clock=clock, dropped=dropped, refused=refused))
        return self._keep(self.trace.feed(batch, self.now))

    def pass_time(self, seconds: float) -> list[TraceEvent]:
        self.now += seconds
        return self._keep(self.trace.expire(self.now))

    def close(self) -> list[TraceEvent]:
        self._keep(self.trace.close())
        assert check(self.events) == []
        return self.events

    def _keep(self, events: list[TraceEvent]) -> list[TraceEvent]:
        self.events += events
        return events


def named(events: list[TraceEvent], name: str, phase: str = "") -> list[TraceEvent]:
    return [event for event in events if event["name"] == name and event["ph"] in (phase or event["ph"])]


def nanos(event: TraceEvent) -> tuple[int, int]:
    return round(event["ts"] * 1000), round(event.get("dur", 0) * 1000)


def test_known_times_come_out_at_those_times() -> None:
    converter = Converter()
    one = span(1, 0, 300, 450, 999, pack_ns=100, transfer_ns=200, wait_ns=50, unpack_ns=30)
    converter.feed(3, one)
    events = converter.close()
    (begin,) = named(events, "NEGOTIATE_ALLREDUCE", "b")
    (end,) = named(events, "NEGOTIATE_ALLREDUCE", "e")
    assert (nanos(begin)[0], nanos(end)[0]) == (BASE, BASE + 300)
    queue_begin, queue_end = named(events, "QUEUE")
    assert (nanos(queue_begin)[0], nanos(queue_end)[0]) == (BASE + 300, BASE + 450)
    (operation,) = named(events, "ALLREDUCE", "X")
    assert nanos(operation) == (BASE + 450, 549)
    assert operation["pid"] == 3
    args = operation["args"]
    assert [args[f"{phase}_us"] for phase in ("pack", "transfer", "wait", "unpack")] == [0.1, 0.2, 0.05, 0.03]
    assert (args["tensor"], args["bytes"], args["dtype"], args["status"]) == ("grad", 4000, "float32", "ok")
    assert args["bytes_per_second"] == round(4000 / 549e-9)


def test_phases_are_labelled_as_sums_and_fit_into_their_operation() -> None:
    converter = Converter()
    converter.feed(0, span(1, 0, 1, 2, 1000, pack_ns=100, transfer_ns=200, unpack_ns=30))
    sums = [event for event in converter.close() if event["name"].endswith("(sum)")]
    assert [(event["name"], nanos(event)) for event in sums] == [
        ("MEMCPY_IN_FUSION_BUFFER (sum)", (BASE + 2, 100)),
        ("TRANSFER (sum)", (BASE + 102, 200)),
        ("MEMCPY_OUT_FUSION_BUFFER (sum)", (BASE + 302, 30)),
    ]
    assert all(event["args"]["position"] == "not measured" for event in sums)


def test_phases_longer_than_their_operation_are_not_drawn() -> None:
    converter = Converter()
    converter.feed(0, span(1, 0, 1, 2, 1000, pack_ns=600, transfer_ns=600))
    events = converter.close()
    assert not [event for event in events if event["name"].endswith("(sum)")]
    assert named(events, "ALLREDUCE")[0]["args"]["pack_us"] == 0.6


def test_the_last_rank_is_named_on_every_rank_and_marked_once() -> None:
    converter = Converter()
    for rank, arrival in enumerate((50, 900, 20)):
        converter.feed(rank, Members(0, 0, 3, BASE), span(1, arrival, 1000, 1100, 1500))
    events = converter.close()
    offsets = {
        event["pid"]: event["args"]["arrival_offset_us"]
        for event in named(events, "NEGOTIATE_ALLREDUCE", "b")
    }
    assert offsets == {0: 0.03, 1: 0.88, 2: 0.0}
    assert {event["args"]["last_rank"] for event in named(events, "NEGOTIATE_ALLREDUCE", "b")} == {1}
    (mark,) = named(events, "LAST_ARRIVAL")
    assert (mark["pid"], nanos(mark)[0], mark["args"]["spread_us"]) == (ARRIVALS_PID, BASE + 900, 0.88)
    assert mark["args"]["arrival_offset_us"] == {"rank 0": 0.03, "rank 1": 0.88, "rank 2": 0.0}


def test_an_operation_is_written_once_all_members_have_recorded_it() -> None:
    converter = Converter()
    converter.feed(0, Members(0, 0, 2, BASE), span(1, 0, 10, 20, 30), span(2, 40, 50, 60, 70))
    assert named(converter.events, "ALLREDUCE") == []
    out = converter.feed(1, span(1, 1, 10, 20, 30), span(2, 41, 50, 60, 70))
    assert [event["args"]["sequence"] for event in named(out, "ALLREDUCE")] == [1, 1, 2, 2]
    converter.close()


def test_a_rank_that_never_reports_holds_nothing_up_for_long() -> None:
    converter = Converter(hold=2.0)
    converter.feed(0, Members(0, 0, 3, BASE), span(1, 0, 10, 20, 30))
    converter.feed(1, span(1, 5, 10, 20, 30))
    assert converter.pass_time(1.9) == []
    assert converter.trace.deadline() == pytest.approx(102.0)
    out = converter.pass_time(0.2)
    assert len(named(out, "ALLREDUCE")) == 2
    assert converter.trace.deadline() is None
    (first, _) = named(out, "NEGOTIATE_ALLREDUCE", "b")
    assert first["args"]["last_rank_of_those_recorded"] == 1
    assert "last_rank" not in first["args"]
    assert named(out, "LAST_ARRIVAL") == [], "a rank whose record is missing may have been later"
    converter.close()


def test_fused_tensors_are_one_operation_and_negotiate_apart() -> None:
    converter = Converter()
    fused = [span(1, i, 100, 200, 300, name=f"t{i}", nbytes=10) for i in range(40)]
    converter.feed(0, *fused[:25])
    converter.feed(0, *fused[25:])
    events = converter.close()
    (operation,) = named(events, "ALLREDUCE")
    assert operation["args"]["tensors"] == 40
    assert operation["args"]["bytes"] == 400
    assert len(operation["args"]["names"]) + operation["args"]["names_not_listed"] == 40
    assert {event["args"]["tensor"] for event in named(events, "NEGOTIATE_ALLREDUCE", "b")} == {
        f"t{i}" for i in range(40)
    }


def test_anonymous_tensors_of_one_operation_are_matched_in_order() -> None:
    converter = Converter()
    for rank in range(2):
        name = "allreduce.noname"
        converter.feed(rank, *(span(1, 10 * i + rank * i, 100, 200, 300, name=name) for i in range(3)))
    marks = named(converter.close(), "LAST_ARRIVAL")
    assert [mark["args"]["spread_us"] for mark in marks] == [0.001, 0.002], (
        "the first ones came at the same time"
    )


def test_a_name_of_an_operation_that_is_used_again_is_another_operation() -> None:
    converter = Converter()
    for rank in range(2):
        converter.feed(rank, span(1, 0, 10, 20, 30))
    for rank in range(2):
        converter.feed(rank, span(1, 1000, 1010, 1020, 1030))
    operations = named(converter.close(), "ALLREDUCE")
    assert sorted((event["pid"], nanos(event)[0] - BASE) for event in operations) == [
        (0, 20),
        (0, 1020),
        (1, 20),
        (1, 1020),
    ]


def test_operations_at_the_same_time_get_lanes_of_their_own() -> None:
    converter = Converter()
    converter.feed(0, span(1, 0, 1, 10, 100), span(2, 0, 1, 50, 150), span(3, 0, 1, 100, 120))
    tids = [event["tid"] for event in named(converter.close(), "ALLREDUCE")]
    assert len(set(tids)) == 2
    assert tids[0] == tids[2]


def test_what_failed_before_it_ran_has_no_later_phases() -> None:
    converter = Converter()
    converter.feed(
        0, span(0, 0, None, None, 77, ok=False, name="early"), span(5, 0, 10, None, 99, ok=False, name="late")
    )
    events = converter.close()
    assert named(events, "ALLREDUCE") == []
    ends = {event["ts"] * 1000 - BASE for event in named(events, "NEGOTIATE_ALLREDUCE", "e")}
    assert {round(end) for end in ends} == {77, 10}
    begins = {
        event["args"]["tensor"]: event["args"].get("status")
        for event in named(events, "NEGOTIATE_ALLREDUCE", "b")
    }
    assert begins == {"early": "failed", "late": None}
    (queue,) = named(events, "QUEUE", "b")
    assert queue["args"]["status"] == "failed"


def test_cells_are_open_until_they_end() -> None:
    converter = Converter()
    converter.feed(
        0, CellBeginEvent("7", BASE), CellBeginEvent("8", BASE + 5), CellEndEvent("7", BASE + 9, True)
    )
    converter.feed(0, Metric("loss", 1.0, 0, BASE + 500), CellEndEvent("6", BASE + 600, False))
    events = converter.close()
    assert [nanos(event)[0] - BASE for event in named(events, "CELL 7")] == [0, 9]
    begin, end = named(events, "CELL 8")
    assert begin["tid"] != named(events, "CELL 7")[0]["tid"]
    assert end["args"] == {"status": "running when the trace ended"}
    assert nanos(end)[0] == BASE + 600
    assert [event["ph"] for event in named(events, "CELL 6 END")] == ["i"]


def test_metrics_are_counters_and_what_json_cannot_say_is_said_in_words() -> None:
    converter = Converter()
    converter.feed(
        2,
        Metric("loss", 0.5, 3, BASE),
        Metric("loss", math.nan, 4, BASE + 1),
        Metric("loss", math.inf, 5, BASE + 2),
    )
    events = converter.close()
    (counter,) = named(events, "loss")
    assert (counter["ph"], counter["pid"], counter["args"]) == ("C", 2, {"value": 0.5})
    assert [event["args"]["value"] for event in named(events, "METRIC_NOT_FINITE")] == ["nan", "inf"]


def test_aborts_and_losses_are_in_the_trace() -> None:
    converter = Converter()
    converter.feed(1, AbortEvent(0, 3, BASE, "rank 2 died"), dropped=5)
    converter.feed(1, dropped=7, refused=1)
    converter.feed(1, dropped=7, refused=1)
    events = converter.close()
    (abort,) = named(events, "ABORT")
    assert abort["args"] == {"process_set": 0, "generation": 3, "why": "rank 2 died"}
    assert [event["args"] for event in named(events, "RECORDS_LOST")] == [
        {"records": 5, "in_all": 5},
        {"records": 2, "in_all": 7},
    ]
    assert len(named(events, "RECORDS_REFUSED")) == 1


@pytest.mark.parametrize("marked", [True, False])
def test_orders_to_execute_are_marked_when_asked_for(marked: bool) -> None:
    converter = Converter(mark_cycles=marked)
    converter.feed(0, span(1, 0, 10, 20, 30), span(1, 0, 10, 30, 40, batch=1), span(2, 0, 50, 60, 70))
    cycles = named(converter.close(), "CYCLE_START")
    assert [nanos(event)[0] - BASE for event in cycles] == ([10, 50] if marked else [])


# -- clocks of several hosts ------------------------------------------------------------------------------------------


def sample(offset: int, uncertainty: int = 10) -> ClockSample:
    return ClockSample(BASE, offset, uncertainty)


def test_ranks_of_one_clock_are_never_shifted_whatever_was_sampled() -> None:
    converter = Converter()
    for rank in range(2):
        converter.feed(rank, sample(5000 * (rank + 1)), span(1, rank, 10, 20, 30), clock=4)
    events = named(converter.close(), "NEGOTIATE_ALLREDUCE", "b")
    assert [nanos(event)[0] - BASE for event in events] == [0, 1]


def test_another_host_is_shifted_onto_the_first_ones_clock() -> None:
    converter = Converter()
    converter.feed(
        0,
        Members(0, 0, 2, BASE),
        sample(1_000_000, 300),
        sample(1_000_100, 10),
        span(1, 0, 10, 20, 30),
        clock=1,
    )
    converter.feed(1, sample(250_100, 20), span(1, 750_500, 750_600, 750_700, 750_800), clock=2)
    events = named(converter.close(), "NEGOTIATE_ALLREDUCE", "b")
    assert [nanos(event)[0] - BASE for event in events] == [0, 500]
    assert [event["args"]["last_rank"] for event in events] == [1, 1]
    assert "last_rank_within_clock_error" not in events[0]["args"]


def test_a_lead_within_the_error_of_the_clocks_is_called_so() -> None:
    converter = Converter()
    converter.feed(0, Members(0, 0, 2, BASE), sample(0, 400), span(1, 0, 1000, 1010, 1020), clock=1)
    converter.feed(1, sample(0, 400), span(1, 700, 1000, 1010, 1020), clock=2)
    begins = named(converter.close(), "NEGOTIATE_ALLREDUCE", "b")
    assert begins[0]["args"]["last_rank_within_clock_error"] is True


def test_a_host_whose_clock_is_unknown_waits_for_its_first_sample() -> None:
    converter = Converter()
    converter.feed(0, sample(100), span(1, 0, 10, 20, 30), clock=1)
    assert converter.feed(1, span(1, 50, 60, 70, 80), clock=2) == []
    out = converter.feed(1, sample(50), clock=2)
    assert {event["pid"] for event in out} == {1}
    begins = named(converter.close(), "NEGOTIATE_ALLREDUCE", "b")
    assert {event["pid"]: nanos(event)[0] - BASE for event in begins} == {0: 0, 1: 0}


def test_a_host_that_was_never_compared_is_written_and_marked() -> None:
    converter = Converter()
    converter.feed(0, span(1, 0, 10, 20, 30), clock=1)
    converter.feed(1, span(2, 50, 60, 70, 80), clock=2)
    events = converter.close()
    assert [event["pid"] for event in named(events, "CLOCK_NOT_ALIGNED")] == [1]
    assert {event["pid"] for event in named(events, "ALLREDUCE")} == {0, 1}


# -- as a whole -------------------------------------------------------------------------------------------------------


def test_a_training_gives_a_good_trace_with_every_span_in_it() -> None:
    converter = Converter(mark_cycles=True)
    spans = 0
    for _, data in steps(4, 10):
        batch = decode(data)
        spans += sum(isinstance(event, Span) for event in batch.events)
        converter._keep(converter.trace.feed(batch, converter.now))
    events = converter.close()
    assert len(named(events, "NEGOTIATE_ALLREDUCE", "b")) == spans == 4 * 10 * 40
    assert {event["args"]["name"] for event in named(events, "process_name")} >= {
        f"rank {rank}" for rank in range(4)
    }


@st.composite
def _spans(draw: st.DrawFn) -> Span:
    times = sorted(draw(st.lists(st.integers(0, 2000), min_size=4, max_size=4)))
    return span(
        draw(st.integers(0, 3)), *times, name=draw(st.sampled_from("ab")), pack_ns=draw(st.integers(0, 100)),
        process_set=draw(st.integers(0, 1)), ok=draw(st.booleans()),
    )  # fmt: skip


CELLS = st.sampled_from(["1", "2"])
TIMES = st.integers(BASE, BASE + 2000)
CELL_EVENTS = st.builds(CellBeginEvent, CELLS, TIMES) | st.builds(CellEndEvent, CELLS, TIMES, st.booleans())
MIXED: st.SearchStrategy[Event] = st.one_of(
    _spans(),
    CELL_EVENTS,
    st.builds(Members, st.integers(0, 1), st.integers(0, 2), st.integers(0, 3), TIMES),
    st.builds(Metric, st.just("m"), st.floats(), st.none(), TIMES),
    st.builds(ClockSample, TIMES, st.integers(-1000, 1000), st.integers(0, 100)),
)
BATCHES = st.tuples(st.integers(0, 2), st.lists(MIXED, max_size=8), st.integers(0, 1), st.floats(0, 1))


@settings(max_examples=150)
@given(st.lists(BATCHES, max_size=12))
def test_whatever_is_fed_the_trace_obeys_the_format(
    batches: list[tuple[int, list[Event], int, float]],
) -> None:
    converter = Converter(mark_cycles=True)
    spans = 0
    time_ns = BASE
    for rank, events, clock, seconds in batches:
        spans += sum(isinstance(event, Span) for event in events)
        for index, event in enumerate(events):
            if isinstance(event, CellBeginEvent | CellEndEvent):
                # One rank's clock never goes backwards.
                time_ns += 1
                events[index] = replace(event, time_ns=time_ns)
        converter.feed(rank, *events, clock=clock)
        converter.pass_time(seconds)
    events_out = converter.close()
    assert len(named(events_out, "NEGOTIATE_ALLREDUCE", "b")) == spans, (
        "each span is in the trace exactly once"
    )


def test_an_operation_is_given_out_with_the_last_member_s_record_and_not_after_a_while() -> None:
    converter = Converter()
    for rank in (0, 1):
        converter.feed(rank, Members(0, 0, 2, BASE))
    assert converter.feed(0, span(1, 0, 10, 20, 30)) == []
    assert converter.trace.deadline() is not None
    written = converter.feed(1, span(1, 5, 10, 20, 31))
    assert [event["pid"] for event in written if event["name"] == "ALLREDUCE"] == [0, 1]
    assert converter.trace.deadline() is None


def test_a_batch_that_was_cut_may_end_within_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chrome_trace, "BATCH_RECORDS", 3)
    converter = Converter()
    for rank in (0, 1):
        converter.feed(rank, Members(0, 0, 2, BASE))
    tensors = [span(1, 0, 10, 20, 30, name=f"t{i}") for i in range(4)]
    for rank in (0, 1):
        assert converter.feed(rank, *tensors[:3]) == []
    assert converter.feed(0, tensors[3]) == []
    written = converter.feed(1, tensors[3])
    operations = [event for event in written if event["name"] == "ALLREDUCE"]
    assert [event["args"]["tensors"] for event in operations] == [4, 4]
