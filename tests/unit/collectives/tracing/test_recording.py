"""Spans of several ranks as rows and as a table, and the last rank to arrive."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.tracing import recording as recording_module
from hvdlab.collectives.tracing.collective_matching import Numbering
from hvdlab.collectives.tracing.columns import ROW, RowStore
from hvdlab.collectives.tracing.rank_activity import summarize
from hvdlab.collectives.tracing.record_format import (
    AbortEvent,
    CellBeginEvent,
    CellEndEvent,
    ClockSample,
    Event,
    Members,
    Metric,
    Span,
    clock_domain,
    encode,
)
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.tracing.trace_file import trace_events
from hvdlab.collectives.types import DType, Membership, OpKind
from support.patience import PATIENCE
from support.timeline_traces import steps

MS = 1_000_000
START = 7_000 * MS


def span(name: str, sequence: int, arrival: int, ready: int, end: int, **more: object) -> Span:
    values: dict[str, object] = {"kind": OpKind.ALLREDUCE, "dtype": DType.F32, "process_set": 0, "batch": 0}
    values |= {"nbytes": 4096, "started_ns": ready, **more}
    return Span(
        name=name,
        sequence=sequence,
        submitted_ns=arrival,
        ready_ns=ready,
        finished_ns=end,
        **values,  # type: ignore[arg-type]  # fields of a span
    )


def fed(*batches: tuple[int, Sequence[Event]], clock: int = 1) -> Recording:
    recording = Recording()
    for rank, events in batches:
        recording.feed(rank, encode(rank, events, clock=clock))
    return recording


def world(size: int, generation: int = 1) -> Members:
    return Members(0, generation, size, START)


def test_held_batch_that_is_bad_takes_no_other_along() -> None:
    recording = Recording()
    recording.feed(0, encode(0, [ClockSample(START, 0, 40)], clock=1))
    impossible: list[Event] = [world(m.MOST_RANKS + 1), span("bad", 1, START, START, START)]
    recording.feed(1, encode(1, impossible, clock=2))
    recording.feed(2, encode(2, [span("held", 1, START, START, START)], clock=2))
    released: list[Event] = [ClockSample(START, -5000, 30), span("last", 2, START, START, START)]
    recording.feed(2, encode(2, released, clock=2))
    assert recording.table()["name"].tolist() == ["held", "last"]
    assert recording.refused == 1


def test_the_rank_that_came_last_and_by_how_much() -> None:
    last = START + 24 * MS
    came = {0: START, 1: START + MS, 2: last, 3: START + 2 * MS}
    recording = fed(
        *((rank, (world(4), span("loss", 1, at, last + 1000, last + 5000))) for rank, at in came.items())
    )
    table = recording.table()
    assert table["last_rank"].tolist() == [2] * 4
    assert table["certain"].all()
    assert dict(zip(table["rank"], (table["lateness"] * 1e9).round().astype(int), strict=True)) == {
        rank: at - START for rank, at in came.items()
    }
    assert (table["held_up"] == 0.024).all()
    assert table["duration"].tolist() == [4e-6] * 4
    assert (table["waiting"] * 1e9).round().tolist() == [last + 1000 - at for at in came.values()]


def test_the_highest_rank_and_the_largest_world_have_room() -> None:
    highest = m.MOST_RANKS - 1
    one = span("a", 1, START, START + 10, START + 20)
    table = fed((highest, [world(m.MOST_RANKS), one])).table()
    assert (table["rank"].tolist(), table["ranks"].tolist()) == ([highest], [1])
    for rank, size in ((m.MOST_RANKS, 1), (0, m.MOST_RANKS + 1)):
        recording = fed((rank, [world(size), one]))
        assert (recording.refused, len(recording.table())) == (1, 0)


def test_nobody_is_the_last_before_all_have_come() -> None:
    recording = fed(
        (0, [world(3), span("a", 1, START, START + 9, START + 10)]),
        (1, [world(3), span("a", 1, START + 5, START + 9, START + 10)]),
    )
    table = recording.table()
    assert table["ranks"].tolist() == [2, 2]
    assert not table["certain"].any()
    assert [one.times_last for one in summarize(recording)] == [0, 0]


def test_equal_numbers_of_another_generation_are_other_operations() -> None:
    def rank(number: int) -> list[Event]:
        return [
            world(2, 1),
            span("a", 1, START + number, START + 10, START + 20),
            world(2, 2),
            span("a", 1, START + 100 - number, START + 110, START + 120),
        ]

    table = fed((0, rank(0)), (1, rank(1))).table()
    assert table.groupby("operation")["last_rank"].first().tolist() == [1, 0]


def test_the_same_number_twice_from_one_rank_is_another_operation() -> None:
    one = [span("a", 1, START, START + 10, START + 20), span("a", 1, START + 30, START + 40, START + 50)]
    assert len(set(fed((0, one)).table()["operation"])) == 2


def test_fused_tensors_without_a_name_are_matched_in_order() -> None:
    def rank(number: int) -> list[Event]:
        name = "allreduce.noname"
        return [
            world(2),
            span(name, 1, START + number, START + 50, START + 60),
            span(name, 1, START + 20 - number, START + 50, START + 60),
        ]

    table = fed((0, rank(0)), (1, rank(1))).table()
    assert table["operation"].tolist() == [1, 2, 1, 2]
    assert table["last_rank"].tolist() == [1, 0, 1, 0]


def test_ranks_that_use_a_name_at_different_lines_are_in_one_collective() -> None:
    sites = ["train.py:3", "train.py:9", "", "train.py:3"]
    recording = fed(
        *(
            (rank, (world(4), span("loss", 1, START + rank, START + 9, START + 10, site=site)))
            for rank, site in enumerate(sites)
        )
    )
    table = recording.table()
    assert table["site"].tolist() == sites
    assert table["operation"].tolist() == [1] * 4
    assert table["certain"].all()
    assert recording.names == ["", "loss", "loss", "loss"]
    assert recording.sites == ["", "train.py:3", "train.py:9", ""]


def test_a_lead_within_the_error_of_the_clocks_is_not_certain() -> None:
    recording = Recording()
    here: list[Event] = [world(2), ClockSample(START, 0, 40), span("a", 1, START, START + 300, START + 400)]
    recording.feed(0, encode(0, here, clock=1))
    there: list[Event] = [world(2), span("a", 1, START + 5080, START + 5300, START + 5400)]
    recording.feed(1, encode(1, there, clock=2))
    assert recording.count == 1, "its clock was not compared yet"
    recording.feed(1, encode(1, [ClockSample(START, -5000, 30)], clock=2))
    assert recording.clock_errors() == {1: 70}
    table = recording.table()
    assert (table["lateness"] * 1e9).round().tolist() == [0, 80]
    assert table["certain"].all()
    recording.feed(1, encode(1, [ClockSample(START, -5000, 30)], clock=2))
    recording.feed(0, encode(0, [world(2), span("b", 2, START, START + 300, START + 400)], clock=1))
    recording.feed(1, encode(1, [span("b", 2, START + 5060, START + 5300, START + 5400)], clock=2))
    assert not recording.table().query("name == 'b'")["certain"].any()


def test_what_never_became_an_operation() -> None:
    failed = span("a", 0, START, START, START + 90, ok=False)
    failed = Span(
        **{name: getattr(failed, name) for name in Span.__slots__} | {"ready_ns": None, "started_ns": None}
    )
    table = fed((0, [failed]), (1, [failed])).table()
    assert table["operation"].tolist() == [0, 0]
    assert table["last_rank"].isna().all()
    assert table[["ready", "start", "duration", "lateness"]].isna().all().all()
    assert (table["waiting"] * 1e9).round().tolist() == [90, 90]
    assert not table["ok"].any()


@pytest.mark.parametrize("damage", ["short", "kind", "name", "order"])
def test_a_damaged_batch_is_counted_and_the_next_one_taken(damage: str) -> None:
    good = encode(0, [span("a", 1, START, START + 1, START + 2)])
    bad = bytearray(good)
    if damage == "short":
        del bad[-1]
    elif damage == "kind":
        bad[-63] = 200
    elif damage == "name":
        bad[-60] = 99
    else:
        bad[-28:-24] = b"\xff" * 4
    recording = Recording()
    recording.feed(0, bytes(bad))
    recording.feed(0, good)
    assert (recording.refused, recording.count) == (1, 1)


def test_memory_is_bounded_and_what_was_dropped_is_counted() -> None:
    recording = Recording(limit=20_000)
    sent = 0
    for rank, batch in steps(4, 300):
        recording.feed(rank, batch)
    sent = 4 * 300 * 40
    assert recording.end == sent
    assert 20_000 - RowStore.CHUNK < recording.count <= 20_000 + RowStore.CHUNK
    assert recording.dropped == sent - recording.count
    assert len(recording.table()) == recording.count


def test_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_module, "NAMES_KEPT", 4)
    events: list[Event] = [span(f"t{k}", k + 1, START + k, START + k, START + k + 1) for k in range(6)]
    recording = fed((0, events), (0, events[-1:]))
    assert recording.table()["name"].tolist() == ["t0", "t1", "t2", *["(another name)"] * 4]


def test_names_are_those_that_each_batch_defines() -> None:
    """Ranks number names as they like, and again after they were started again; equal tables are read once."""
    recording = Recording()
    told: list[str] = []
    for step in range(60):
        rank, shift = step % 3, (step * 7) % 11
        used = [f"t{(k * k + shift) % 13}" for k in range(5)]
        told += used
        recording.feed(rank, encode(rank, [span(name, step + 1, START, START, START + 1) for name in used]))
    _, rows = recording.rows_since(0)
    assert [recording.names[number] for number in rows["name"].tolist()] == told
    assert len(recording.names) == len(set(recording.names)) == 14


def test_a_name_that_its_batch_does_not_define_is_refused() -> None:
    recording = Recording()
    good = encode(0, [span("a", 1, START, START, START + 1), span("b", 2, START, START, START + 1)])
    recording.feed(0, good)
    wrong = bytearray(good)
    wrong[-64 + 4 : -64 + 8] = (77).to_bytes(4, "little")
    recording.feed(0, bytes(wrong))
    recording.feed(0, good)
    assert (recording.refused, recording.count) == (1, 4)


def test_every_tensor_of_a_training_has_a_last_rank() -> None:
    recording = Recording()
    for rank, batch in steps(4, 50):
        recording.feed(rank, batch)
    table = recording.table()
    assert table["certain"].all()
    assert (table.groupby("operation").size() == 4).all()
    last = table[table["rank"] == table["last_rank"]]
    assert (last["lateness"] == last["held_up"]).all()
    assert len(last) == 50 * 40
    assert sum(one.times_last for one in summarize(recording)) == 50 * 40


def test_shares_of_a_rank_are_those_of_its_intervals() -> None:
    events: list[Event] = [
        span("a", 1, START, START + 10, START + 30),
        span("b", 2, START + 5, START + 30, START + 50),
        span("c", 3, START + 90, START + 90, START + 100),
    ]
    (one,) = summarize(fed((0, events)))
    assert (one.wait, one.work) == (0.3, 0.5)
    assert one.bandwidth == 3 * 4096 / 50e-9


def test_cells_aborts_and_ranks_that_die() -> None:
    recording = Recording()
    recording.labels = {"ab12": "[7]"}
    members = tuple(m.Member(rank, "h", 100 + rank) for rank in (0, 1))
    recording.feed(0, encode(0, [CellBeginEvent("ab12", START)], clock=clock_domain()))
    recording.feed(1, encode(1, [CellBeginEvent("ab12", START + 5)], clock=clock_domain()))
    assert recording.running(0) == "[7]"
    recording.take_membership(Membership((0, 1), members))
    stamp, marks = recording.annotations_since(0)
    assert [(mark.kind, mark.text, mark.end_ns) for _, mark in marks] == [("cell", "[7]", None)] * 2
    ending: list[Event] = [CellEndEvent("ab12", START + 50, True), AbortEvent(0, 1, START + 60, "why")]
    recording.feed(0, encode(0, ending, clock=clock_domain()))
    recording.take_membership(Membership((0, 1), members[:1], (m.Death(1, 101, 0.0, "killed"),)))
    changed = dict(recording.annotations_since(stamp)[1])
    assert (changed[0].end_ns, changed[0].ok, changed[1].ok) == (START + 50, True, False)
    assert [(mark.kind, mark.text) for number, mark in changed.items() if number > 1] == [
        ("abort", "why"),
        ("left", "rank 1 died: killed"),
    ]
    assert recording.running(1) == ""


def test_mark_of_a_running_cell_outlasts_newer_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_module, "ANNOTATIONS_KEPT", 4)
    recording = fed((0, [CellBeginEvent("long", START)]))
    for number in range(1, 8):
        short: list[Event] = [
            CellBeginEvent(f"{number}", START + number),
            CellEndEvent(f"{number}", START + number, True),
        ]
        recording.feed(1, encode(1, short, clock=1))
    recording.feed(0, encode(0, [CellEndEvent("long", START + 50, True)], clock=1))
    marks = recording.annotations()
    assert [mark.text for mark in marks] == ["long", "5", "6", "7"]
    assert marks[0].end_ns == START + 50


def test_each_interrupt_has_one_mark_for_all_ranks_and_sets() -> None:
    recording = Recording()
    for generation, at in ((1, START), (2, START + MS), (3, START + 5000 * MS)):
        for rank in (0, 1):
            aborts: list[Event] = [AbortEvent(number, generation, at + rank, "why") for number in (0, 3)]
            recording.feed(rank, encode(rank, aborts, clock=1))
    late: list[Event] = [AbortEvent(0, 1, START + 9000 * MS, "why")]
    recording.feed(1, encode(1, late, clock=1))
    assert [mark.begin_ns for mark in recording.annotations()] == [START, START + MS, START + 5000 * MS]


def test_ranks_that_come_are_told_with_host_and_waiting_and_new_generations() -> None:
    recording = Recording()
    recording.feed(0, encode(0, [CellBeginEvent("ab12", START)], clock=clock_domain()))
    here = [m.Member(0, "a#1", 100), m.Member(1, "a#1", 101)]
    there = m.Member(1, "b#2", 201)
    death = m.Death(1, 101, 0.0, "killed")
    worlds = [
        Membership((0, 1), tuple(here), (), 1, (), (0, 1)),
        Membership((0, 1), tuple(here[:1]), (death,), 2),
        Membership((0, 1), tuple(here[:1]), (death,), 2, (), (0,)),
        Membership((0, 1), (here[0], there), (), 2, (1,), (0,)),
        Membership((0, 1), (here[0], there), (), 3),
        Membership((0, 1), (here[0], there), (), 3, (), (0, 1)),
        Membership((0, 1), (here[0], there), (), 4, (), (0, 1)),  # after a failure: no rank came or went
    ]
    for world in worlds:
        recording.take_membership(world)
    marks = [mark for mark in recording.annotations() if mark.kind != "cell"]
    assert [(mark.kind, mark.rank, mark.text) for mark in marks] == [
        ("left", 1, "rank 1 died: killed"),
        ("formed", 0, "rank 0 from now on"),
        ("joined", 1, "rank 1 joined on b, in place of the one that died"),
        ("waiting", 1, "rank 1 waits to be let in"),
        ("formed", 0, "ranks 0,1 from now on"),
    ]
    assert marks[3].end_ns is not None
    assert marks[3].begin_ns <= marks[3].end_ns <= marks[4].begin_ns
    names = [event["name"] for events in trace_events(recording) for event in events]
    assert [name for name in names if name.startswith(("RANK_", "GENERATION"))] == [
        "RANK_LEFT", "GENERATION", "RANK_JOINED", "RANK_WAITS", "RANK_ADMITTED", "GENERATION",
    ]  # fmt: skip


def test_metrics_are_kept() -> None:
    recording = fed((3, [Metric("loss", 0.5, 7, START)]))
    assert recording.points(3, "loss")[["time", "value", "step"]].tolist() == [(START, 0.5, 7)]


def test_who_waits_is_woken_by_a_batch_and_by_the_end() -> None:
    recording = Recording()
    seen: list[int] = []

    def watch() -> None:
        while not recording.closed:
            recording.wait(recording.version if not seen else seen[-1])
            seen.append(recording.version)

    thread = threading.Thread(target=watch)
    thread.start()
    recording.feed(0, encode(0, [span("a", 1, START, START + 1, START + 2)]))
    recording.close()
    thread.join(PATIENCE)
    assert not thread.is_alive()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(1, 40), st.integers(0, 60))
def test_rows_come_out_as_they_went_in(sizes: list[int], limit: int, since: int) -> None:
    store = RowStore(limit)
    store.CHUNK = 8  # small, to have many
    sent = 0
    for size in sizes:
        rows = np.zeros(size, ROW)
        rows["arrival"] = np.arange(sent, sent + size)
        sent += size
        store.append(rows)
    first, found = store.since(since)
    assert first == min(max(since, store.begin), sent)
    assert found["arrival"].tolist() == list(range(first, sent))
    assert store.end == sent
    assert store.since(since, 3)[1]["arrival"].tolist() == list(range(first, sent))[:3]
    assert len(store) <= max(limit, 8) + 8


def test_the_arrow_table_has_the_same_columns_and_nulls_for_what_is_missing() -> None:
    pytest.importorskip("pyarrow")
    failed = Span("x", OpKind.ALLREDUCE, DType.F32, 0, 0, 0, 4, START, None, None, START + 9, ok=False)
    recording = fed((0, [world(2), span("a", 1, START, START + 9, START + 10, site="a.py:1"), failed]))
    arrow, pandas = recording.arrow(), recording.table()
    assert arrow.column_names == list(pandas.columns)
    assert arrow.schema.metadata[b"dropped"] == b"0"
    assert arrow["name"].to_pylist() == ["a", "x"]
    assert arrow["site"].to_pylist() == ["a.py:1", ""]
    assert arrow["ready"].null_count == arrow["start"].null_count == 1
    assert arrow["last_rank"].null_count == 2
    assert arrow["end"].to_pylist() == pandas["end"].tolist()


def test_without_pyarrow_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match="pip install pyarrow"):
        Recording().arrow()


@given(st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, 9), max_size=8)), max_size=30))
def test_many_at_once_get_the_numbers_that_one_by_one_they_would(
    batches: list[tuple[int, list[int]]],
) -> None:
    quick, plain = Numbering(), Numbering()
    for place, (rank, keys) in enumerate(batches):
        bit = 1 << (rank + 32)
        assert quick._numbers(keys, bit) == plain._each(keys, bit)
        if place % 7 == 6:
            for one in (quick, plain):
                one._new, one._old = {}, one._new
        assert (quick._new, quick._old, quick._next) == (plain._new, plain._old, plain._next)
    last = Numbering(), Numbering()
    for one in last:
        one._next = 0xFFFFFFFE  # numbers start over
    assert (
        last[0]._numbers([1, 2, 3], 1 << 32)
        == last[1]._each([1, 2, 3], 1 << 32)
        == [0xFFFFFFFE, 0xFFFFFFFF, 1]
    )


def test_the_rows_that_are_kept_are_the_newest_whatever_memory_they_lie_in() -> None:
    store = RowStore(3 * RowStore.CHUNK)
    for first in range(0, 10 * RowStore.CHUNK, 5000):
        rows = np.zeros(5000, ROW)
        rows["arrival"] = np.arange(first, first + 5000)
        store.append(rows)
        begin, kept = store.since(0)
        assert begin == store.begin
        assert (kept["arrival"] == np.arange(begin, first + 5000)).all()
    assert store.begin > 0


def test_where_a_rank_was_seen_last() -> None:
    clock = clock_domain()
    first, second = (
        span("grad", 1, START, START + 9, START + 10),
        span("loss", 2, START + 20, START + 29, START + 30),
    )
    recording = fed(
        (0, [world(2), replace(first, site="cell [3] line 5"), replace(second, site="cell [3] line 6")]),
        (1, [world(2), replace(first, site="cell [3] line 5")]),
        (2, [world(2), replace(second, name="", kind=OpKind.BARRIER)]),
        clock=clock,
    )
    assert recording.last_seen(0, START) == "allreduce `loss`, cell [3] line 6"
    assert recording.last_seen(1, START) == "allreduce `grad`, cell [3] line 5"
    assert recording.last_seen(2, START) == "barrier"
    assert recording.last_seen(3, START) == ""
    assert recording.last_seen(0, START + 21) == "", "the process before had the rank then"
    recording.feed(
        1, encode(1, [span("x", number, START, START, START) for number in range(2, 20_000)], clock=clock)
    )
    assert recording.last_seen(0, START) == "allreduce `loss`, cell [3] line 6"
    assert recording.last_seen(1, START) == "allreduce `x`"
    recording.clear()
    assert recording.last_seen(0, START) == ""
