"""Process sets on real ranks: each negotiates, fails and joins by itself; many come and go."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.client import Client
from hvdlab.collectives.engine.entries import CompletionHooks, RunBatch
from hvdlab.collectives.engine.executor import Executor, PlaneSlot
from hvdlab.collectives.engine.requests import Result
from hvdlab.collectives.errors import AbortedError, CauseKind, InvalidRequestError, MismatchError
from hvdlab.collectives.planes.base import HOST, PhaseTimes, PlaneContext
from support.patience import PATIENCE
from support.ranks.resident import Ranks, resident_ranks

four = resident_ranks(4)


# -- on the ranks -------------------------------------------------------------------------------------------------


def add(ranks: list[int]) -> int:
    return context.engine().add_process_set(ranks)


def remove(set_id: int) -> None:
    context.engine().remove_process_set(set_id)


def reduce(set_id: int, count: int = 4, name: str | None = None) -> float:
    x = hvd.allreduce(np.ones(count), name, op=hvd.Sum, process_set=set_id)
    return float(x[0])


def wait_for(set_id: int) -> None:
    operation = hvd.allreduce_async(np.ones(4), "waits", op=hvd.Sum, process_set=set_id)
    context.engine().flush()
    context.engine().post("waiting", b"")  # travels behind the announcement
    hvd.synchronize(operation)


operations: list[hvd.Handle] = []


def begin(set_id: int) -> None:
    operations.append(hvd.allreduce_async(np.ones(4), "begun", op=hvd.Sum, process_set=set_id))


def finish() -> None:
    hvd.synchronize(operations.pop())


def join(set_id: int) -> int:
    return hvd.join(set_id)


def aborts_recorded_while_removing(set_id: int, pending: bool) -> list[str]:
    """Return the timeline's aborts when the set is removed, also while one of its members waits in it."""
    engine = context.engine()
    recorded: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.recorder, "abort", lambda set_id, generation, text: recorded.append(text))
        if pending and engine.rank == 0:
            operation = hvd.allreduce_async(np.ones(4), "pending", op=hvd.Sum, process_set=set_id)
        engine.remove_process_set(set_id)
        if pending and engine.rank == 0:
            with pytest.raises(AbortedError, match="was removed"):
                hvd.synchronize(operation)
    return recorded


def add_impossible() -> str:
    with pytest.raises(InvalidRequestError, match="rank 9 not in the world") as error:
        context.engine().add_process_set([0, 9])
    assert isinstance(error.value, ValueError)
    return str(error.value)


def mismatch_in_one(first: int, second: int) -> int:
    """Ranks 0 and 1 disagree a hundred times, ranks 2 and 3 go on meanwhile."""
    rank = context.engine().rank
    for number in range(100):
        if rank < 2:
            with pytest.raises(MismatchError):
                hvd.allreduce(np.ones(4 + rank), f"m{number}", process_set=first)
        else:
            assert reduce(second) == 2.0
    return rank


def many_sets(times: int) -> int:
    engine = context.engine()
    for number in range(times):
        ranks = [rank for rank in range(4) if (number % 15 + 1) >> rank & 1]
        set_id = engine.add_process_set(ranks)
        if engine.rank in ranks and number % 10 == 0:
            assert reduce(set_id, 4 if number % 20 else 50_000) == len(ranks)
        engine.remove_process_set(set_id)
    return len(engine.process_sets())


def resident() -> tuple[int, int, int]:
    """Return KiB, open files and threads of this process."""
    return _resident("self")


