"""A collective that a rank has given up is over for it: its name is free at once, and others learn of it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.client import Client
from hvdlab.collectives.engine.entries import Fail
from hvdlab.collectives.engine.rank_state import RankState
from hvdlab.collectives.errors import AbortedError, CauseKind, DuplicateNameError
from hvdlab.collectives.protocol import messages as m
from support.engine_probe import EngineProbe
from support.patience import PATIENCE
from support.ranks.resident import Ranks, resident_ranks
from support.simulation.joint_ranks import SimEntry
from support.simulation.joint_simulation import Simulation, allreduce, message

MEMBERS = (m.Member(0, "host", 1), m.Member(1, "host", 2))


def configured(generation: int) -> m.Configure:
    return m.Configure(0, generation, MEMBERS, "local", {})


def state_of_one_that_waits() -> tuple[RankState, SimEntry]:
    state = RankState(0)
    state.handle(configured(1), 0)
    return state, submit(state)


def submit(state: RankState) -> SimEntry:
    entry = SimEntry(allreduce("x"), "a.py:1")
    state.submit(entry)
    return entry


def give_up(state: RankState) -> None:
    state.withdraw(0, CauseKind.INTERRUPTED, "interrupted")


def failed(effects: Sequence[object]) -> list[object]:
    return [effect.entry for effect in effects if isinstance(effect, Fail)]


def aborted(generation: int) -> m.Abort:
    return m.Abort(0, generation, "interrupted", (0,), "interrupted", "")


def kinds(state: RankState) -> list[type]:
    return [type(message) for message in state.take_messages()]


def receives(state: RankState, count: int) -> list[SimEntry]:
    """So many receives from any rank, announced."""
    entries = [SimEntry(message(None, 0, "tag", (1,), 0, receives=True), "a.py:1") for _ in range(count)]
    for entry in entries:
        state.submit(entry)
    return entries


def cancel(state: RankState, entry: SimEntry) -> bool:
    return state.cancellations.cancel(entry, CauseKind.TIMEOUT, "it took too long")


def counted(state: RankState) -> list[object]:
    """Return kinds of the messages to send; of those that cancel, how many younger ones there are."""
    return [
        message.later if isinstance(message, m.Cancel) else type(message) for message in state.take_messages()
    ]


# -- one rank's state -------------------------------------------------------------------------------------------------


def test_a_name_is_free_as_often_as_it_is_given_up() -> None:
    state, first = state_of_one_that_waits()
    entries = [first]
    for _ in range(4):
        give_up(state)
        entries.append(submit(state))
        with pytest.raises(DuplicateNameError):
            submit(state)
    assert kinds(state) == [m.Announce, m.Withdraw]
    assert failed(state.handle(aborted(1), 0)) == [first]
    # The others were given up as well, before they could be announced; others may wait for them.
    state.handle(configured(2), 0)
    assert kinds(state) == [m.Withdraw]
    assert failed(state.handle(aborted(2), 0)) == entries[1:-1]
    state.handle(configured(3), 0)
    (announced,) = state.take_messages()
    assert isinstance(announced, m.Announce)
    assert announced.generation == 3
    assert len(announced.locals) == 1
    state.validate()


def test_giving_up_is_told_again_if_the_generation_ended_in_order_before() -> None:
    state, first = state_of_one_that_waits()
    kinds(state)
    give_up(state)
    second = submit(state)
    assert kinds(state) == [m.Withdraw]
    state.handle(configured(2), 0)  # a rank joined the world; the coordinator drops messages of generation 1
    assert kinds(state) == [m.Withdraw]
    assert failed(state.handle(aborted(2), 0)) == [first]
    state.handle(configured(3), 0)
    assert kinds(state) == [m.Announce]
    assert second in state.sets[0].pending
    state.validate()


def test_a_receive_is_cancelled_behind_what_was_announced_after_it_was_given_up() -> None:
    state = RankState(0)
    state.handle(configured(1), 0)
    (first,) = receives(state, 1)
    state.take_messages()
    assert cancel(state, first)
    receives(state, 1)
    assert counted(state) == [m.Announce, 1]


def test_a_receive_is_cancelled_once_however_often_it_is_given_up() -> None:
    state = RankState(0)
    state.handle(configured(1), 0)
    _, second = receives(state, 2)
    assert cancel(state, second)
    assert cancel(state, second)
    assert counted(state) == [m.Announce, 0]
    assert cancel(state, second)
    assert counted(state) == []


def test_receives_that_were_cancelled_before_are_not_counted() -> None:
    state = RankState(0)
    state.handle(configured(1), 0)
    _, second, third = receives(state, 3)
    assert cancel(state, third)
    assert cancel(state, second)
    assert counted(state) == [m.Announce, 0, 0]


@pytest.mark.parametrize("order", [(1,), (1, 1), (1, 2), (2, 1), (0, 2, 0)])
def test_only_the_receives_that_were_given_up_end(order: tuple[int, ...]) -> None:
    simulation = Simulation(2, 1)
    simulation.run()
    state = simulation.ranks[0].state
    entries = [simulation.submit(0, message(None, 0, "tag", (1,), 0, receives=True)) for _ in range(3)]
    assert all(isinstance(entry, SimEntry) for entry in entries)
    simulation.run()
    for index in order:
        assert cancel(state, entries[index])  # type: ignore[arg-type]
    entries.append(simulation.submit(0, message(None, 0, "tag", (1,), 0, receives=True)))
    simulation.run()
    kept = [entry for index, entry in enumerate(entries) if index not in order]
    assert [entry.outcome for entry in kept if isinstance(entry, SimEntry)] == [None] * len(kept)
    for index in order:
        entry = entries[index]
        assert isinstance(entry, SimEntry)
        assert isinstance(entry.outcome, AbortedError)
    for _ in kept:
        simulation.submit(1, message(1, 0, "tag", (1,), 0, receives=False))
    simulation.run()
    simulation.check()
    assert all(isinstance(entry, SimEntry) and isinstance(entry.outcome, tuple) for entry in kept)


# -- real ranks -------------------------------------------------------------------------------------------------------


two = resident_ranks(2)


def reduce_until_interrupted(count: int) -> float:
    try:
        context.engine().post("going", b"")
        while True:
            hvd.allreduce(np.ones(count), "x", op=hvd.Sum)
    except KeyboardInterrupt:
        return float(hvd.allreduce(np.full(count, 5.0), "x", op=hvd.Sum)[0])  # at once, under the same name


def reduce_until_five(count: int) -> list[CauseKind]:
    """Continue after every interrupt of the other rank; return the errors."""
    told: list[CauseKind] = []
    while True:
        try:
            if hvd.allreduce(np.ones(count), "x", op=hvd.Sum)[0] == 6.0:
                return told
        except AbortedError as error:
            told.append(error.cause.kind)


@pytest.mark.parametrize("count", [4, 1 << 20])
def test_after_an_interrupt_the_same_name_can_be_submitted_at_once(two: Ranks, count: int) -> None:
    going: SimpleQueue[int] = SimpleQueue()
    client = Client.connect(two.coordinator.address, two.coordinator.client_token)
    client.on_mail("going", lambda sender, body: going.put(sender))
    try:
        for _ in range(15):
            other = two.start(reduce_until_five, count, ranks=[1])
            one = two.start(reduce_until_interrupted, count, ranks=[0])
            going.get(timeout=PATIENCE)
            two.kill(0, signal.SIGINT)
            assert one.results(PATIENCE) == [6.0]
            assert other.results(PATIENCE) in ([[]], [[CauseKind.INTERRUPTED]])
    finally:
        client.close()


def time_out_in_an_operation() -> float:
    """The other rank does not move before a wait for a quarter of a second has ended; return the next result."""
    hvd.allreduce(np.ones(4), "first")
    operation = hvd.allreduce_async(np.ones(1 << 22), "large", op=hvd.Sum)
    context.engine().flush()
    context.engine().post("going", b"")
    while not any(pending.executing for pending in context.engine().pending()):
        time.sleep(0.001)
    with pytest.raises(TimeoutError):
        hvd.synchronize(operation, timeout=0.25)
    context.engine().post("going", b"")
    return float(hvd.synchronize(operation)[0])


def stop_in_an_operation() -> float:
    """Announce its part, and stop before it can execute it."""
    hvd.allreduce(np.ones(4), "first")
    engine = context.engine()
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        release.wait(2 * PATIENCE)

    EngineProbe(engine).executor.enqueue(hold)
    EngineProbe(engine).executor.wake()
    assert held.wait(PATIENCE)
    engine.on_mail("go on", lambda sender, body: release.set())
    operation = hvd.allreduce_async(np.ones(1 << 22), "large", op=hvd.Sum)
    engine.flush()
    assert release.wait(2 * PATIENCE)
    return float(hvd.synchronize(operation)[0])


def test_a_wait_times_out_also_in_the_middle_of_an_operation(two: Ranks) -> None:
    going: SimpleQueue[int] = SimpleQueue()
    client = Client.connect(two.coordinator.address, two.coordinator.client_token)
    client.on_mail("going", lambda sender, body: going.put(sender))
    try:
        other = two.start(stop_in_an_operation, ranks=[1])
        one = two.start(time_out_in_an_operation, ranks=[0])
        going.get(timeout=PATIENCE)
        going.get(timeout=PATIENCE)
        client.post("go on", b"", [1])
        assert one.results(PATIENCE) == [2.0]
        assert other.results(PATIENCE) == [2.0]
    finally:
        client.close()
