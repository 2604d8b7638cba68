"""The recorder: nothing is lost below its capacity, and losses are counted."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlab.collectives.planes.base import PhaseTimes
from hvdlab.collectives.text import UNKNOWN_SITE
from hvdlab.collectives.tracing.record_format import (
    BATCH_RECORDS,
    AbortEvent,
    CellBeginEvent,
    CellEndEvent,
    ClockSample,
    Event,
    Members,
    Metric,
    RecordBatch,
    Span,
    clock_domain,
    decode,
)
from hvdlab.collectives.tracing.recorder import Recorder
from hvdlab.collectives.types import DType, OpKind

PHASES = PhaseTimes(pack=10, transfer=20, unpack=30, wait=40)


def drained(recorder: Recorder) -> list[Event]:
    return [event for data in recorder.drain() for event in decode(data).events]


def put(recorder: Recorder, sequence: int, name: str = "x") -> None:
    recorder.span(
        recorder.name_id(name), OpKind.ALLREDUCE, DType.F32, 0, sequence, 0, 4, 100, 200, 300, 400, PHASES
    )


def sequences(events: list[Event]) -> list[int]:
    return [event.sequence for event in events if isinstance(event, Span)]


def test_a_span_comes_out_as_it_was_measured() -> None:
    recorder = Recorder(rank=3)
    ident = recorder.name_id("grad.fc")
    recorder.span(
        ident,
        OpKind.ALLGATHER,
        DType.BF16,
        2,
        7,
        1,
        4096,
        10**15,
        10**15 + 5,
        10**15 + 9,
        10**15 + 99,
        PHASES,
        False,
    )
    (data,) = recorder.drain()
    base = 10**15
    expected = Span(
        "grad.fc", OpKind.ALLGATHER, DType.BF16, 2, 7, 1, 4096, base, base + 5, base + 9, base + 99, 10, 20, 40, 30, False
    )  # fmt: skip
    assert decode(data) == RecordBatch(3, clock_domain(), 0, 0, (expected,))


def test_the_batch_form_records_the_same_as_single_calls() -> None:
    one, many = Recorder(), Recorder()
    tensors = [(f"t{i}", i * 8, 50 + i) for i in range(5)] + [("late", 8, 250), ("long ago", 8, 1)]
    common = (OpKind.BROADCAST, DType.I64, 1, 9, 4)
    times = (200, 2**33, 2**33 + 5)
    for name, nbytes, submitted in tensors:
        one.span(one.name_id(name), *common, nbytes, submitted, *times, PHASES, True)
    many.spans(*common, *times, PHASES, True, [(many.name_id(name), size, at) for name, size, at in tensors])
    assert drained(one) == drained(many)
    assert one.refused == many.refused == 1


def test_a_collective_that_failed_before_it_began_says_so() -> None:
    recorder = Recorder()
    recorder.span(
        recorder.name_id("x"), OpKind.ALLREDUCE, DType.F32, 0, 0, 0, 4, 100, 0, 0, 400, PhaseTimes(), False
    )
    (span,) = drained(recorder)
    assert isinstance(span, Span)
    assert (span.ready_ns, span.started_ns, span.finished_ns, span.ok) == (None, None, 400, False)


def test_a_span_of_minutes_is_kept() -> None:
    recorder = Recorder()
    end = 100 + 600 * 10**9
    recorder.span(
        recorder.name_id("x"), OpKind.BARRIER, DType.U8, 0, 1, 0, 0, 100, end - 9, end - 5, end, PhaseTimes()
    )
    (span,) = drained(recorder)
    assert isinstance(span, Span)
    assert 0 <= end - span.finished_ns < span.resolution_ns <= 256


@pytest.mark.parametrize(
    "times", [(100, 90, 95, 99), (100, 200, 150, 300), (100, 200, 300, 250), (-5, 1, 2, 3)]
)
def test_impossible_times_are_refused_and_counted(times: tuple[int, int, int, int]) -> None:
    recorder = Recorder()
    recorder.span(recorder.name_id("x"), OpKind.ALLREDUCE, DType.F32, 0, 1, 0, 4, *times, PHASES)
    assert recorder.refused == 1
    assert drained(recorder) == []


def test_the_small_records_come_out_with_the_time_they_were_made() -> None:
    recorder = Recorder()
    before = time.monotonic_ns()
    recorder.cell_begin("7")
    recorder.metric("loss", 0.25, 12)
    recorder.metric("speed", 3)
    recorder.abort(1, 4, "rank 2 died")
    recorder.members(1, 5, 3, "gloo")
    recorder.cell_end("7", ok=False)
    recorder.clock(1000, 1101, 5050)
    after = time.monotonic_ns()
    events = drained(recorder)
    times = [event.time_ns for event in events if not isinstance(event, Span | ClockSample)]
    assert times == sorted(times)
    assert before <= times[0] <= times[-1] <= after
    assert events == [
        CellBeginEvent("7", times[0]),
        Metric("loss", 0.25, 12, times[1]),
        Metric("speed", 3.0, None, times[2]),
        AbortEvent(1, 4, times[3], "rank 2 died"),
        Members(1, 5, 3, times[4], "gloo"),
        CellEndEvent("7", times[5], False),
        ClockSample(1101, 4000, 51),
    ]


def test_bad_values_are_counted_and_never_raise() -> None:
    recorder = Recorder()
    recorder.metric("loss", 1.0, 2**70)
    recorder.abort(-1, 0, "no such set")
    recorder.span(0, OpKind.ALLREDUCE, DType.F32, -1, 1, 0, 4, 1, 2, 3, 4, PHASES)
    assert recorder.refused == 3
    assert drained(recorder) == []


@settings(max_examples=30)
@given(st.lists(st.integers(1, 40) | st.none(), max_size=30), st.integers(1, 33))
def test_the_ring_keeps_the_newest_and_counts_the_rest(steps: list[int | None], capacity: int) -> None:
    recorder = Recorder(capacity=capacity)
    written, kept, lost = 0, 0, 0
    for step in steps:
        if step is None:
            got = sequences(drained(recorder))
            lost += max(0, written - kept - recorder.capacity)
            assert got == list(range(kept + max(0, written - kept - recorder.capacity), written))
            assert recorder.dropped == lost
            kept = written
            continue
        for _ in range(step):
            put(recorder, written)
            written += 1
        assert recorder.pending() == min(written - kept, recorder.capacity)


@pytest.mark.parametrize("refused", ["metric", "span", "spans"])
def test_a_record_that_can_not_be_packed_leaves_no_damaged_one(refused: str) -> None:
    recorder = Recorder(capacity=4)
    for number in range(4):
        put(recorder, number)
    if refused == "metric":
        recorder.metric("loss", 1.0, step=1 << 80)
    elif refused == "span":
        recorder.span(0, 0, 0, 0, 9, 0, 1 << 80, 1, 2, 3, 4, PhaseTimes())
    else:
        recorder.spans(0, 0, 0, 9, 0, 2, 3, 4, PhaseTimes(), True, [(0, 1 << 80, 1)])
    assert sequences(drained(recorder)) == [1, 2, 3]
    assert (recorder.dropped, recorder.refused) == (1, 1)


def test_a_drain_right_after_a_record_that_can_not_be_packed_meets_no_damaged_one() -> None:
    class Drained:
        """Lock after whose first release by a span another thread drains."""

        def __init__(self) -> None:
            self._lock = threading.RLock()
            self.events: list[Event] | None = None

        def __enter__(self) -> None:
            self._lock.acquire()

        def __exit__(self, *exception: object) -> None:
            self._lock.release()
            if self.events is None:
                self.events = []
                self.events = drained(recorder)

    recorder = Recorder(capacity=4)
    for number in range(4):
        put(recorder, number)
    lock: Any = Drained()
    recorder._lock = lock
    recorder.span(0, 0, 0, 0, 9, 0, 1 << 80, 1, 2, 3, 4, PhaseTimes())
    assert sequences(lock.events) == [1, 2, 3]


def test_a_batch_tells_how_many_were_dropped() -> None:
    recorder = Recorder(capacity=4)
    for number in range(10):
        put(recorder, number)
    (batch,) = (decode(data) for data in recorder.drain())
    assert batch.dropped == 6
    assert sequences(list(batch.events)) == [6, 7, 8, 9]


def test_a_large_ring_is_drained_in_bounded_batches_that_stand_alone() -> None:
    recorder = Recorder(capacity=3 * BATCH_RECORDS)
    for number in range(2 * BATCH_RECORDS + 5):
        put(recorder, number, name=f"name {number % 7}")
    batches = [decode(data) for data in recorder.drain()]
    assert [len(batch.events) for batch in batches] == [BATCH_RECORDS, BATCH_RECORDS, 5]
    events = [event for batch in batches for event in batch.events]
    assert [event.name for event in events if isinstance(event, Span)] == [
        f"name {number % 7}" for number in range(2 * BATCH_RECORDS + 5)
    ]


def test_threads_lose_nothing_below_capacity() -> None:
    recorder = Recorder(capacity=65536)
    count, threads = 2000, 6
    begin = threading.Barrier(threads + 1)
    done = threading.Event()
    got: list[Event] = []

    def write(number: int) -> None:
        begin.wait()
        for index in range(count):
            if index % 3:
                put(recorder, number * count + index, name=f"thread {number}")
            else:
                recorder.metric(f"metric {number}", index, number)

    def read() -> None:
        while not done.is_set():
            got.extend(drained(recorder))

    workers = [threading.Thread(target=write, args=(number,)) for number in range(threads)]
    reader = threading.Thread(target=read)
    for thread in [*workers, reader]:
        thread.start()
    begin.wait()
    for thread in workers:
        thread.join()
    done.set()
    reader.join()
    got += drained(recorder)
    assert recorder.dropped == recorder.refused == recorder.pending() == 0
    assert sorted(sequences(got)) == [n * count + i for n in range(threads) for i in range(count) if i % 3]
    metrics = [(event.step, event.value) for event in got if isinstance(event, Metric)]
    assert sorted(metrics) == [(n, i) for n in range(threads) for i in range(count) if not i % 3]
    for number in range(threads):
        own = [s for s in sequences(got) if s // count == number]
        assert own == sorted(own), "one thread's records keep their order"


def test_a_recorder_that_is_off_records_nothing() -> None:
    recorder = Recorder(enabled=False)
    put(recorder, 1)
    recorder.spans(OpKind.BARRIER, DType.U8, 0, 1, 0, 1, 2, 3, PHASES, True, [(0, 0, 0)])
    recorder.cell_begin("1")
    recorder.metric("loss", 1.0)
    assert recorder.pending() == 0
    assert recorder.drain() == []
    recorder.enabled = True
    put(recorder, 2)
    assert sequences(drained(recorder)) == [2]


def test_names_are_bounded_and_right_if_drained_in_time() -> None:
    recorder = Recorder(max_names=3)
    for number in range(100):
        put(recorder, 3 * number, name=f"name {number}")
        put(recorder, 3 * number + 1, name=f"name {number - 1}")
        put(recorder, 3 * number + 2, name="loss")
        names = [event.name for event in drained(recorder) if isinstance(event, Span)]
        assert names == [f"name {number}", f"name {number - 1}", "loss"]
    assert len(recorder._ids) <= 4
    assert len(recorder._texts) + len(recorder._texts_before) <= 6


def test_a_drain_while_names_are_replaced_finds_those_of_its_records() -> None:
    names: list[str] = []

    class Drained(Recorder):
        """Recorder that another thread drains after each store of texts."""

        def __setattr__(self, attribute: str, value: Any) -> None:
            super().__setattr__(attribute, value)
            if attribute.startswith("_texts") and getattr(self, "_head", None):
                names.extend(event.name for event in drained(self) if isinstance(event, Span))

    recorder = Drained(max_names=3)
    lock: Any = threading.RLock()
    recorder._lock = lock
    for number in range(4):
        put(recorder, number, name=f"name {number}")
    assert names == [f"name {number}" for number in range(3)]


def test_more_names_than_fit_between_two_drains_are_lost_but_never_mixed_up() -> None:
    recorder = Recorder(max_names=3)
    for number in range(9):
        put(recorder, number, name=f"name {number}")
    names = [event.name for event in drained(recorder) if isinstance(event, Span)]
    assert names == ["(unknown name id)"] * 3 + [f"name {number}" for number in range(3, 9)]


def test_an_unknown_name_id_does_not_spoil_the_batch() -> None:
    recorder = Recorder()
    recorder.span(77, OpKind.ALLREDUCE, DType.F32, 0, 1, 0, 4, 1, 2, 3, 4, PHASES)
    (span,) = drained(recorder)
    assert isinstance(span, Span)
    assert span.name == "(unknown name id)"


@pytest.mark.parametrize("arguments", [{"capacity": 0}, {"max_names": 0}])
def test_a_recorder_without_room_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Recorder(**arguments)  # type: ignore[arg-type]  # mypy cannot see which keyword it is


def test_a_span_tells_where_it_was_asked_for() -> None:
    recorder = Recorder()
    sites = ["cell [7] line 4", "train.py:33", "cell [7] line 4", "", UNKNOWN_SITE]
    for number, site in enumerate(sites):
        ident = recorder.name_id("loss", site)
        recorder.span(ident, OpKind.ALLREDUCE, DType.F32, 0, number, 0, 4, 1, 2, 3, 4, PHASES)
    (data,) = recorder.drain()
    found = [(event.name, event.site) for event in decode(data).events if isinstance(event, Span)]
    assert found == [("loss", "" if site == UNKNOWN_SITE else site) for site in sites]
    assert data.count(b"cell [7] line 4") == 1
