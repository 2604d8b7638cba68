"""An engine's records of its operations, failed ones included, and how clocks of other hosts are compared."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.client import Client
from hvdlab.collectives.engine.span_log import SpanLog
from hvdlab.collectives.errors import AbortedError, MismatchError
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.tracing.record_format import ClockSample, ClockSamples, Members, Span, decode
from hvdlab.runner.check_trace import check, load
from support.engine_probe import EngineProbe
from support.network.skewed_clock import AHEAD_NS
from support.patience import HOUR, PATIENCE
from support.ranks.resident import Ranks, resident_ranks

LARGE = 1 << 20


two = resident_ranks(2, scope="function")


hosts = resident_ranks(
    2,
    tls=True,
    env={"HVDLAB_PLANE": "gloo", "SKEWED_CLOCK": "1"},
    imports=["support.network.skewed_clock"],
    scope="function",
)


# -- on the ranks -------------------------------------------------------------------------------------------------


def recorded(*names: str) -> list[tuple[str, bool, bool, bool]]:
    """Name, whether ordered, begun and done, of the spans with these names, once there are that many."""
    deadline = time.monotonic() + PATIENCE
    found: list[Span] = []
    recorder = context.engine().recorder
    while len(found) < len(names) and time.monotonic() < deadline:
        for batch in recorder.drain():
            found += [e for e in decode(batch).events if isinstance(e, Span) and e.name in names]
        time.sleep(0.01)
    for span in found:
        times = [t for t in (span.submitted_ns, span.ready_ns, span.started_ns, span.finished_ns) if t]
        assert times == sorted(times)
        assert times[-1] <= time.monotonic_ns()
    return [(s.name, s.ready_ns is not None, s.started_ns is not None, s.ok) for s in found]


def quiet() -> None:
    """Send nothing from now on, so that the test finds all in the recorder."""
    EngineProbe(context.engine()).spans.claim_flush = lambda: False


def total(count: int = LARGE, name: str | None = None) -> float:
    return float(hvd.allreduce(np.ones(count), name, op=hvd.Sum)[0])


def recorded_total(count: int, name: str) -> None:
    total(count, name)
    EngineProbe(context.engine()).wait_for_records()


def disagree() -> None:
    with pytest.raises(MismatchError):
        hvd.allreduce(np.ones(3 + context.engine().rank), "wrong")


def withdrawn() -> None:
    operation = hvd.allreduce_async(np.ones(3), "given up")
    context.engine().flush()
    context.engine().withdraw("no more")
    with pytest.raises(AbortedError):
        hvd.synchronize(operation)


def begin(path: str) -> None:
    context.engine().start_timeline(path)


def end() -> None:
    context.engine().stop_timeline()


def offset() -> tuple[int, int]:
    """Return the coordinator's clock minus this rank's as measured, and its bound, once they are known."""
    log: Any = EngineProbe(context.engine()).spans
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        sample = log._samples.best(time.monotonic_ns())
        if sample is not None:
            sent, received, coordinator = sample
            return coordinator - (sent + received) // 2, (received - sent) // 2 + 1
        time.sleep(0.01)
    raise AssertionError("the coordinator did not answer")


# -- failed operations ------------------------------------------------------------------------------------------------


def test_failed_operations_are_recorded_with_the_times_they_had(two: Ranks) -> None:
    two.run(quiet)
    two.run(disagree)
    two.run(withdrawn, ranks=[0])
    two.catch_up()
    two.run(total, 5000, "good")
    first, second = two.run(recorded, per_rank=[("wrong", "given up", "good"), ("wrong", "good")])
    wrong, good = ("wrong", False, False, False), ("good", True, True, True)
    assert first == [wrong, ("given up", False, False, False), good]
    assert second == [wrong, good]


def test_a_killed_operation_is_recorded_as_begun_and_failed(two: Ranks) -> None:
    while not lost_within_a_reduction(two):
        two.renew()
    (found,) = two.run(recorded_failures, ranks=[0])
    assert {(name, ok) for name, _, ok in found} == {("big", False)}, found


def lost_within_a_reduction(two: Ranks) -> bool:
    """Lose rank 1 while both reduce. False if it was in between: rank 0 goes on alone then."""
    two.run(quiet)
    two.run(total, 5000)
    with Mail(two) as mail:
        survivor, _ = two.start(keep_reducing, ranks=[0]), two.start(keep_reducing, ranks=[1])
        mail.wait()
    two.kill(1)
    (within,) = survivor.results(PATIENCE)
    return bool(within)


class Mail:
    """Mail of the ranks in :func:`keep_reducing`, to wait for."""

    def __init__(self, ranks: Ranks) -> None:
        self._told = threading.Event()
        self._client = Client.connect(ranks.coordinator.address, ranks.coordinator.client_token)
        self._client.on_mail("reducing", lambda rank, body: self._told.set())

    def wait(self) -> None:
        assert self._told.wait(30), "the ranks do not reduce"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


def keep_reducing() -> bool:
    """Reduce until a rank is lost; report once that the first one is done and the next ones are under way.

    Returns whether the rank was lost in the middle of a reduction.
    """
    try:
        for number in itertools.count():
            total(LARGE, "big")
            if number == 3:
                context.engine().post("reducing", b"")
            if context.engine().size == 1:
                return False
    except AbortedError:
        pass
    return True


def recorded_failures() -> list[tuple[str, bool, bool]]:
    deadline = time.monotonic() + PATIENCE
    found: list[tuple[str, bool, bool]] = []
    while not found and time.monotonic() < deadline:
        for batch in context.engine().recorder.drain():
            events = decode(batch).events
            found += [
                (e.name, e.started_ns is not None, e.ok) for e in events if isinstance(e, Span) and not e.ok
            ]
        time.sleep(0.01)
    return found


def test_the_timeline_begins_at_the_call_and_shows_failures(two: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    before = two.run(records)
    two.run(total, 5000, "early")
    two.run(sent_since, per_rank=[(number,) for number in before])
    two.catch_up()
    two.run(begin, str(path), ranks=[0])
    two.run(recorded_total, 5000, "late")
    two.run(disagree)
    two.run(end, ranks=[0])
    events = load(path.read_text())
    assert check(events) == []
    tensors = {event["args"]["tensor"] for event in events if "tensor" in event.get("args", {})}
    assert tensors == {"late", "wrong"}
    failed = [e for e in events if e.get("args", {}).get("status") == "failed"]
    assert {(e["args"]["tensor"], e["pid"]) for e in failed} == {("wrong", e["pid"]) for e in failed}
    assert len({e["pid"] for e in failed}) == 2
    # Although the members were reported before the call, both ranks' arrivals are compared.
    last = [e for e in events if e.get("args", {}).get("tensor") == "late" and e["ph"] == "b"]
    assert all("last_rank" in e["args"] for e in last if e["name"] == "NEGOTIATE_ALLREDUCE"), last


def test_a_timeline_has_the_last_events_of_a_rank_however_late_it_would_send_them(
    two: Ranks, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    two.run(send_late, ranks=[1])
    two.run(begin, str(path), ranks=[0])
    two.run(recorded_total, LARGE, "last")
    two.run(end, ranks=[0])
    events = load(path.read_text())
    assert check(events) == []
    operations = [event for event in events if event["name"] == "ALLREDUCE"]
    assert {(event["pid"], event["args"]["tensor"]) for event in operations} == {(0, "last"), (1, "last")}


def send_late() -> None:
    """Send recorded events on request only."""
    SpanLog.INTERVAL = HOUR


def records() -> int:
    """Return how many there ever were."""
    return context.engine().recorder._head


def sent_since(before: int) -> None:
    """Wait until more was recorded, which follows a collective's end, and all of it was sent."""
    recorder = context.engine().recorder
    while recorder._head <= before or recorder.pending():
        time.sleep(0.01)


