"""Threads of the executor go on after a plane has failed at its end, and entries fail once a plane is done with their tensors."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator

import pytest

from hvdlab.collectives.engine.entries import CompletionHooks, Entry, RunBatch
from hvdlab.collectives.engine.executor import Executor, PlaneSlot
from hvdlab.collectives.engine.requests import Request, Result
from hvdlab.collectives.planes.base import (
    HOST,
    Completion,
    KeyValue,
    PendingCompletion,
    PhaseTimes,
    PlaneAborted,
    PlaneContext,
    ScopedStore,
)
from hvdlab.collectives.planes.host import LocalPlane
from hvdlab.collectives.types import OpKind
from support.patience import PATIENCE


class Sleeper:
    """Control thread that has nothing to do."""

    def wake(self) -> None: ...


class NoOutcomes:
    """Receiver of ends of batches, of which there are none."""

    def batch_done(
        self, batch: RunBatch, results: list[Result], started: int, phases: PhaseTimes
    ) -> None: ...

    def batch_unfinished(self, batch: RunBatch, started: int, phases: PhaseTimes) -> None: ...

    def batch_failed(self, batch: RunBatch, error: Exception) -> None: ...


class FailingPlane(LocalPlane):
    """Plane that finds no descriptor when it is aborted or closed."""

    def abort(self) -> None:
        raise OSError(errno.EMFILE, "no descriptor left")

    close = abort


@pytest.fixture
def executor() -> Iterator[Executor]:
    made = Executor(NoOutcomes(), CompletionHooks(0, Sleeper()), "test")
    yield made
    made.close(PATIENCE)
    assert not any(thread.is_alive() for thread in made.threads)


class EndingStore(KeyValue):
    """Store without values that notes its abort."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout: float) -> bytes:
        raise TimeoutError(key)

    def abort(self) -> None:
        self.ended.set()


def add_failing_plane(executor: Executor, store: KeyValue) -> PlaneSlot:
    context = PlaneContext(0, 1, 0, 1, (0,), ("here",), store, -1, "", {})
    slot = PlaneSlot("failing", HOST, context)
    slot.plane = FailingPlane(context)
    executor.prepare(slot)
    return slot


def test_abort_of_a_failing_plane_ends_the_waits_of_its_generation(executor: Executor) -> None:
    store = EndingStore()
    add_failing_plane(executor, ScopedStore(store, "gpu/"))
    executor.abort(0, 1)  # as the control thread calls it, which would end by an error
    assert store.ended.is_set()


def test_jobs_behind_a_plane_that_fails_to_close_are_run(executor: Executor) -> None:
    done = threading.Event()
    add_failing_plane(executor, EndingStore())
    executor.close_older(0, 2)
    executor.enqueue(done.set)
    executor.wake()
    assert done.wait(PATIENCE)


def test_jobs_behind_one_that_fails_are_run(executor: Executor) -> None:
    done = threading.Event()

    def fail() -> None:
        raise RuntimeError("a failed job")

    executor.enqueue(fail)
    executor.wake()
    executor.enqueue(done.set)
    executor.wake()
    assert done.wait(PATIENCE)


def test_abandoned_thread_in_users_code_delays_no_generation(executor: Executor) -> None:
    begun, go_on, prepared = threading.Event(), threading.Event(), threading.Event()
    slot = add_failing_plane(executor, EndingStore())

    def run_users_code() -> None:
        begun.set()
        go_on.wait()

    queue = executor.queue
    executor.enqueue(run_users_code)
    executor.wake()
    assert begun.wait(PATIENCE)
    queue.running = slot  # as in an operation that obeys no abort
    executor.abandon(queue, slot)
    queue.running = None

    def prepare() -> None:
        executor.prepare(slot)
        prepared.set()

    control = threading.Thread(target=prepare)
    control.start()
    try:
        assert prepared.wait(PATIENCE)
    finally:
        go_on.set()
        control.join()


class LatePlane(LocalPlane):
    """Plane whose barriers end when the test says so, as operations of GPUs do."""

    def __init__(self, context: PlaneContext) -> None:
        super().__init__(context)
        self.completion = PendingCompletion()

    def start_barrier(self, phases: PhaseTimes) -> Completion:  # type: ignore[override]  # planes of the host end at once
        return self.completion


class EndedEntry(Entry):
    """Entry that keeps its end."""

    __slots__ = ("error",)

    def __init__(self) -> None:
        super().__init__(Request(OpKind.BARRIER, "end"), "here", 0)
        self.generation = 1
        self.error: Exception | None = None

    def complete(self, result: Result | None, error: Exception | None) -> None:
        self.error = self.error or error


def begin_late(executor: Executor) -> tuple[PlaneSlot, LatePlane]:
    """Begin a barrier that ends late."""
    slot = add_failing_plane(executor, EndingStore())
    plane = slot.plane = LatePlane(slot.context)
    executor.enqueue(RunBatch(0, 1, 0, 0, (EndedEntry(),), ()))
    executor.run_pending()
    assert slot.under_way == 1
    return slot, plane


def test_entries_fail_once_no_aborted_operation_is_under_way(executor: Executor) -> None:
    _, plane = begin_late(executor)
    entry, other, failure = EndedEntry(), EndedEntry(), RuntimeError("the generation has ended")
    other.request.process_set = 1
    assert len(executor.abort(0, 1)) == 1
    executor.fail(entry, failure)
    executor.fail(other, failure)
    assert (entry.error, other.error) == (None, failure), "a GPU may write to the tensors of its process set"
    plane.completion.end(PlaneAborted())
    assert entry.error is failure


def test_entries_fail_where_an_aborted_operation_does_not_end(executor: Executor) -> None:
    _, plane = begin_late(executor)
    entry, failure = EndedEntry(), RuntimeError("the generation has ended")
    ((queue, slot),) = executor.abort(0, 1)
    executor.fail(entry, failure)
    executor.abandon(queue, slot)  # as the control thread does after a limit
    assert entry.error is failure
    assert executor.queue is queue, "no thread is stuck in it"
    plane.completion.end(PlaneAborted())