def _resident(pid: str) -> tuple[int, int, int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return int(status["VmRSS"].split()[0]), files, int(status["Threads"])


def _within(before: tuple[int, int, int], after: tuple[int, int, int]) -> bool:
    return after[0] < before[0] + 4096 and after[1] <= before[1] and after[2] <= before[2]


# -- tests ----------------------------------------------------------------------------------------------------------


def test_a_set_of_ranks_that_are_not_there_is_refused_on_all_ranks(four: Ranks) -> None:
    assert len({*four.run(add_impossible)}) == 1
    assert four.run(reduce, 0) == [4.0] * 4


def test_a_set_that_is_removed_in_order_is_no_abort_in_the_timeline(four: Ranks) -> None:
    (added, *_) = four.run(add, [0, 1])
    assert four.run(aborts_recorded_while_removing, added, False) == [[], [], [], []]
    (added, *_) = four.run(add, [0, 1])
    texts = {text for recorded in four.run(aborts_recorded_while_removing, added, True) for text in recorded}
    assert texts == {f"process set {added} was removed"}, "what waited in it has failed"


def test_a_mismatch_in_one_set_does_not_disturb_another(four: Ranks) -> None:
    first, second = four.run(add, [0, 1])[0], four.run(add, [2, 3])[0]
    assert four.run(mismatch_in_one, first, second) == [0, 1, 2, 3]
    for set_id in (first, second):
        four.run(remove, set_id)


def test_an_interrupted_set_does_not_disturb_another_with_the_same_ranks(four: Ranks) -> None:
    pair, trio = four.run(add, [0, 1])[0], four.run(add, [0, 1, 2])[0]
    waiting: SimpleQueue[int] = SimpleQueue()
    client = Client.connect(four.coordinator.address, four.coordinator.client_token)
    client.on_mail("waiting", lambda sender, body: waiting.put(sender))
    try:
        stuck = four.start(wait_for, pair, ranks=[0])
        busy = four.start(reduce, trio, 1 << 20, "goes on", ranks=[1, 2])
        waiting.get(timeout=PATIENCE)
    finally:
        client.close()
    four.kill(0, signal.SIGINT)
    assert isinstance(stuck.outcomes(PATIENCE)[0], KeyboardInterrupt)
    assert four.run(reduce, trio, 1 << 20, "goes on", ranks=[0]) == [3.0]
    assert busy.results(PATIENCE) == [3.0, 3.0]
    # The members of the trio may agree in memory, before rank 1 has read that the pair's generation is over.
    four.catch_up()
    assert four.run(reduce, pair, ranks=[0, 1]) == [2.0, 2.0]
    for set_id in (pair, trio):
        four.run(remove, set_id)


def test_a_deadlock_over_a_set_that_is_joined_is_found(four: Ranks) -> None:
    pair = four.run(add, [0, 1])[0]
    joined = four.start(join, pair, ranks=[0])
    assert four.run(reduce, pair, 70_000, ranks=[1]) == [1.0]
    world = four.start(reduce, 0, ranks=[1, 2, 3])
    # The world waits for rank 0, which waits for rank 1: neither can go on.
    assert all(isinstance(error, AbortedError) for error in world.outcomes(PATIENCE))
    assert isinstance(joined.outcomes(PATIENCE)[0], AbortedError)
    assert four.run(reduce, 0) == [4.0] * 4
    four.run(remove, pair)


def test_a_rank_that_dies_ends_the_work_of_its_sets_only() -> None:
    with Ranks(4) as ranks:
        left, right = ranks.run(add, [0, 1])[0], ranks.run(add, [2, 3])[0]
        ranks.run(begin, left, ranks=[0])
        ranks.kill(1)
        (error,) = ranks.outcomes(finish, ranks=[0])
        assert isinstance(error, AbortedError)
        assert error.cause.kind is CauseKind.RANK_DIED
        assert ranks.run(reduce, right, ranks=[2, 3]) == [2.0, 2.0]
        assert ranks.run(reduce, left, ranks=[0]) == [1.0]


class NothingHappens:
    """Reports of an executor without work, and a control thread that need not wake."""

    def wake(self) -> None: ...

    def batch_done(
        self, batch: RunBatch, results: list[Result], started: int, phases: PhaseTimes
    ) -> None: ...

    def batch_unfinished(self, batch: RunBatch, started: int, phases: PhaseTimes) -> None: ...

    def batch_failed(self, batch: RunBatch, error: Exception) -> None: ...


def test_planes_come_on_one_thread_while_they_go_on_another() -> None:
    """As in a rank whose sets change quickly: its control thread prepares planes while its executor closes older ones."""
    executor = Executor(NothingHappens(), CompletionHooks(0, NothingHappens()), "test")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for generation in range(300):
            for process_set in range(20):
                plane = PlaneContext(process_set, generation, 0, 1, (0,), ("here",))
                executor.prepare(PlaneSlot("local", HOST, plane))
                executor.close_older(process_set, generation)
    finally:
        sys.setswitchinterval(interval)
        executor.close(PATIENCE)


@pytest.mark.timeout(120)
def test_a_thousand_sets_come_and_go_without_a_trace(four: Ranks) -> None:
    four.run(many_sets, 150, timeout=60)  # memory allocated once
    coordinator = str(four.coordinator.pid)
    before = [_resident(coordinator), *four.run(resident)]
    assert four.run(many_sets, 1000, timeout=100) == [1] * 4
    until = time.monotonic() + PATIENCE
    # A descriptor open for a moment can be counted before, or after.
    while True:
        after = [_resident(coordinator), *four.run(resident)]
        if all(_within(then, now) for then, now in zip(before, after, strict=True)):
            break
        assert time.monotonic() < until, (before, after)
