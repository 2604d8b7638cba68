"""The fork server's table of children, without processes."""

from __future__ import annotations

import random
import signal
from typing import get_args

from hvdlab.launch.forkserver.messages import (
    CONTROLLER,
    Adopt,
    Children,
    ControllerUp,
    Exited,
    Fork,
    Forked,
    ForkFailed,
    Guard,
    Keep,
    Kept,
    Loaded,
    ReportEngine,
    Shutdown,
    Signal,
    ToServer,
)
from hvdlab.launch.forkserver.server_state import (
    GRACE_WITHOUT_POOL,
    LONGEST_GRACE,
    ChildEnded,
    ChildWrote,
    ControllerListens,
    Exit,
    ForkChild,
    ForkReturned,
    ForkServerState,
    ForkServerTick,
    Imported,
    Kill,
    Listen,
    ListenReturned,
    NotifyController,
    PoolFound,
    PoolLost,
    PoolRequested,
    SendToPool,
    WatchProcess,
)
from hvdlab.launch.processes import TAIL_BYTES, TAIL_LINES, OutputTail
from support.effort import examples
from support.fuzz.protocol import make, run

LOADED = Loaded((), {}, 0.5)


def order(number: int) -> Fork:
    return Fork.of(number, {}, "/", ())


def loaded() -> ForkServerState:
    state = ForkServerState()
    assert state.handle(Imported(LOADED), 0.0) == [SendToPool(LOADED)]
    return state


def with_children(*numbers: int) -> ForkServerState:
    state = loaded()
    for number in numbers:
        assert state.handle(PoolRequested(order(number)), 0.0) == [ForkChild(order(number))]
        child = Forked(number, 1000 + number)
        assert state.handle(ForkReturned(number, child), 0.0) == [SendToPool(child)]
    return state


def ended(number: int, code: int = 0, by: int = 0, oom: bool = False) -> ChildEnded:
    return ChildEnded(1000 + number, code, by, 4096, oom)


def test_a_failed_fork_is_told_and_can_be_tried_again() -> None:
    state = loaded()
    state.handle(PoolRequested(order(0)), 0.0)
    assert state.handle(ForkReturned(0, error="no memory"), 0.0) == [SendToPool(ForkFailed(0, "no memory"))]
    assert state.handle(PoolRequested(order(0)), 0.0) == [ForkChild(order(0))]


def test_a_living_number_is_not_forked_twice() -> None:
    (effect,) = with_children(0).handle(PoolRequested(order(0)), 0.0)
    assert isinstance(effect, SendToPool)
    assert isinstance(effect.message, ForkFailed)
    assert "1000" in effect.message.text


def test_a_death_is_told_with_its_last_words() -> None:
    state = with_children(0, 1)
    assert state.handle(ChildWrote(1, b"Fatal Python error: "), 0.0) == []
    state.handle(ChildWrote(1, b"Segmentation fault\n"), 0.0)
    effects = state.handle(ended(1, -1, signal.SIGSEGV), 0.0)
    assert effects == [
        SendToPool(Exited(1, 1001, -1, signal.SIGSEGV, 4096, False, "Fatal Python error: Segmentation fault"))
    ]
    assert state.children() == {0: 1000}


def test_adopted_orphans_are_nobodys_news() -> None:
    assert with_children(0).handle(ChildEnded(77, 0, 0, 0, False), 0.0) == []


def test_the_controller_hears_of_ranks_that_end() -> None:
    state = with_children(0, CONTROLLER)
    assert NotifyController(0, False) in state.handle(ended(0), 0.0)
    assert state.handle(PoolRequested(ReportEngine(5, True)), 0.0) == [NotifyController(5, True)]
    state.handle(ended(CONTROLLER), 0.0)
    assert state.handle(PoolRequested(ReportEngine(5, False)), 0.0) == []


def test_the_controller_s_word_is_passed_on() -> None:
    state = with_children(CONTROLLER)
    assert state.handle(ControllerListens(), 0.0) == [SendToPool(ControllerUp(1000 + CONTROLLER))]


def test_signals_reach_living_children_only() -> None:
    state = with_children(0)
    assert state.handle(PoolRequested(Signal(0, 9)), 0.0) == [Kill(1000, 9)]
    state.handle(ended(0), 0.0)
    assert state.handle(PoolRequested(Signal(0, 9)), 0.0) == []


def test_shutdown_terminates_then_kills_then_exits() -> None:
    state = with_children(0, 1)
    state.handle(PoolRequested(Guard(("/a", "/b"))), 0.0)
    assert state.handle(PoolRequested(Shutdown(2.0)), 10.0) == [
        Kill(1000, signal.SIGTERM),
        Kill(1001, signal.SIGTERM),
    ]
    assert state.next_tick() == 12.0
    assert state.handle(ForkServerTick(), 11.0) == []
    assert all(not isinstance(e, Exit) for e in state.handle(ended(0), 11.5))
    assert state.handle(ForkServerTick(), 12.0) == [Kill(1001, signal.SIGKILL, group=True)]
    assert state.handle(ended(1, -1, 9), 12.1)[-1] == Exit(("/a", "/b"))
    assert state.next_tick() is None


def test_shutdown_without_children_exits_at_once() -> None:
    assert ForkServerState().handle(PoolRequested(Shutdown()), 0.0) == [Exit(())]


def test_the_pool_s_end_shortens_a_patient_shutdown() -> None:
    state = with_children(0)
    state.handle(PoolRequested(Shutdown(60.0)), 0.0)
    assert state.handle(PoolLost(), 1.0) == []
    assert state.next_tick() == 1.0 + GRACE_WITHOUT_POOL


