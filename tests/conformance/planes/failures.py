"""Cases in which a member waits in vain. They run inside workers."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np

from conformance.planes import cases
from conformance.planes.actor import CollectiveActor
from hvdlab.collectives.planes.base import PlaneAborted, PlaneBroken, storage_type
from hvdlab.collectives.types import PLAIN, SUM, DType, ReduceOp

WAITING = ("allreduce", "allreduce-large", "allreduce-fused", "allreduce-bf16", "adasum", "allgather", "broadcast",
           "reducescatter", "alltoall", "barrier")  # fmt: skip


def start(actor: CollectiveActor, what: str, count: int) -> None:
    """Run one operation of ``count`` elements per member, on zeros."""
    n, dtype = actor.size, DType.BF16 if what == "allreduce-bf16" else DType.F32
    buffer = np.zeros(count * n, storage_type(dtype))
    if what == "adasum":
        actor.allreduce([buffer], dtype, PLAIN[ReduceOp.ADASUM], False)
    elif what.startswith("allreduce"):
        parts = [buffer[:5], buffer[5:]] if what == "allreduce-fused" else [buffer]
        actor.allreduce([buffer[:9]] if what == "allreduce" else parts, dtype, SUM, False)
    elif what == "allgather":
        actor.allgather(buffer[:count], [count] * n, dtype)
    elif what == "broadcast":
        actor.broadcast(buffer, n - 1, dtype)
    elif what == "reducescatter":
        actor.reducescatter(buffer, [count] * n, dtype, SUM)
    elif what == "alltoall":
        actor.alltoall(buffer, [count] * n, [count] * n, dtype)
    else:
        actor.barrier()


def abort_while_waiting(actor: CollectiveActor, what: str, count: int) -> None:
    """Enter an operation that not all enter; abort it once this thread sleeps. Without that the wait has no end."""
    waiter = threading.get_native_id()

    def abort() -> None:
        until_asleep(waiter)
        actor.abort()

    with helper(abort):
        is_aborted(lambda: start(actor, what, count))
    assert_spent(actor)


def abort_a_message(actor: CollectiveActor, count: int) -> None:
    """Wait for a message of the last member, which does not come; abort that once this thread sleeps."""
    waiter, last = threading.get_native_id(), actor.size - 1

    def abort() -> None:
        until_asleep(waiter)
        actor.abort()

    def receive() -> None:
        actor.message(np.zeros(count, np.float32), last, actor.index, DType.F32)

    with helper(abort):
        is_aborted(receive)
    is_aborted(receive)
    assert_spent(actor)


def abort_at_random(actor: CollectiveActor, seed: int) -> None:
    """Abort a sequence of operations somewhere."""

    def abort() -> None:
        time.sleep(
            np.random.default_rng([seed, actor.index]).uniform(0, 0.02)
        )  # a moment, not a synchronisation
        actor.abort()

    def operations() -> None:
        for round_ in range(100_000):
            cases.mixture(actor, seed + round_, 10)

    with helper(abort):
        is_aborted(operations)
    assert_spent(actor)


def abort_first(actor: CollectiveActor) -> None:
    """Check that nothing starts after an abort; aborting again, and after closing, does nothing."""
    actor.abort()
    actor.abort()
    assert_spent(actor)
    actor.close()
    actor.close()
    actor.abort()


def outlive(actor: CollectiveActor, victim: int, victim_pid: int, what: str, count: int) -> None:
    """Work until the victim has killed itself, and another process has notified this member if it did not notice by
    itself."""

    def die() -> None:
        time.sleep(0.05)  # somewhere in the middle
        os.kill(os.getpid(), signal.SIGKILL)

    def hear() -> None:
        # It may be over, and waited for, before this thread has begun.
        with suppress(ProcessLookupError):
            fd = os.pidfd_open(victim_pid)
            select.select([fd], [], [])
            os.close(fd)
        actor.abort()
        # An engine that had nothing in flight just then goes on without the victim, and waits for members that have ended this.
        while not ended.wait(0.1):
            actor.abort()

    def operations() -> None:
        while True:
            start(actor, what, count)

    ended = threading.Event()
    with helper(die if actor.index == victim else hear):
        try:
            # A plane of connections may notice by itself that one is lost.
            is_aborted(operations, PlaneBroken)
        finally:
            ended.set()


def is_aborted(operation: Callable[[], None], *errors: type[Exception]) -> None:
    """Check that the operation raises ``PlaneAborted`` or one of ``errors``; it must."""
    try:
        operation()
    except Exception as error:
        if isinstance(error, (PlaneAborted, *errors)):
            return
        raise
    raise AssertionError("the operation was not aborted")


def assert_spent(actor: CollectiveActor) -> None:
    """Check that after an abort every operation is refused, without waiting for any member."""
    for what in WAITING:
        is_aborted(lambda w=what: start(actor, w, 100))  # type: ignore[misc]  # mypy can't infer a lambda's default


@contextmanager
def helper(work: Callable[[], None]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def until_asleep(thread: int) -> None:
    """Return when a thread of this process has slept for some looks in a row: it waits in the kernel."""
    asleep = 0
    while asleep < 5:
        with open(f"/proc/self/task/{thread}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
        asleep = asleep + 1 if state == "S" else 0
        time.sleep(0.001)
