"""Errors between real rank processes, after which the group works."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Any, Self
from unittest import mock

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.client import Client
from hvdlab.collectives.errors import (
    AbortedError,
    CauseKind,
    DuplicateNameError,
    InvalidRequestError,
    MismatchError,
    ProtocolError,
)
from hvdlab.collectives.planes.shm import ShmPlane
from hvdlab.collectives.protocol import codec
from support.engine_probe import EngineProbe
from support.patience import GONE, PATIENCE, eventually, without_heartbeat
from support.ranks.resident import RankGone, Ranks, resident_ranks


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    without_heartbeat(monkeypatch)
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    without_heartbeat(monkeypatch)
    with Ranks(3) as ranks:
        yield ranks


class Waiting:
    """Listener for ranks that wait in :func:`wait_for`: their mail travels behind their announcement."""

    def __init__(self, ranks: Ranks) -> None:
        self._told: SimpleQueue[int] = SimpleQueue()
        self._client = Client.connect(ranks.coordinator.address, ranks.coordinator.client_token)
        self._client.on_mail("waiting", lambda sender, body: self._told.put(sender))

    def until(self, count: int) -> None:
        for _ in range(count):
            self._told.get(timeout=PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


# -- on the ranks -------------------------------------------------------------------------------------------------


def total(value: float, name: str | None = None) -> list[float]:
    result: list[float] = hvd.allreduce(np.full(4, value, np.float32), name, op=hvd.Sum).tolist()
    return result


def wait_for(name: str) -> None:
    operation = hvd.allreduce_async(np.ones(4, np.float32), name, op=hvd.Sum)
    context.engine().flush()
    context.engine().post("waiting", b"")
    hvd.synchronize(operation)


def disagree(what: str) -> None:
    rank = context.engine().rank
    x = np.ones((4, 4), np.float32)
    if what == "dtype":
        hvd.allreduce(x.astype(np.float64 if rank else np.float32), "bad", op=hvd.Sum)
    elif what == "shape":
        hvd.allreduce(np.ones((4, 4 + rank), np.float32), "bad", op=hvd.Sum)
    elif what == "op":
        hvd.allreduce(x, "bad", op=hvd.Max if rank else hvd.Sum)
    elif what == "root":
        hvd.broadcast(x, rank, "bad")
    elif what == "kind":
        hvd.broadcast(x, 0, "bad") if rank else hvd.allreduce(x, "bad")
    else:
        hvd.allgather(np.ones((2 + rank, 3 + rank), np.float32), "bad")


def submit_twice() -> None:
    first = hvd.allreduce_async(np.ones(4, np.float32), "twin")
    with pytest.raises(DuplicateNameError) as told:
        hvd.allreduce_async(np.ones(4, np.float32), "twin")
    assert str(told.value).count("test_errors.py:") == 2
    context.engine().flush()
    context.engine().post("waiting", b"")
    hvd.synchronize(first)


def announce_unsendable() -> None:
    with mock.patch.object(codec, "FRAME_LIMIT", 4096):
        # The control thread announces it: a wait would do so on this thread.
        operation = hvd.allreduce_async(np.ones(4, np.float32), "n" * 5000, op=hvd.Sum)
        eventually(lambda: hvd.poll(operation))
    with pytest.raises(AbortedError, match="can't be announced: a message of 5"):
        hvd.synchronize(operation)


def post_too_large() -> list[float]:
    # In flight meanwhile, and not to be given up for it.
    operation = hvd.allreduce_async(np.ones(4, np.float32), "beside", op=hvd.Sum)
    with pytest.raises(ProtocolError, match="can't be sent"):
        context.engine().post("waiting", bytes(codec.FRAME_LIMIT))
    result: list[float] = hvd.synchronize(operation).tolist()
    return result


def sleep() -> None:
    threading.Event().wait(60)


def give_up() -> None:
    operation = hvd.allreduce_async(np.ones(4, np.float32), "late")
    with pytest.raises(TimeoutError, match="still in flight"):
        hvd.synchronize(operation, timeout=0.05)
    assert [p.name for p in context.engine().pending()] == ["late"]
    context.engine().withdraw("rank 0 gave up")
    hvd.synchronize(operation)


def shuffled(seed: int, count: int, rounds: int) -> None:
    rank, size = context.engine().rank, context.engine().size
    chance = np.random.default_rng(seed + rank)
    for _ in range(rounds):
        operations: dict[int, Any] = {}
        for i in chance.permutation(count):
            x = np.full(int(i) + 1, rank + i, np.float32)
            operations[int(i)] = hvd.allreduce_async(x, f"t{i}", op=hvd.Sum)
        for i in chance.permutation(count):
            expected = sum(r + i for r in range(size))
            assert (hvd.synchronize(operations[int(i)]) == expected).all()


def in_flight(count: int) -> None:
    size = context.engine().size
    operations = [hvd.allreduce_async(np.full(2, i, np.int64), f"n{i}", op=hvd.Sum) for i in range(count)]
    for i, operation in enumerate(operations):
        assert (hvd.synchronize(operation) == size * i).all()
    assert context.engine().pending() == []


def fused(count: int) -> int:
    """Return how many operations of the plane it takes for so many tensors of one group."""
    from hvdlab.collectives.tracing.record_format import Span, decode

    engine = context.engine()
    size, rank = engine.size, engine.rank
    xs = [np.full(100 + i, rank + 1, np.float32) for i in range(count)]
    spans: list[Span] = []

    def recorded() -> bool:
        spans.extend(
            e for batch in engine.recorder.drain() for e in decode(batch).events if isinstance(e, Span)
        )
        return len(spans) == count

    log = EngineProbe(engine).spans
    eventually(log.claim_flush)  # from then on the engine sends none of them off
    try:
        averages = hvd.grouped_allreduce(xs, "group", op=hvd.Average, prescale_factor=2.0)
        eventually(recorded)  # which follows their end
    finally:
        log.release_flush()
    for x in averages:
        np.testing.assert_allclose(x, 2 * (size + 1) / 2)
    return len({(s.process_set, s.sequence, s.batch) for s in spans})


def initialize_again(times: int) -> tuple[int, int, int, int]:
    def counts() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = counts()
    for number in range(times):
        context.shutdown()
        assert not context.is_initialized()
        context.init()
        assert total(1.0, f"again{number}") == [context.engine().size] * 4
    return *before, *counts()


def fork_and_try() -> str:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            try:
                hvd.allreduce(np.ones(2, np.float32))
                text = "no error"
            except ValueError as error:
                text = str(error)
            os.write(write, text.encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


# -- tests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["dtype", "shape", "op", "root", "kind", "rest"])
def test_a_mismatch_names_both_sites_and_the_group_goes_on(two: Ranks, what: str) -> None:
    for _ in range(2):
        errors = two.outcomes(disagree, what)
        assert [type(e) for e in errors] == [MismatchError] * 2
        assert str(errors[0]) == str(errors[1])
        assert str(errors[0]).count("test_errors.py:") == 2
        assert two.run(total, per_rank=[(1.0,), (2.0,)]) == [[3.0] * 4] * 2


def test_all_that_disagree_are_named_with_the_same_text_on_each_rank(three: Ranks) -> None:
    for count in (3, 5000):
        errors = three.outcomes(sum_of, per_rank=[(count + rank, "odd") for rank in range(3)])
        assert [type(e) for e in errors] == [MismatchError] * 3
        assert len({str(e) for e in errors}) == 1
        assert all(f"rank {rank} " in str(errors[0]) for rank in range(3))
        assert all(f"float64[{count + rank}]" in str(errors[0]) for rank in range(3))


def test_those_that_disagree_do_not_wait_for_a_rank_that_is_busy(three: Ranks) -> None:
    errors = three.outcomes(sum_of, ranks=[0, 1], per_rank=[(3, "odd"), (4, "odd")], timeout=PATIENCE)
    assert [type(e) for e in errors] == [MismatchError] * 2
    (late,) = three.outcomes(sum_of, 5, "odd", ranks=[2])
    assert str(late) == str(errors[0])
    assert three.run(sum_of, 4, "odd") == [3.0] * 3


def sum_of(count: int, name: str) -> float:
    return float(hvd.allreduce(np.ones(count), name, op=hvd.Sum)[0])


def test_a_duplicate_name_fails_everywhere_and_the_name_works_afterwards(two: Ranks) -> None:
    with Waiting(two) as one:
        twice = two.start(submit_twice, ranks=[0])
        one.until(1)
    errors = two.outcomes(total, 1.0, "twin", ranks=[1]) + twice.outcomes()
    assert [type(e) for e in errors] == [DuplicateNameError] * 2
    assert two.run(total, 1.0, "twin") == [[2.0] * 4] * 2


def test_survivors_of_a_kill_raise_at_once_and_go_on(three: Ranks) -> None:
    assert three.run(total, 1.0, "w") == [[3.0] * 4] * 3
    with Waiting(three) as others:
        waiting = three.start(wait_for, "w", ranks=[0, 1])
        others.until(2)
    three.kill(2)
    errors = waiting.outcomes(PATIENCE)
    for error in errors:
        assert isinstance(error, AbortedError)
        assert error.cause.kind is CauseKind.RANK_DIED
        assert error.cause.ranks == (2,)
        assert "rank 2" in str(error)
        assert "`w`" in str(error)
    assert three.run(total, 1.0, "w", ranks=[0, 1]) == [[2.0] * 4] * 2
    assert three.run(total, 1.0, "w", ranks=[0, 1]) == [[2.0] * 4] * 2


def test_a_kill_in_the_middle_of_a_large_operation_ends_it(two: Ranks) -> None:
    with Waiting(two) as one:
        waiting = two.start(keep_reducing, 1 << 22)
        one.until(1)
    two.kill(1)
    error, gone = waiting.outcomes(PATIENCE)
    assert isinstance(error, AbortedError)
    assert (error.cause.kind, error.cause.ranks) == (CauseKind.RANK_DIED, (1,))
    assert isinstance(gone, RankGone)
    assert two.run(total, 1.0, ranks=[0]) == [[1.0] * 4]


def keep_reducing(count: int) -> None:
    """Reduce until rank 1 stops in an operation. Rank 0 reports that it is in that one."""
    engine = context.engine()
    usual = ShmPlane.allreduce

    def stop(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait()  # where another thread of this process is stopped first

    def report(plane: ShmPlane, *arguments: Any) -> None:
        engine.post("waiting", b"")
        usual(plane, *arguments)

    x = np.ones(count, np.float32)
    hvd.allreduce_(x, "big", op=hvd.Max)
    with mock.patch.object(ShmPlane, "allreduce", stop if engine.rank == 1 else report):
        hvd.allreduce_(x, "big", op=hvd.Max)


def interrupt_myself(when: Callable[[], bool]) -> threading.Thread:
    """Ctrl-C for this process as soon as ``when`` holds."""

    def watch() -> None:
        while not when():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


OTHERS_WAIT = threading.Event()


def listen() -> None:
    context.engine().on_mail("waiting", lambda sender, body: OTHERS_WAIT.set())


def wait_and_be_interrupted() -> None:
    thread = interrupt_myself(lambda: OTHERS_WAIT.is_set() and bool(context.engine().pending()))
    try:
        total(1.0, "i")
    finally:
        thread.join()


def wait_for_the_interrupted() -> None:
    operation = hvd.allreduce_async(np.ones(4, np.float32), "i", op=hvd.Sum)
    context.engine().flush()
    context.engine().post("waiting", b"", to=[0])  # travels behind the announcement
    hvd.synchronize(operation)


def be_interrupted_anywhere(count: int) -> tuple[int, list[str]]:
    """Call collectives until rank 0 reports, in one of them, that it has been interrupted often enough.

    Returns the number of interrupts that this rank has seen, and the types of error by which it has seen those of rank
    0.
    """
    rank = context.engine().rank
    left, seen, kinds = count if rank == 0 else 0, 0, []
    chance = np.random.default_rng(5)
    thread, armed = None, threading.Event()

    def armed_for(delay: float) -> bool:
        armed.wait()
        time.sleep(delay)
        return True

    ordinary = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while True:
            if left and thread is None:
                delay = chance.uniform(0.0, 0.02)
                thread = interrupt_myself(partial(armed_for, delay))
            try:
                armed.set()
                try:
                    # Anonymous, since some of an attempt that failed may be in flight when the next one begins.
                    pending = [hvd.allreduce_async(np.ones(3, np.float32)) for _ in range(3)]
                    hvd.allreduce(np.ones(1 << 18, np.float32), "large", op=hvd.Sum)
                    for operation in pending:
                        hvd.synchronize(operation)
                    go_on = hvd.allreduce(np.array([left > 0]), "go on", op=hvd.Max)
                except AbortedError as error:
                    kinds.append(error.cause.kind.value)
                    continue
                if not go_on[0] and not left:
                    return seen, kinds
            except KeyboardInterrupt:
                seen += 1
                left -= 1
                context.engine().withdraw("rank 0 was interrupted")  # also those on which it is not waiting
                assert thread is not None
                thread.join()
                thread = None
                armed.clear()
    finally:
        signal.signal(signal.SIGINT, ordinary)


def test_an_interrupt_ends_the_collective_on_all_ranks_and_keeps_the_group(three: Ranks) -> None:
    three.run(listen)
    first = three.start(wait_and_be_interrupted, ranks=[0])
    others = three.start(wait_for_the_interrupted, ranks=[1])
    assert isinstance(first.outcomes()[0], KeyboardInterrupt)
    for error in others.outcomes():
        assert isinstance(error, AbortedError)
        assert error.cause.kind is CauseKind.INTERRUPTED
        assert error.cause.ranks == (0,)
    three.catch_up()
    assert three.run(total, 1.0, "i") == [[3.0] * 4] * 3


def test_interrupts_at_any_moment_keep_the_group(three: Ranks) -> None:
    outcomes = three.run(be_interrupted_anywhere, 40)
    assert [seen for seen, _ in outcomes] == [40, 0, 0]
    for _, kinds in outcomes:
        # An interrupt between two submissions leaves nothing to withdraw: rank 0 starts over while the others are in
        # the middle, and then all wait for different collectives.
        assert set(kinds) <= {"interrupted", "withdrawn", "deadlock"}
    assert three.run(total, 1.0, "i") == [[3.0] * 4] * 3


def break_control_thread() -> None:
    """Make the control thread's next step fail, as by a fault of ours, and wait for its end."""

    def fail() -> None:
        raise ZeroDivisionError("a fault of the test's")

    control = EngineProbe(context.engine()).control
    control.call(fail)
    # A collective that is submitted before needs no control thread: the waiting thread does all of it.
    control.thread.join(PATIENCE)


