"""Metrics on their way to an exporter: the selection, the order, and the fate of a slow or a broken one."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError, NotInitializedError
from hvdlab.collectives.metrics import export as metric_export
from hvdlab.collectives.metrics.export import (
    BATCHES_HELD,
    MOST_AT_ONCE,
    Export,
    JsonLines,
    Point,
    PointReader,
)
from hvdlab.collectives.tracing.columns import RECORD
from hvdlab.collectives.tracing.record_format import (
    RECORD_BYTES,
    CellBeginEvent,
    ClockSample,
    Event,
    Metric,
    clock_domain,
    encode,
)
from support.network.skewed_clock import AHEAD_NS
from support.patience import PATIENCE
from support.ranks.resident import Ranks


def point(value: float, name: str = "loss", rank: int = 0) -> Point:
    return Point(rank, name, value, None, 1e9)


class Kept:
    """Exporter that keeps its metrics; ``before`` is called first."""

    def __init__(self, before: Callable[[Sequence[Point]], object] = lambda points: None) -> None:
        self.before = before
        self.batches: list[list[Point]] = []
        self.closed = 0
        self.threads: set[str] = set()

    def write(self, points: Sequence[Point]) -> None:
        self.threads.add(threading.current_thread().name)
        self.before(points)
        self.batches.append(list(points))

    def close(self) -> None:
        self.closed += 1

    @property
    def values(self) -> list[float]:
        return [one.value for batch in self.batches for one in batch]


# -- the way ------------------------------------------------------------------------------------------------------


def test_all_points_arrive_in_order_on_a_thread_of_their_own() -> None:
    kept = Kept()
    export = Export(kept)
    for value in range(5000):
        export.put([point(value)])
    assert export.close(PATIENCE)
    assert kept.values == list(range(5000))
    assert kept.closed == 1
    assert kept.threads == {"hvdlab-export-Kept"}
    assert max(map(len, kept.batches)) <= MOST_AT_ONCE
    assert repr(export) == "<Export to Kept: 5000 points, closed>"


def test_only_what_is_wanted_goes() -> None:
    kept = Kept()
    export = Export(kept, ["loss*", "hvdlab/step_time"])
    names = ["loss", "loss/train", "my loss", "hvdlab/step_time", "hvdlab/cpu", "Loss"]
    export.put([point(0, name) for name in names])
    export.close(PATIENCE)
    assert [one.name for batch in kept.batches for one in batch] == ["loss", "loss/train", "hvdlab/step_time"]


def test_a_slow_one_holds_nobody_up_and_loses_the_oldest() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(points: Sequence[Point]) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)

    kept = Kept(slow)
    export = Export(kept, limit=100)
    export.put([point(0)])
    assert begun.wait(PATIENCE)
    for value in range(1, 301):
        export.put([point(value)])
    assert export.dropped == 200
    go_on.set()
    export.close(PATIENCE)
    assert kept.values == [0, *range(201, 301)]
    assert export.exported == 101
    assert "200 dropped" in repr(export)


def test_one_that_fails_is_tried_again_and_complained_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail(points: Sequence[Point]) -> None:
        if points[0].value < 3:
            raise ConnectionError("no route to the tracker")

    kept = Kept(fail)
    export = Export(kept)
    with caplog.at_level(logging.WARNING):
        for value in range(6):
            export.put([point(value)])
            waited = time.monotonic() + PATIENCE
            while export.exported + export.failed <= value and time.monotonic() < waited:
                time.sleep(0.001)
        export.close(PATIENCE)
    assert kept.values == [3, 4, 5]
    assert (export.exported, export.failed) == (3, 3)
    assert isinstance(export.error, ConnectionError)
    assert [record.getMessage() for record in caplog.records] == ["Kept could not write metrics"]
    assert "3 failed: ConnectionError('no route to the tracker')" in repr(export)


def test_one_that_can_not_be_closed_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    class Unclosable(Kept):
        def close(self) -> None:
            raise OSError("disk full")

    export = Export(Unclosable())
    with caplog.at_level(logging.WARNING):
        assert export.close(PATIENCE)
    assert [record.getMessage() for record in caplog.records] == ["Unclosable could not be closed"]


def test_one_that_hangs_does_not_hang_who_closes_it() -> None:
    go_on = threading.Event()
    export = Export(Kept(lambda points: go_on.wait(PATIENCE)))
    export.put([point(1)])
    assert not export.close(0.05)
    go_on.set()
    assert export.close(PATIENCE)


def test_what_comes_after_the_end_is_ignored() -> None:
    kept = Kept()
    export = Export(kept)
    export.close(PATIENCE)
    export.put([point(1)])
    assert export.closed
    assert kept.values == []


# -- points of batches --------------------------------------------------------------------------------------------

SECOND = 10**9


def test_points_have_the_time_of_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_export, "wall_offset", lambda: 1_000_000.0)
    reader = PointReader()
    events: list[Event] = [
        CellBeginEvent("c", SECOND),
        Metric("loss", 0.5, 3, 2 * SECOND),
        Metric("x", 1.0, None, 3 * SECOND),
    ]
    assert reader.read(encode(5, events, clock=clock_domain())) == [
        Point(5, "loss", 0.5, 3, 1_000_002.0),
        Point(5, "x", 1.0, None, 1_000_003.0),
    ]


def test_other_hosts_clocks_are_brought_onto_this_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_export, "wall_offset", lambda: 1_000_000.0)
    reader = PointReader()
    far, here = clock_domain() + 1, clock_domain()
    # The coordinator's clock is 4 s ahead of this host's and 3 s behind that of the other.
    sample = ClockSample(SECOND, -3 * SECOND, 0)
    assert reader.read(encode(1, [Metric("loss", 0.5, 3, 20 * SECOND), sample], clock=far)) == []
    own: list[Event] = [Metric("loss", 0.1, 4, 10 * SECOND), ClockSample(SECOND, 4 * SECOND, 0)]
    found = reader.read(encode(0, own, clock=here))
    assert [(one.rank, one.step, one.time) for one in found] == [(1, 3, 1_000_013.0), (0, 4, 1_000_010.0)]
    later = reader.read(encode(1, [Metric("loss", 0.5, 5, 21 * SECOND)], clock=far))
    assert [one.time for one in later] == [1_000_014.0]
    assert reader.dropped == 0


def test_what_can_not_be_aligned_for_long_is_dropped_and_counted() -> None:
    reader = PointReader()
    two = [Metric("loss", 0.5, 3, SECOND), Metric("x", 0.5, 3, SECOND)]
    for _ in range(BATCHES_HELD + 5):
        assert reader.read(encode(1, two, clock=clock_domain() + 1)) == []
    assert reader.dropped == 10


def test_held_batch_that_is_damaged_takes_no_other_along() -> None:
    reader = PointReader()
    far = clock_domain() + 1
    good = encode(1, [Metric("loss", 0.5, 3, 20 * SECOND)], clock=far)
    assert RECORD.fields is not None
    at = len(good) - RECORD_BYTES + RECORD.fields["name"][1]
    damaged = good[:at] + b"\xff\xff" + good[at + 2 :]
    for batch in (damaged, good):
        assert reader.read(batch) == []
    assert reader.read(encode(0, [ClockSample(SECOND, 0, 0)], clock=clock_domain())) == []
    released = reader.read(
        encode(1, [Metric("loss", 0.1, 4, 21 * SECOND), ClockSample(SECOND, 0, 0)], clock=far)
    )
    assert [one.step for one in released] == [3, 4]
    assert reader.refused == 1


def test_a_batch_that_is_damaged_is_counted() -> None:
    reader = PointReader()
    assert reader.read(b"HVDS?") == []
    assert reader.refused == 1


# -- in a world ---------------------------------------------------------------------------------------------------


@pytest.fixture
def world_of_one() -> Iterator[None]:
    context.init()
    yield
    context.shutdown()


def test_metrics_of_this_rank_arrive_with_their_times(world_of_one: None) -> None:
    kept = Kept()
    export = hvd.export(kept, "loss")
    begin = time.time()
    for step in range(100):
        hvd.metric("loss", step / 2, step)
    end = time.time()
    assert export.close(PATIENCE)
    points = [one for batch in kept.batches for one in batch]
    assert [(one.rank, one.name, one.value, one.step) for one in points] == [
        (0, "loss", step / 2, step) for step in range(100)
    ]
    assert begin - 0.01 <= points[0].time <= points[-1].time <= end + 0.01


def test_what_was_recorded_before_shutdown_is_written(world_of_one: None) -> None:
    kept = Kept()
    hvd.export(kept, "loss")
    hvd.metric("loss", 1.0)
    context.shutdown()
    assert kept.values == [1.0]
    assert kept.closed == 1


def test_several_exports_get_the_same(world_of_one: None) -> None:
    first, second = Kept(), Kept()
    exports = [hvd.export(one, "loss") for one in (first, second)]
    hvd.metric("loss", 1.0)
    exports[0].close(10)
    hvd.metric("loss", 2.0)
    exports[1].close(10)
    assert (first.values, second.values) == ([1.0], [1.0, 2.0])


class Targeted(Kept):
    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target


def test_exporting_to_the_same_place_again_replaces_the_export(world_of_one: None) -> None:
    first, other, second = Targeted("here"), Targeted("there"), Targeted("here")
    for exporter in (first, other):
        hvd.export(exporter, "loss")
    hvd.metric("loss", 1.0)
    hvd.export(second, "loss")
    assert (first.values, first.closed) == ([1.0], 1)
    hvd.metric("loss", 2.0)
    context.shutdown()
    assert (first.values, other.values, second.values) == ([1.0], [1.0, 2.0], [2.0])


def test_what_is_no_exporter_is_refused(world_of_one: None) -> None:
    with pytest.raises(InvalidRequestError, match=r"write\(points\) and close\(\).*this is dict"):
        hvd.export({})  # type: ignore[arg-type]  # that is the point
    with pytest.raises(InvalidRequestError, match="this is Kept itself"):
        hvd.export(Kept)  # type: ignore[arg-type]  # that is the point


def test_before_init_it_says_so() -> None:
    with pytest.raises(NotInitializedError, match=r"hvd\.export\(\)"):
        hvd.export(Kept())


def begin_export(path: str, all_ranks: bool) -> None:
    globals()["export"] = hvd.export(JsonLines(path), ["loss", "late"], all_ranks=all_ranks)


def record(count: int) -> None:
    for step in range(count):
        hvd.metric("loss", context.engine().rank + step, step)


def end_export() -> int:
    export = globals().pop("export")
    assert export.close(PATIENCE)
    exported: int = export.exported
    return exported


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_rank_exports_those_of_all(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Ranks(2) as ranks:
        ranks.run(begin_export, str(path), True, ranks=[0])
        ranks.run(record, 50)
        assert ranks.run(end_export, ranks=[0]) == [100]
    found = lines(path)
    for rank in (0, 1):
        own = [(one["value"], one["step"]) for one in found if one["rank"] == rank]
        assert own == [(rank + step, step) for step in range(50)]


def record_now() -> tuple[float, float]:
    begin = time.time()
    hvd.metric("loss", 1.0)
    return begin, time.time()


def test_times_of_another_host_are_brought_onto_this_ones_clock(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    env = {"HVDLAB_PLANE": "gloo", "SKEWED_CLOCK": "1"}
    with Ranks(2, tls=True, env=env, imports=["support.network.skewed_clock"]) as ranks:
        ranks.run(begin_export, str(path), True, ranks=[0])
        times = ranks.run(record_now)
        assert ranks.run(end_export, ranks=[0]) == [2]
    error = AHEAD_NS / 2e9  # a slow machine takes long for the question and its answer
    for one in lines(path):
        begin, end = times[int(str(one["rank"]))]
        assert begin - error < float(str(one["time"])) < end + error


def test_an_export_and_a_timeline_do_not_take_each_others_events(tmp_path: Path) -> None:
    path, trace = tmp_path / "metrics.jsonl", tmp_path / "trace.json"
    with Ranks(2) as ranks:
        ranks.run(begin_export, str(path), True, ranks=[0])
        ranks.run(begin_timeline, str(trace), ranks=[0])
        ranks.run(record, 3)
        ranks.run(end_timeline, ranks=[0])
        ranks.run(record, 2)
        ranks.run(total)
        assert ranks.run(end_export, ranks=[0]) == [10]
    assert len(lines(path)) == 10
    assert trace.read_text().count('"loss"') >= 6


def begin_timeline(path: str) -> None:
    context.engine().start_timeline(path)


def end_timeline() -> None:
    context.engine().stop_timeline()


def total() -> None:
    hvd.allreduce(np.ones(2))