def test_nothing_is_forked_while_stopping() -> None:
    state = with_children(0)
    state.handle(PoolLost(), 0.0)
    (effect,) = state.handle(PoolRequested(order(1)), 0.0)
    assert isinstance(effect, SendToPool)
    assert isinstance(effect.message, ForkFailed)


def test_orders_that_come_while_it_imports_are_carried_out_afterwards() -> None:
    state = ForkServerState()
    assert state.handle(PoolRequested(order(1)), 0.0) == []
    assert state.handle(Imported(LOADED), 3.0) == [SendToPool(LOADED), ForkChild(order(1))]


def test_adopted_processes_are_looked_after_while_it_imports() -> None:
    state = ForkServerState()
    child = Forked(0, 1000, 5, 6, 7)
    assert state.handle(PoolRequested(Adopt((child,))), 0.0) == [WatchProcess(child)]
    assert state.handle(PoolRequested(Signal(0, 15)), 0.0) == [Kill(1000, 15)]
    state.handle(ChildWrote(0, b"last words"), 0.0)
    assert state.handle(ChildEnded(1000), 0.0) == [SendToPool(Exited(0, 1000, -1, 0, 0, False, "last words"))]
    assert state.children() == {}


def test_processes_that_are_adopted_while_it_stops_are_ended_too() -> None:
    state = with_children(0)
    state.handle(PoolRequested(Shutdown(1.0)), 0.0)
    child = Forked(1, 1001)
    assert state.handle(PoolRequested(Adopt((child,))), 0.0) == [
        WatchProcess(child),
        Kill(1001, signal.SIGTERM),
    ]


def keep(state: ForkServerState) -> None:
    assert state.handle(PoolRequested(Keep("/p")), 0.0) == [Listen("/p")]
    assert state.handle(ListenReturned("/p"), 0.0) == [SendToPool(Kept("/p"))]


def test_a_kept_one_waits_for_a_successor_and_tells_it_what_it_missed() -> None:
    state = with_children(0, 1, CONTROLLER)
    keep(state)
    assert state.handle(PoolLost(), 1.0) == []
    assert state.next_tick() is None
    state.handle(ended(1, 3), 2.0)
    living = (Forked(0, 1000), Forked(CONTROLLER, 999))
    missed = Exited(1, 1001, 3, 0, 4096)
    found = state.handle(PoolFound(), 3.0)
    assert found == [SendToPool(LOADED), SendToPool(Children(living)), SendToPool(missed)]
    state.handle(PoolRequested(order(1)), 4.0)
    state.handle(ForkReturned(1, Forked(1, 1005)), 4.0)
    assert state.handle(PoolFound(), 5.0)[2:] == []


def test_a_kept_one_ends_with_its_last_rank_if_nobody_is_there() -> None:
    state = with_children(0, CONTROLLER)
    keep(state)
    state.handle(PoolLost(), 1.0)
    assert state.handle(ended(0, 1), 2.0)[-1] == Kill(999, signal.SIGTERM)
    assert state.handle(ended(CONTROLLER, 0), 3.0)[-1] == Exit(())
    state = with_children(0)
    keep(state)
    state.handle(PoolLost(), 1.0)
    state.handle(PoolFound(), 1.0)
    assert not any(isinstance(effect, Exit) for effect in state.handle(ended(0, 1), 2.0))


def test_one_that_can_not_be_kept_or_no_longer_is_ends_with_the_pool() -> None:
    state = with_children(0)
    state.handle(PoolRequested(Keep("/p")), 0.0)
    assert state.handle(ListenReturned("/p", "no room"), 0.0) == [SendToPool(Kept("/p", "no room"))]
    assert not state.kept
    keep(state)
    assert state.kept
    state.handle(ListenReturned(""), 0.0)
    assert state.handle(PoolLost(), 1.0) == [Kill(1000, signal.SIGTERM)]


def test_a_kept_one_can_be_shut_down() -> None:
    state = with_children(0)
    keep(state)
    state.handle(PoolRequested(Shutdown(1.0)), 0.0)
    assert not state.kept
    assert state.handle(ended(0), 0.5)[-1] == Exit(())


def test_tail_keeps_the_end_within_bounds() -> None:
    tail = OutputTail()
    for number in range(5000):
        tail.add(b"line %d\n" % number)
    lines = tail.text().splitlines()
    assert lines[-1] == "line 4999"
    assert len(lines) == TAIL_LINES
    tail.add(b"x" * (3 * TAIL_BYTES))
    assert tail.text() == "x" * TAIL_BYTES


def test_a_grace_that_no_clock_can_wait_for_is_bounded() -> None:
    for grace, due in ((float("nan"), 5.0), (-1.0, 5.0), (float("inf"), 5.0 + LONGEST_GRACE)):
        state = with_children(0)
        state.handle(PoolRequested(Shutdown(grace)), 5.0)
        assert state.next_tick() == due


def test_whatever_is_asked_the_table_of_children_goes_on() -> None:
    def one(chance: random.Random) -> None:
        state = loaded() if chance.random() < 0.8 else ForkServerState()
        for now in range(chance.randint(1, 30)):
            message = make(chance.choice(get_args(ToServer)), chance, tame=chance.random() < 0.9)
            for effect in state.handle(PoolRequested(message), float(now)):
                if isinstance(effect, ForkChild):
                    number = effect.order.number
                    failed = chance.random() < 0.2
                    child = None if failed else Forked(number, 1000 + now)
                    state.handle(ForkReturned(number, child, "no" if failed else ""), float(now))
            if state.children() and chance.random() < 0.3:
                state.handle(ChildEnded(chance.choice(list(state.children().values()))), float(now))
            tick = state.next_tick()
            assert tick is None or tick <= now + LONGEST_GRACE

    run(one, examples(300))