WAITING: list[Any] = []


def begin_waiting() -> None:
    """Submit the collective in which rank 2 is to fail. Collectives submitted only after that would wait for rank 2's
    successor."""
    WAITING.append(hvd.allreduce_async(np.ones(4), "never", op=hvd.Sum))
    context.engine().flush()


def go_on_waiting() -> None:
    hvd.synchronize(WAITING.pop())


doomed = resident_ranks(3, scope="function")


def test_a_control_thread_that_fails_ends_what_its_rank_waits_for(doomed: Ranks) -> None:
    doomed.run(begin_waiting, ranks=[0, 1])
    doomed.run(break_control_thread, ranks=[2])
    (error,) = doomed.outcomes(total, 1.0, "never", ranks=[2], timeout=PATIENCE)
    assert isinstance(error, AbortedError)
    assert "a thread of hvdlab failed in this process (ZeroDivisionError: a fault of the test's)" in str(
        error
    )
    for other in doomed.outcomes(go_on_waiting, ranks=[0, 1], timeout=PATIENCE):
        assert isinstance(other, AbortedError)
        assert other.cause.ranks == (2,)
    doomed.kill(2)
    assert doomed.run(total, 1.0, "after", ranks=[0, 1]) == [[2.0] * 4] * 2


def test_a_timeout_keeps_the_handle_and_a_withdrawal_ends_it(two: Ranks) -> None:
    (error,) = two.outcomes(give_up, ranks=[0])
    assert isinstance(error, AbortedError)
    assert error.cause.kind is CauseKind.WITHDRAWN
    two.catch_up()
    assert two.run(total, 1.0) == [[2.0] * 4] * 2


