"""Series that follow from spans, against their definitions for each millisecond; and unions of intervals, against each moment."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlab.collectives.tracing import derived_series
from hvdlab.collectives.tracing.derived_series import Union, union_lengths
from hvdlab.collectives.tracing.record_format import (
    CellBeginEvent,
    CellEndEvent,
    Event,
    Members,
    Metric,
    Span,
    encode,
)
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.types import DType, OpKind
from support.timeline_traces import steps

MS = 1_000_000
SECOND = 1000 * MS
START = 7 * SECOND
SHARES = ("compute", "wait", "transfer")


def span(name: str, sequence: int, arrival: int, started: int, end: int, **more: object) -> Span:
    values: dict[str, object] = {"kind": OpKind.ALLREDUCE, "dtype": DType.F32, "process_set": 0, "batch": 0}
    return Span(
        name=name,
        sequence=sequence,
        submitted_ns=START + arrival,
        ready_ns=START + started,
        started_ns=START + started,
        finished_ns=START + end,
        **(values | {"nbytes": 4096} | more),  # type: ignore[arg-type]  # fields of a span
    )


def cell(begin: int, end: int) -> list[Event]:
    return [CellBeginEvent("7", START + begin), CellEndEvent("7", START + end, True)]


def recorded(*events: Event, rank: int = 0, size: int = 1) -> Recording:
    recording = Recording()
    # The first event is the beginning of the time axis.
    recording.feed(rank, encode(rank, [Members(0, 0, size, START - 1), *events[:1]]))
    recording.feed(rank, encode(rank, events[1:]))
    return recording


def said(recording: Recording, name: str, rank: int = 0) -> dict[int, float]:
    """Return values by second since the start of everything."""
    origin = recording.origin_ns
    assert origin is not None
    points = recording.points(rank, name)
    assert ((points["time"] - origin) % SECOND == SECOND // 2).all()
    return dict(zip(((points["time"] - origin) // SECOND).tolist(), points["value"].tolist(), strict=True))


def shares(recording: Recording, rank: int = 0) -> dict[int, tuple[float, ...]]:
    each = [said(recording, f"hvdlab/share/{name}", rank) for name in SHARES]
    return {second: tuple(one[second] for one in each) for second in each[0]}


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), max_size=8), max_size=12),
    st.integers(0, 200),
)
def test_a_union_covers_what_its_intervals_do(batches: list[list[tuple[int, int]]], before: int) -> None:
    one = Union()
    covered = np.zeros(400, np.int64)
    for batch in batches:
        begin = np.array([at for at, _ in batch], np.int64)
        length = np.array([length for _, length in batch], np.int64)
        one.add(begin, begin + length)
        for at, size in batch:
            covered[at : at + size] = 1
    assert (one.begin[1:] > one.end[:-1]).all()
    edges = np.arange(0, 401, 7)
    sums = np.concatenate(([0], np.cumsum(covered)))
    assert one.covered(edges).tolist() == np.diff(sums[edges]).tolist()
    one.forget(before)
    assert one.covered(np.array([before, 400])).tolist() == [covered[before:].sum()]


def test_a_rank_that_waits_and_transfers_with_nothing_behind_it() -> None:
    recording = recorded(
        CellBeginEvent("7", START),
        span("a", 1, 200 * MS, 500 * MS, 600 * MS),  # computed 0.2, waited 0.3, transferred 0.1
        span("b", 2, 1700 * MS, 2400 * MS, 3250 * MS),
        CellEndEvent("7", START + 3500 * MS, True),
    )
    found = shares(recording)
    assert list(found) == [0, 1, 2, 3]
    assert found[0] == pytest.approx((0.6, 0.3, 0.1))
    assert found[1] == pytest.approx((0.7, 0.3, 0))
    assert found[2] == pytest.approx((0, 0.4, 0.6))
    assert found[3] == pytest.approx((0.25, 0, 0.25))


def test_collectives_behind_which_a_rank_goes_on_cost_it_nothing() -> None:
    gradients = [span(f"g{k}", k, k * 100 * MS, (k * 100 + 50) * MS, (k * 100 + 150) * MS) for k in range(6)]
    recording = recorded(CellBeginEvent("7", START), *gradients, CellEndEvent("7", START + SECOND, True))
    # Until the last gradient at 0.5 s it went on; then it transferred this and the one before.
    assert shares(recording) == {0: pytest.approx((0.85, 0, 0.15))}


def test_time_blocked_inside_a_collective_is_waiting() -> None:
    fused = [span(name, 1, 0, 0, 400 * MS, wait_ns=100 * MS) for name in ("a", "b")]
    recording = recorded(CellBeginEvent("7", START), *fused, CellEndEvent("7", START + SECOND, True))
    assert shares(recording) == {0: pytest.approx((0.6, 0.1, 0.3))}


def test_a_second_is_not_said_before_it_is_known_and_again_when_more_is() -> None:
    recording = recorded(CellBeginEvent("7", START), span("a", 1, 100 * MS, 100 * MS, 2100 * MS))
    assert list(shares(recording)) == [0, 1]
    recording.feed(0, encode(0, [span("x", 2, 2200 * MS, 2200 * MS, 3400 * MS)]))
    assert shares(recording)[2] == pytest.approx((0.1, 0, 0.9))
    # This one was asked for before all others, and its name was unknown all the time.
    recording.feed(0, encode(0, [span("b", 3, 0, 2150 * MS, 3500 * MS, process_set=1)]))
    found = shares(recording)
    assert sorted(found) == [0, 1, 2]
    assert found[2] != pytest.approx((0.1, 0, 0.9))


def test_idle_time_between_cells_is_nobodys() -> None:
    events: list[Event] = [*cell(0, 400 * MS), CellBeginEvent("8", START + 5 * SECOND)]
    recording = recorded(*events, span("a", 1, 5 * SECOND, 5 * SECOND, 6 * SECOND))
    assert shares(recording) == {0: pytest.approx((0.4, 0, 0)), 5: pytest.approx((0, 0, 1))}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_shares_are_those_of_each_millisecond(seed: int) -> None:
    source = random.Random(seed)
    spans, free, at = [], 0, 0
    for k in range(source.randrange(1, 40)):
        at += source.choice((0, 20, 200, 1500)) * source.randrange(3)
        begin = max(free, at + source.randrange(400))
        free = begin + source.randrange(1, 900)
        spans.append((at, begin, free))
        if source.random() < 0.5:
            at = max(at, free)
        del k
    length = free + 1
    under, work, active = (np.zeros(length, bool) for _ in range(3))
    arrivals = [arrival for arrival, _, _ in spans]
    for arrival, begin, end in spans:
        under[arrival:end] = True
        work[begin:end] = True
        active[arrival : max(one for one in arrivals if one < end)] = True
    states = np.stack((~under | active, under & ~work & ~active, work & ~active))
    recording = recorded(CellBeginEvent("7", START))
    events = [span(f"t{k}", k + 1, a * MS, b * MS, e * MS) for k, (a, b, e) in enumerate(spans)]
    while events:
        size = source.randrange(1, 12)
        recording.feed(0, encode(0, events[:size]))
        del events[:size]
        if source.random() < 0.5:
            recording.points_since(0)
    found = shares(recording)
    assert sorted(found) == list(range(free // 1000))
    for second, each in found.items():
        wanted = states[:, second * 1000 : (second + 1) * 1000].mean(1)
        assert each == pytest.approx(tuple(wanted), abs=1e-9)


def test_shares_of_a_training_sum_to_one() -> None:
    recording = Recording()
    for rank, batch in steps(4, 400):
        recording.feed(rank, batch)
    for rank in range(4):
        whole = {second: sum(each) for second, each in shares(recording, rank).items()}
        assert len(whole) >= 2
        assert list(whole.values())[1:-1] == pytest.approx([1] * (len(whole) - 2))


# -- bandwidth --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "algorithm", "bus"),
    [
        (OpKind.ALLREDUCE, 1, 2 * 3 / 4),
        (OpKind.ALLGATHER, 4, 4 * 3 / 4),
        (OpKind.REDUCESCATTER, 1, 3 / 4),
        (OpKind.ALLTOALL, 1, 3 / 4),
        (OpKind.BROADCAST, 1, 1),
        (OpKind.SENDRECV, 1, 1),
    ],
)
def test_bandwidth_is_that_of_nccl_tests(kind: OpKind, algorithm: float, bus: float) -> None:
    megabyte = 1_000_000
    recording = recorded(
        span("a", 1, 0, 100 * MS, 200 * MS, kind=kind, nbytes=megabyte),
        span("b", 1, 0, 100 * MS, 200 * MS, kind=kind, nbytes=megabyte),  # fused with it
        span("c", 2, 300 * MS, 400 * MS, 700 * MS, kind=kind, nbytes=2 * megabyte),
        span("d", 3, SECOND, SECOND, 2 * SECOND, kind=kind, nbytes=0),
        size=4,
    )
    per_second = 4 * megabyte / 0.4
    assert said(recording, f"hvdlab/bandwidth/algorithm/{kind.label}") == pytest.approx(
        {0: per_second * algorithm}
    )
    assert said(recording, f"hvdlab/bandwidth/bus/{kind.label}") == pytest.approx({0: per_second * bus})


def test_without_the_size_the_bus_is_not_known() -> None:
    recording = Recording()
    recording.feed(0, encode(0, [span("a", 1, 0, 0, SECOND), span("b", 2, SECOND, SECOND, 3 * SECOND)]))
    assert said(recording, "hvdlab/bandwidth/algorithm/allreduce")
    assert not said(recording, "hvdlab/bandwidth/bus/allreduce")


# -- lateness ---------------------------------------------------------------------------------------------------------


def test_lateness_is_the_greatest_of_each_second() -> None:
    recording = Recording()
    late = {0: (0, 0), 1: (3 * MS, 0), 2: (250 * MS, 40 * MS)}
    for rank in range(3):
        events: list[Event] = [Members(0, 0, 3, START)]
        for sequence, by in enumerate(late[rank]):
            begin = sequence * 300 * MS
            events.append(span("loss", sequence + 1, begin + by, begin + 260 * MS, begin + 270 * MS))
        # No other rank takes part: the late rank is unknown.
        events.append(span(f"own{rank}", 10, 900 * MS, 950 * MS, 1100 * MS))
        recording.feed(rank, encode(rank, events))
    for rank in range(3):
        assert said(recording, "hvdlab/lateness", rank) == {0: max(late[rank]) / SECOND}


def test_a_cell_that_fails_before_anything_was_matched() -> None:
    recording = recorded(
        CellBeginEvent("7", START),
        Span(
            *("loss", OpKind.ALLREDUCE, DType.F32, 0, 0, 0, 4096, START, None, None, START + 2 * SECOND),
            ok=False,
        ),
        CellEndEvent("7", START + 3 * SECOND, False),
        size=2,
    )
    assert said(recording, "hvdlab/lateness") == {}
    assert recording.failures.all() == ()


def test_spans_and_points_are_there_although_nothing_can_be_reckoned_from_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise IndexError("no such row")

    monkeypatch.setattr(derived_series.Lateness, "digest", fail)
    monkeypatch.setattr(derived_series, "ROWS_AT_ONCE", 1)
    recording = recorded(*cell(0, SECOND), span("loss", 1, 0, MS, 2 * MS), Metric("loss", 2.5, 0, START))
    assert recording.count == 1
    assert [one.name for one in recording.series()] == ["loss"]
    assert len(recording.points_since(0)[1]) == 1
    (failure,) = recording.failures.all()
    assert failure.text == "IndexError: no such row"
    assert "in fail" in failure.trace
    assert failure.count >= 2
    assert capsys.readouterr() == ("", "")


def test_lateness_agrees_with_the_table() -> None:
    recording = Recording()
    for rank, batch in steps(3, 250):
        recording.feed(rank, batch)
    table = recording.table()
    for rank in range(3):
        own = table[table["rank"] == rank]
        worst = own.groupby((own["arrival"]).astype(int))["lateness"].max()
        for second, value in said(recording, "hvdlab/lateness", rank).items():
            assert value == pytest.approx(worst[second], abs=1e-9)


def test_what_is_kept_for_the_derivation_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derived_series, "INTERVALS_KEPT", 500)
    recording = Recording()
    for rank, batch in steps(2, 400):
        recording.feed(rank, batch)
    one = recording._derived._shares[0]
    assert max(len(each) for each in (one._under_way, one._work, one._busy)) <= 500 + 8192
    recording.metrics()
    assert len(one._under_way) <= 500
    rest = recording._derived._lateness._incomplete
    assert rest is not None
    assert len(rest.op) == 0


INTERVALS = st.lists(st.tuples(st.integers(0, 3), st.integers(-20, 40), st.integers(0, 15)), max_size=20)


@given(INTERVALS, st.integers(-25, 45))
def test_each_moment_of_a_group_counts_once(intervals: list[tuple[int, int, int]], since: int) -> None:
    moments: list[set[int]] = [set() for _ in range(4)]
    for group, begin, length in intervals:
        moments[group].update(range(max(begin, since), begin + length))
    columns = np.array(intervals, np.int64).reshape(-1, 3).T
    found = union_lengths(columns[0], columns[1], columns[1] + columns[2], since, 4)
    assert found.tolist() == [len(group) for group in moments]