# -- clocks -------------------------------------------------------------------------------------------------------


def test_clocks_of_other_hosts_are_compared_with_the_coordinators(hosts: Ranks) -> None:
    (first, first_error), (second, second_error) = hosts.run(offset)
    assert abs(first) <= first_error < AHEAD_NS / 2
    assert abs(second + AHEAD_NS) <= second_error < AHEAD_NS / 2


def test_a_timeline_of_two_hosts_is_on_one_axis(hosts: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    before = hosts.run(records)
    hosts.run(total)
    error_us = sum(error for _, error in hosts.run(offset)) / 1000
    assert error_us < AHEAD_NS / 2000
    hosts.run(sent_since, per_rank=[(number,) for number in before])
    hosts.catch_up()
    hosts.run(begin, str(path), ranks=[0])
    for i in range(5):
        hosts.run(recorded_total, LARGE, f"t{i}")
    hosts.run(end, ranks=[0])
    events = load(path.read_text())
    assert check(events) == []
    assert not [e for e in events if e["name"] in ("CLOCK_NOT_ALIGNED", "RECORDS_LOST")]
    slices: dict[str, list[Any]] = {}
    for event in events:
        if event["ph"] == "X" and event["name"] == "ALLREDUCE":
            slices.setdefault(event["args"]["tensor"], []).append(event)
    assert sorted(slices) == [f"t{i}" for i in range(5)]
    for one, other in slices.values():
        # No rank leaves an operation before all have begun with it.
        assert one["pid"] != other["pid"]
        first_end = min(one["ts"] + one["dur"], other["ts"] + other["dur"])
        assert max(one["ts"], other["ts"]) <= first_end + error_us


def test_the_clock_is_asked_for_rarely_and_only_by_ranks_of_other_hosts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 5 * 10**9
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    local, remote = SpanLog(0, True), SpanLog(1, True, remote=True)
    assert local.ask_clock() is None
    assert SpanLog(1, False, remote=True).ask_clock() is None
    question = remote.ask_clock()
    assert question is not None
    now += 1000
    remote.clock_answer(m.Pong(question.number + 1, 1))  # to another rank's question
    remote.clock_answer(m.Pong(question.number, 100))
    now += int(29e9)
    assert remote.ask_clock() is None
    now += int(2e9)
    assert remote.ask_clock() is not None
    remote.members(0, 3, 2)
    (batch,) = remote.take()
    samples = [e for e in decode(batch).events if isinstance(e, ClockSample)]
    assert samples == [ClockSample(5 * 10**9 + 1000, 100 - (5 * 10**9 + 500), 500)]
    assert remote.take() == [], "a sample alone is no reason to send a batch"
    local.recorder.cell_begin("1")
    (batch,) = local.take()
    assert [(e.offset_ns, e.uncertainty_ns) for e in decode(batch).events if isinstance(e, ClockSample)] == [
        (0, 0)
    ]
    assert not [e for e in decode(batch).events if isinstance(e, Members)]


def test_what_a_process_set_uses_is_told_until_it_is_gone() -> None:
    log = SpanLog(0, True)
    log.members(1, 3, 2, "gloo")
    log.dissolved(1)
    log.dissolved(2)
    (batch,) = log.take()
    told = [e for e in decode(batch).events if isinstance(e, Members)]
    assert [(e.process_set, e.generation, e.size, e.plane) for e in told] == [
        (1, 3, 2, "gloo"),
        (1, 4, 0, ""),
    ]


def test_a_quick_answer_is_preferred_until_it_is_old() -> None:
    samples = ClockSamples()
    assert samples.best(0) is None
    quick, slow = (0, 10_000, 1), (10**9, 10**9 + 1_000_000, 2)
    samples.add(*quick)
    samples.add(*slow)
    assert samples.best(10**9 + 1_000_000) == quick
    samples.add(60 * 10**9, 60 * 10**9 + 200_000, 3)
    assert samples.best(60 * 10**9 + 200_000) == (60 * 10**9, 60 * 10**9 + 200_000, 3)
