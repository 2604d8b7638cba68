"""Waiting and waking, with members as threads of one process: they share the memory as processes do."""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hvdlab.collectives.planes.base import PlaneAborted, PlaneBroken
from hvdlab.collectives.planes.shm import signals as signals_module
from hvdlab.collectives.planes.shm.layout import SegmentLayout
from hvdlab.collectives.planes.shm.signals import ARRIVED, REDUCED, YIELDS, Signals
from support.patience import PATIENCE
from support.threads import asleep, in_threads

LAYOUT = SegmentLayout(3, 4096, 5)


@pytest.fixture
def members() -> Iterator[list[Signals]]:
    memory = mmap.mmap(-1, LAYOUT.size)
    signals = [Signals(memory, LAYOUT, index, yields=0) for index in range(3)]
    yield signals
    for signal in signals:
        signal.close()
    memory.close()


def test_a_wait_ends_when_the_last_member_has_posted(members: list[Signals]) -> None:
    order: list[str] = []
    ready = threading.Event()

    def wait() -> None:
        ready.set()
        members[0].post(ARRIVED, 1)
        members[0].wait(ARRIVED, 1)
        order.append("woken")

    thread = threading.Thread(target=wait)
    thread.start()
    ready.wait()
    members[1].post(ARRIVED, 1)
    asleep(thread.native_id or 0)
    members[2].post(REDUCED, 1)  # another row: no reason to wake up
    order.append("posted")
    members[2].post(ARRIVED, 1)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert order == ["posted", "woken"]


def test_no_wake_up_is_lost_over_many_rounds(members: list[Signals]) -> None:
    rounds = 4000

    def run(index: int) -> None:
        rng = random.Random(index)
        for value in range(1, rounds):
            members[index].post(ARRIVED, value)
            if rng.random() < 0.2:
                os.sched_yield()
            members[index].wait(ARRIVED, value)
            if value % 3 == 0:
                members[index].post(REDUCED, value)
                members[index].wait(REDUCED, value)

    in_threads([lambda i=i: run(i) for i in range(3)])  # type: ignore[misc]  # mypy can't infer a lambda's default


def test_only_the_post_that_completes_a_wait_wakes_its_member(
    members: list[Signals], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one may come while the member that was woken has not run yet: then it need not check which members
    sleep."""
    woken: list[int] = []
    monkeypatch.setattr(signals_module, "futex_wake", lambda _address, bits: woken.append(bits))
    members[0].post(ARRIVED, 1)
    members[0]._targets[0] = 2 * 1 + ARRIVED
    members[1].post(ARRIVED, 1)
    assert woken == []
    members[2].post(ARRIVED, 1)
    assert woken == [1 << 0]
    members[1].post(ARRIVED, 2)
    members[2].post(ARRIVED, 2)
    members[2].post(REDUCED, 1)
    assert woken == [1 << 0]
    members[0].post(ARRIVED, 2)
    assert woken == [1 << 0]


def test_the_post_after_one_that_was_interrupted_wakes_for_both(members: list[Signals]) -> None:
    thread = threading.Thread(target=lambda: members[0].wait(ARRIVED, 1))
    thread.start()
    members[0].post(ARRIVED, 1)
    members[1].post(ARRIVED, 1)
    asleep(thread.native_id or 0)
    members[2].arrived[2] = 1  # and then the interrupt
    members[2].post(ARRIVED, 2)
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize("seed", range(20))
def test_an_abort_at_any_moment_ends_a_wait(members: list[Signals], seed: int) -> None:
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        members[0].wait(ARRIVED, 1)

    def abort() -> None:
        begun.wait()
        for _ in range(random.Random(seed).randrange(200)):
            os.sched_yield()
        members[0].abort()

    with pytest.raises(PlaneAborted):
        in_threads([wait, abort])
    with pytest.raises(PlaneAborted):
        members[0].wait(ARRIVED, 1)


def test_an_abort_of_one_member_leaves_the_others_waiting(members: list[Signals]) -> None:
    members[1].abort()
    woken: list[int] = []

    def wait() -> None:
        members[0].wait(ARRIVED, 1)
        woken.append(0)

    thread = threading.Thread(target=wait)
    thread.start()
    asleep(thread.native_id or 0)
    members[2].abort()
    asleep(thread.native_id or 0)
    assert not woken
    for member in members:
        member.post(ARRIVED, 1)
    thread.join(PATIENCE)
    assert woken == [0]


def test_a_deadline_names_who_is_missing(members: list[Signals]) -> None:
    members[0].post(ARRIVED, 1)
    members[1].post(ARRIVED, 1)
    start = time.monotonic()
    with pytest.raises(PlaneBroken, match=r"\[2\]"):
        members[0].wait(ARRIVED, 1, deadline=start + 0.05)
    assert time.monotonic() - start >= 0.05


def test_a_satisfied_wait_makes_no_system_call(
    members: list[Signals], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("a system call")

    monkeypatch.setattr(signals_module, "futex_wait", forbidden)
    monkeypatch.setattr(signals_module, "futex_wake", forbidden)
    for member in members:
        member.post(ARRIVED, 5)
    for member in members:
        member.wait(ARRIVED, 5)


@pytest.fixture
def yields(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Return how many yields one look takes, for a member whose first yield and whose others take so many ms of a simulated clock."""
    memory = mmap.mmap(-1, LAYOUT.size)
    member, now, made = Signals(memory, LAYOUT, 0), [1000.0], list[float]()
    lengths = [0.0, 0.0]

    def sched_yield() -> None:
        now[0] += lengths[1] if made else lengths[0]
        made.append(now[0])

    def clock() -> int:
        now[0] += 0.0005  # so that looks without yields end as well
        return int(now[0] * 1e6)

    def look(first: float, others: float, after: float = 0.0) -> int:
        now[0] += after
        lengths[:] = first, others
        made.clear()
        assert not member.reached_soon(ARRIVED, 1)
        return len(made)

    monkeypatch.setattr("hvdlab.collectives.planes.shm.signals.monotonic_ns", clock)
    monkeypatch.setattr("os.sched_yield", sched_yield)
    yield look
    member.close()
    memory.close()


def test_a_member_goes_on_yielding_to_a_thread_that_has_work_now_and_then(
    yields: Callable[..., int],
) -> None:
    assert [yields(2.0, 0.0005, after=50.0) for _ in range(20)] == [YIELDS] * 20


def test_a_member_does_without_yields_while_a_busy_thread_takes_most_of_its_time(
    yields: Callable[..., int],
) -> None:
    assert yields(4.0, 4.0) == 2
    assert yields(4.0, 4.0) == 0
    assert yields(4.0, 4.0, after=200.0) == 0
    assert yields(4.0, 4.0, after=60.0) == 2
    assert yields(0.0005, 0.0005, after=300.0) == YIELDS


def test_calls_after_close_do_nothing(members: list[Signals]) -> None:
    members[0].close()
    members[0].close()
    members[0].abort()