def test_the_coordinators_death_fails_everything_and_nothing_hangs(two: Ranks) -> None:
    with Waiting(two) as others:
        waiting = two.start(wait_for, "c", ranks=[0])
        others.until(1)
    os.kill(two.coordinator.pid, signal.SIGKILL)
    (error,) = waiting.outcomes(GONE)
    assert isinstance(error, AbortedError)
    assert error.cause.kind is CauseKind.COORDINATOR_LOST
    for later in two.outcomes(total, 1.0):
        assert isinstance(later, AbortedError)
        assert later.cause.kind is CauseKind.COORDINATOR_LOST


def test_ranks_may_submit_in_any_order(three: Ranks) -> None:
    three.run(shuffled, 7, 50, 4)


def test_thousands_of_tensors_in_flight(two: Ranks) -> None:
    two.run(in_flight, 2000, timeout=60)
    two.run(in_flight, 2000, timeout=60)


def test_a_group_is_one_operation(two: Ranks) -> None:
    assert two.run(fused, 40) == [1, 1]


def test_initializing_again_leaks_nothing(two: Ranks) -> None:
    for threads, fds, threads_after, fds_after in two.run(initialize_again, 20, timeout=60):
        assert threads_after == threads
        assert fds_after == fds


def test_a_forked_child_can_not_use_the_engine_and_harms_nobody(two: Ranks) -> None:
    texts = two.run(fork_and_try)
    for rank, text in enumerate(texts):
        assert f"a process that rank {rank} has forked" in text
    assert two.run(total, 1.0) == [[2.0] * 4] * 2


