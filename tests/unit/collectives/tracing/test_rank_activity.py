"""How ranks spent the last seconds, against times that are known."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from hvdlab.collectives.tracing.rank_activity import (
    RecentActivity,
    recent_activity,
    shown_rate,
    slowest_rank,
    step_count,
    steps_per_second,
)
from hvdlab.collectives.tracing.record_format import Event, Members, Metric, Span, encode
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.types import DType, OpKind
from support.timeline_traces import steps

MS = 1_000_000
START = 10**9


def span(
    name: str, sequence: int, arrival: int, ready: int, finished: int, *, started: int | None = None
) -> Span:
    """Times in ms."""
    submitted, agreed, begun, ended = (
        START + t * MS for t in (arrival, ready, ready if started is None else started, finished)
    )
    return Span(name, OpKind.ALLREDUCE, DType.F32, 0, sequence, 0, 4096, submitted, agreed, begun, ended)


def recorded(*ranks: Sequence[Event]) -> Recording:
    recording = Recording()
    for rank, events in enumerate(ranks):
        recording.feed(rank, encode(rank, [Members(0, 0, len(ranks), START), *events]))
    return recording


def shares(found: RecentActivity) -> list[tuple[float, ...]]:
    return [tuple(round(x, 6) for x in (one.compute, one.wait, one.work)) for one in found.ranks]


def test_nothing_is_said_of_nothing() -> None:
    assert recent_activity(Recording()) == RecentActivity()
    assert RecentActivity().per_second == 0
    assert RecentActivity().slowest is None


def test_who_computes_waits_and_reduces() -> None:
    # Rank 1 comes 60 ms after rank 0 each time; then both reduce for 20 ms and compute for 20 or 80 ms.
    early = [span("loss", k, 100 * k, 100 * k + 60, 100 * k + 80) for k in range(1, 11)]
    late = [span("loss", k, 100 * k + 60, 100 * k + 60, 100 * k + 80) for k in range(1, 11)]
    found = recent_activity(recorded(early, late), since_ns=START + 80 * MS)
    assert shares(found) == [(0.2, 0.6, 0.2), (0.8, 0.0, 0.2)]
    assert found.seconds == pytest.approx(1.0)
    assert found.per_second == pytest.approx(10)
    assert found.slowest is not None
    assert (found.slowest.rank, found.slowest.held_up) == (1, pytest.approx(0.6))


@pytest.mark.parametrize(
    ("held_up", "rank"),
    [
        ({0: 0.01, 1: 0.06, 2: 0.02}, 1),
        ({0: 0.01, 1: 0.049, 2: 0.02}, None),  # too short
        ({0: 0.094, 1: 0.122}, None),  # too near to the next
        ({0: 0.0, 1: 0.0}, None),
        ({3: 0.5}, 3),
        ({}, None),
    ],
)
def test_a_rank_is_named_only_if_it_stands_out(held_up: dict[int, float], rank: int | None) -> None:
    assert slowest_rank(held_up, 1.0) == rank
    assert slowest_rank({one: 7e9 * share for one, share in held_up.items()}, 7e9) == rank


def test_only_the_last_seconds_count() -> None:
    slow = [span("a", 1, 0, 0, 1000)]
    quick = [span("b", 2, 1990, 1990, 2000)]
    recording = recorded(slow + quick)
    assert shares(recent_activity(recording, 1.0)) == [(0.99, 0.0, 0.01)]
    assert shares(recent_activity(recording)) == [(0.495, 0.0, 0.505)]


def test_what_runs_beside_a_computation_is_not_waited_for() -> None:
    """Gradients are submitted one by one while the others are under way; only after the last one the rank waits."""
    gradients = [
        span("first", 1, 0, 40, 60),
        span("second", 2, 30, 70, 80, started=75),
        span("last", 3, 50, 90, 100),
    ]
    found = recent_activity(recorded(gradients))
    # Computing up to the last submission at 50 ms, even though the first one is ready and started at 40. Then: the
    # first one is executed up to 60, the second from 75 and the last from 90; in between all are waited for.
    assert shares(found) == [(0.5, 0.25, 0.25)]


def test_shares_add_up_and_a_long_recording_is_looked_at_from_its_end() -> None:
    recording = Recording()
    for rank, batch in steps(4, 60):
        recording.feed(rank, batch)
    whole, newest = recent_activity(recording, None), recent_activity(recording, None, most=2000)
    assert newest.seconds < whole.seconds / 3
    for found in (whole, newest):
        assert len(found.ranks) == 4
        for one in found.ranks:
            assert one.compute + one.wait + one.work == pytest.approx(1)
            assert min(one.compute, one.wait, one.work) >= 0
    assert newest.per_second == pytest.approx(whole.per_second, rel=0.3)


def test_ranks_that_told_less_do_not_seem_idle() -> None:
    """Among the oldest rows read, some ranks' are cut off: the stretch begins where all have reported."""
    recording = Recording()
    for rank, batch in steps(4, 60):
        recording.feed(rank, batch)
    computing = [one.compute for one in recent_activity(recording, None, most=1500).ranks]
    assert max(computing) - min(computing) < 0.35


def step_times(*seconds: float) -> list[Event]:
    """Steps one after the other, of which each took as long as is given."""
    ends = itertools.accumulate(seconds)
    return [
        Metric("hvdlab/step_time", one, step, START + int(end * 1e9))
        for step, (one, end) in enumerate(zip(seconds, ends, strict=True))
    ]


def test_steps_per_second_are_those_of_the_last_seconds() -> None:
    one, other = step_times(*[3.0] * 20, *[0.1] * 60), step_times(*[0.2] * 36)
    recording = recorded(one, other, [Metric("loss", 1.0, 0, START)])
    assert steps_per_second(recording, [0]) == pytest.approx(10)
    assert steps_per_second(recording, [0, 1, 2]) == pytest.approx(7.5)
    assert steps_per_second(recording, [2]) is None
    assert steps_per_second(recording, [1], since_ns=START + 8 * 10**9) is None
    slow = recorded(step_times(20.0, 25.0))
    assert steps_per_second(slow, [0]) == pytest.approx(1 / 25), (
        "a step that is longer than the stretch counts"
    )


def test_all_views_show_the_same_rate_in_one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.2
    monkeypatch.setattr("hvdlab.collectives.tracing.rank_activity.time.monotonic", lambda: now)
    recording = recorded(step_times(0.1, 0.1), [])
    assert shown_rate(recording, [1]) is None
    assert shown_rate(recording, [0, 1]) == pytest.approx(10)
    recording.feed(0, encode(0, [Metric("hvdlab/step_time", 0.4, 3, START + 10**9)]))
    assert shown_rate(recording, [1, 0]) == pytest.approx(10), "the same ranks, in the same second"
    now = 101.0
    assert shown_rate(recording, [0, 1]) == pytest.approx(5)


def test_the_first_step_of_a_cell_counts_although_it_has_no_time() -> None:
    recording = recorded(step_times(0.1, 0.1, 0.1), step_times(0.1), [])
    assert step_count(recording, [0, 1, 2], START) == 4
    assert step_count(recording, [1], START) == 2
    assert step_count(recording, [2], START) is None
    assert step_count(recording, [0], START + 10**9) is None
