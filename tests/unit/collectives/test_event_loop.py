"""Event loop: calls that are due, and wake-ups from other threads."""

from __future__ import annotations

import contextlib
import threading

from hvdlab.collectives.event_loop import NEVER, READ, EventLoop, WakeUp


def test_calls_are_made_once_and_in_the_order_in_which_they_were_scheduled() -> None:
    loop: EventLoop[None] = EventLoop()
    with contextlib.closing(loop):
        made: list[str] = []
        loop.call_at(2.0, lambda: made.append("late"))
        loop.call_at(1.0, lambda: made.append("first"))
        loop.call_at(1.0, lambda: made.append("second"))
        assert loop.next_call == 1.0
        loop.call_due(0.5)
        assert made == []
        loop.call_due(1.5)
        assert made == ["first", "second"]
        assert loop.next_call == 2.0
        loop.call_due(2.0)
        assert made == ["first", "second", "late"]
        assert loop.next_call == NEVER


def test_a_call_can_schedule_itself_again() -> None:
    loop: EventLoop[None] = EventLoop()
    with contextlib.closing(loop):
        times: list[float] = []

        def again() -> None:
            times.append(loop.next_call)
            loop.call_at(5.0, again)

        loop.call_at(1.0, again)
        loop.call_due(3.0)
        assert times == [NEVER]
        assert loop.next_call == 5.0


def test_another_thread_wakes_a_loop_that_waits_for_ever() -> None:
    loop: EventLoop[WakeUp] = EventLoop()
    wakeup = WakeUp()
    with contextlib.closing(loop), contextlib.closing(wakeup):
        loop.register(wakeup, READ, wakeup)
        thread = threading.Thread(target=wakeup.wake)
        thread.start()
        ((target, events),) = loop.wait(None)
        thread.join()
        assert target is wakeup
        assert events == READ
        target.drain()
        assert loop.wait(0.0) == []


def test_a_full_wake_up_stays_readable_and_blocks_no_thread() -> None:
    wakeup = WakeUp()
    with contextlib.closing(wakeup):
        for _ in range(100_000):
            wakeup.wake()
        wakeup.drain()
        wakeup.drain()
