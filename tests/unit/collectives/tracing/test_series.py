"""Series of points: bounded, in the order of their time, and sent in the order in which they came."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlab.collectives.tracing import columns
from hvdlab.collectives.tracing.columns import SeriesStore, unit_of
from hvdlab.collectives.tracing.record_format import CellBeginEvent, ClockSample, Event, Metric, Span, encode
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.types import DType, OpKind

START = 5_000_000_000


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50), st.booleans()), max_size=200))
def test_points_are_those_that_were_put(puts: list[tuple[int, int, bool]]) -> None:
    store = SeriesStore()
    model: dict[int, list[tuple[int, float, int]]] = {}
    for number, (rank, time_ns, amends) in enumerate(puts):
        mine = model.setdefault(rank, [])
        if amends:
            same = [i for i, one in enumerate(mine) if one[0] == time_ns]
            if same:
                mine[same[0]] = (time_ns, float(number), number)
            else:
                mine.append((time_ns, float(number), number))
            store.amend(rank, "x", time_ns, float(number))
        else:
            mine.append((time_ns, float(number), number))
            store.append(rank, "x", time_ns, float(number))
    for rank, mine in model.items():
        found = store.of(rank, "x")[["time", "value", "number"]].tolist()
        assert [one[0] for one in found] == sorted(one[0] for one in mine)
        assert sorted(found) == sorted(mine)
    everything = sorted(one[2] for mine in model.values() for one in mine)
    assert store.since(0)["number"].tolist() == everything
    middle = len(puts) // 2
    assert store.since(middle, 7)["number"].tolist() == [n for n in everything if n >= middle][:7]
    assert store.end == len(puts)


def test_one_series_takes_no_room_from_another_and_what_is_dropped_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(columns, "MOST_PER_SERIES", 1000)
    store = SeriesStore()
    store.append(0, "epoch", 0, 1.0)
    for k in range(50_000):
        store.append(0, "loss", k, float(k))
    loss = store.of(0, "loss")
    assert 900 < len(loss) <= 1000
    assert loss["value"].tolist() == [float(k) for k in range(50_000 - len(loss), 50_000)]
    assert len(store.of(0, "epoch")) == 1
    assert len(store) + store.dropped == store.end == 50_001


def test_there_are_not_more_series_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "SERIES_KEPT", 3)
    store = SeriesStore()
    for k in range(5):
        store.append(0, f"loss of step {k}", k, 1.0)
    assert [one.name for one in store.series] == [f"loss of step {k}" for k in range(3)]
    assert (len(store), store.refused) == (3, 2)


def test_what_hvdlab_measures_has_a_unit() -> None:
    units = {
        "hvdlab/rss": "B",
        "hvdlab/gpu3/memory": "B",
        "hvdlab/gpu3/utilisation": "%",
        "hvdlab/share/wait": "1",
        "hvdlab/bandwidth/bus/allreduce": "B/s",
        "hvdlab/threads": "",
        "loss": "",
    }
    assert {name: unit_of(name) for name in units} == units


def test_metrics_are_a_table() -> None:
    recording = Recording()
    recording.feed(1, encode(1, [Metric("loss", 0.5, 7, START), Metric("hvdlab/rss", 1e9, None, START + 5)]))
    recording.feed(0, encode(0, [Metric("loss", math.inf, None, START + 1_000_000_000)]))
    table = recording.metrics()
    assert table["rank"].tolist() == [1, 1, 0]
    assert table["name"].tolist() == ["loss", "hvdlab/rss", "loss"]
    assert table["time"].tolist() == [0.0, 5e-9, 1.0]
    assert table["value"].tolist() == [0.5, 1e9, math.inf]
    assert table["step"].isna().tolist() == [False, True, True]
    assert table["step"][0] == 7
    assert table["unit"].tolist() == ["", "B", ""]
    assert table.attrs["dropped"] == 0


def test_a_recording_without_metrics_has_an_empty_table() -> None:
    table = Recording().metrics()
    assert table.columns.tolist() == ["rank", "name", "time", "value", "step", "unit"]
    assert len(table) == 0


def test_points_are_asked_for_in_parts() -> None:
    recording = Recording()
    recording.feed(0, encode(0, [Metric("loss", float(k), k, START + k) for k in range(10)]))
    found: list[float] = []
    number = 0
    while number < recording.points_end:
        number, points = recording.points_since(number, 4)
        found += points["value"].tolist()
    assert found == [float(k) for k in range(10)]
    assert recording.points_since(3, 0)[0] == 3


def test_request_for_no_points_reads_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = Recording()
    recording.feed(0, encode(0, [Metric("loss", float(k), k, START + k) for k in range(10)]))
    reads: list[object] = []
    view = columns._Kept.view

    def counted(kept: columns._Kept) -> columns.Points:
        reads.append(kept)
        return view(kept)

    monkeypatch.setattr(columns._Kept, "view", counted)
    number, points = recording.points_since(3, 0)
    assert (number, len(points), reads) == (3, 0, [])
    assert len(recording.points_since(3, 4)[1]) == 4
    assert reads


@pytest.mark.parametrize(
    "event",
    [
        Metric("loss", 1.0, None, 1 << 63),
        CellBeginEvent("7", (1 << 64) - 1),
        ClockSample(5, -(1 << 63), 7),
        Span("x", OpKind.ALLREDUCE, DType.F32, 0, 1, 0, 4, 1 << 62, 1 << 62, 1 << 62, 1 << 62),
    ],
    ids=lambda event: type(event).__name__,
)
def test_impossible_times_are_refused_and_harm_nobody(event: Event) -> None:
    recording = Recording()
    recording.feed(0, encode(0, [event]))
    assert recording.refused == 1
    recording.feed(0, encode(0, [Metric("loss", 0.5, None, START), CellBeginEvent("8", START)]))
    assert recording.metrics()["value"].tolist() == [0.5]
