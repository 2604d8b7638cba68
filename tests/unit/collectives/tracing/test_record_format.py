"""The batch format: encoded batches decode to the same, and all other bytes are refused."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.tracing import record_format
from hvdlab.collectives.tracing.record_format import (
    AbortEvent,
    CellBeginEvent,
    CellEndEvent,
    ClockSample,
    Event,
    Members,
    Metric,
    RecordBatch,
    Span,
    decode,
    encode,
)
from hvdlab.collectives.types import DType, OpKind

U32 = st.integers(0, 2**32 - 1)
TIMES = st.integers(0, 2**62)
TEXTS = st.text(max_size=40).filter(lambda text: text == text.encode("utf-8", "backslashreplace").decode())
SHORT = st.integers(0, 2**31)


@st.composite
def spans(draw: st.DrawFn) -> Span:
    base = draw(TIMES)
    first, second, third = sorted(draw(st.tuples(SHORT, SHORT, SHORT)))
    reached = draw(st.integers(0, 2))
    return Span(
        draw(TEXTS),
        draw(st.sampled_from(OpKind)),
        draw(st.sampled_from(DType)),
        draw(U32),
        draw(U32),
        draw(U32),
        draw(st.integers(0, 2**63)),
        base,
        base + first if reached > 0 else None,
        base + second if reached > 1 else None,
        base + third,
        *draw(st.tuples(SHORT, SHORT, SHORT, SHORT)),
        ok=draw(st.booleans()),
        site=draw(TEXTS),
    )


EVENTS: st.SearchStrategy[Event] = st.one_of(
    spans(),
    st.builds(CellBeginEvent, TEXTS, TIMES),
    st.builds(CellEndEvent, TEXTS, TIMES, st.booleans()),
    st.builds(AbortEvent, U32, U32, TIMES, TEXTS),
    st.builds(Metric, TEXTS, st.floats(allow_nan=False), st.none() | st.integers(-(2**63), 2**63 - 1), TIMES),
    st.builds(ClockSample, TIMES, st.integers(-(2**63), 2**63 - 1), TIMES),
    st.builds(Members, U32, U32, U32, TIMES),
)


@given(U32, st.lists(EVENTS, max_size=20), st.integers(0, 2**64 - 1), TIMES, TIMES)
def test_what_is_encoded_comes_back(
    rank: int, events: list[Event], clock: int, dropped: int, refused: int
) -> None:
    batch = decode(encode(rank, events, clock=clock, dropped=dropped, refused=refused))
    assert batch == RecordBatch(rank, clock, dropped, refused, tuple(events))


def test_a_record_is_64_bytes_of_every_kind() -> None:
    assert (
        record_format.SPAN.size
        == record_format.SMALL.size
        == record_format.SMALL_FLOAT.size
        == record_format.RECORD_BYTES
        == 64
    )


def test_a_metric_may_be_nan() -> None:
    (event,) = decode(encode(0, [Metric("loss", math.nan, 3, 5)])).events
    assert isinstance(event, Metric)
    assert math.isnan(event.value)


@given(st.integers(2**32, 2**60), st.integers(0, 100))
def test_a_long_span_is_exact_to_its_stated_resolution(length: int, pack: int) -> None:
    span = Span(
        "x", OpKind.ALLREDUCE, DType.F32, 0, 1, 0, 4, 7, 7 + length // 2, 7 + length // 2, 7 + length, pack
    )
    (got,) = decode(encode(0, [span])).events
    assert isinstance(got, Span)
    assert got.submitted_ns == 7
    assert 0 <= span.finished_ns - got.finished_ns < got.resolution_ns
    assert got.ready_ns is not None
    assert 0 <= 7 + length // 2 - got.ready_ns < got.resolution_ns
    assert got.resolution_ns <= length / 2**31


@pytest.mark.parametrize("order", [(5, 4, 6, 7), (5, 6, 5, 7), (5, 6, 7, 6)])
def test_times_out_of_order_are_refused(order: tuple[int, int, int, int]) -> None:
    span = Span("x", OpKind.ALLREDUCE, DType.F32, 0, 1, 0, 4, *order)
    with pytest.raises(ValueError, match="in order"):
        encode(0, [span])


def test_a_name_is_cut_at_a_character_and_lone_surrogates_survive() -> None:
    (cell, other) = decode(encode(0, [CellBeginEvent("é" * 2000, 1), CellBeginEvent("a\ud800b", 2)])).events
    assert isinstance(cell, CellBeginEvent)
    assert isinstance(other, CellBeginEvent)
    assert cell.cell == "é" * (record_format.MAX_TEXT_BYTES // 2)
    assert other.cell == "a\\ud800b"


@given(st.binary(max_size=300))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@given(st.lists(EVENTS, min_size=1, max_size=4), st.data())
def test_a_damaged_batch_is_refused_or_read_but_never_breaks(
    events: list[Event], data: st.DataObject
) -> None:
    good = bytearray(encode(1, events))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    try:
        batch = decode(bytes(good))
    except ProtocolError:
        return
    assert len(batch.events) == len(events)


@given(st.lists(EVENTS, min_size=1, max_size=4), st.data())
def test_a_cut_or_extended_batch_is_refused(events: list[Event], data: st.DataObject) -> None:
    good = encode(1, events)
    cut = data.draw(st.integers(0, len(good) - 1))
    with pytest.raises(ProtocolError):
        decode(good[:cut])
    with pytest.raises(ProtocolError):
        decode(good + b"x")


def test_an_undefined_name_and_an_unknown_type_are_refused() -> None:
    record = record_format.SMALL.pack(record_format.RecordType.CELL_BEGIN, 0, 0, 0, 9, 0, 0, 1, 0, 0)
    with pytest.raises(ProtocolError, match="name 9"):
        decode(record_format.frame(0, 0, 0, 0, [], record))
    record = record_format.SMALL.pack(99, 0, 0, 0, 0, 0, 0, 1, 0, 0)
    with pytest.raises(ProtocolError, match="type 99"):
        decode(record_format.frame(0, 0, 0, 0, [], record))


def test_another_version_is_refused_by_number() -> None:
    data = bytearray(encode(0, []))
    struct.pack_into("<H", data, 4, 7)
    with pytest.raises(ProtocolError, match="version 7"):
        decode(bytes(data))