def test_a_root_outside_the_set_is_refused_on_the_rank_itself(two: Ranks) -> None:
    errors = two.outcomes(broadcast_from, 7)
    assert [type(e) for e in errors] == [InvalidRequestError] * 2
    assert two.run(total, 1.0) == [[2.0] * 4] * 2


def broadcast_from(root: int) -> None:
    hvd.broadcast(np.ones(3), root)


def reduces_under_names_that_are_no_utf_8() -> list[float]:
    name = "loss\ud800"
    found = [float(hvd.synchronize(hvd.allreduce_async(np.ones(2), name=name, op=hvd.Sum))[0])]
    found += [float(hvd.allreduce(np.ones(size), name=name, op=hvd.Sum)[0]) for size in (2, 200_000)]
    return found


def test_a_name_with_half_of_a_surrogate_pair_is_a_name_as_any_other(two: Ranks) -> None:
    assert two.run(reduces_under_names_that_are_no_utf_8) == [[2.0] * 3] * 2
    assert two.run(total, 1.0) == [[2.0] * 4] * 2


def test_announcement_too_large_for_a_frame_ends_no_connection(two: Ranks) -> None:
    two.run(announce_unsendable)
    assert two.run(total, 1.0) == [[2.0] * 4] * 2


def test_mail_too_large_for_a_frame_is_refused_to_its_sender(two: Ranks) -> None:
    operations = two.run(post_too_large)
    assert operations == [[2.0] * 4] * 2
