"""A plane operation that can't be aborted: its thread is left behind, and the next generation works without it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.errors import AbortedError, CauseKind
from hvdlab.collectives.planes import registry
from hvdlab.collectives.planes.base import HostArray, PhaseTimes, PlaneAborted
from hvdlab.collectives.planes.shm import ShmPlane
from support.engine_probe import EngineProbe
from support.patience import PATIENCE
from support.ranks.resident import Ranks

STUCK = threading.Event()
OTHER_IS_STUCK = threading.Event()
RELEASED = threading.Event()
ABORT_HANDLED = threading.Event()
CLOSED: list[int] = []
THREADS: list[threading.Thread] = []


class StubbornPlane(ShmPlane):
    """Rank 0's broadcasts of the first generation hear of nothing until they are released, its allgathers until all know of the abort."""

    def broadcast(self, buffer: HostArray, root: int, phases: PhaseTimes) -> None:
        if self.context.index == 0 and not CLOSED and not RELEASED.is_set():
            THREADS.append(threading.current_thread())
            STUCK.set()
            RELEASED.wait()
        super().broadcast(buffer, root, phases)

    def allgather(self, send: HostArray, counts: Sequence[int], out: HostArray, phases: PhaseTimes) -> None:
        if self.context.index == 0:
            STUCK.set()
            assert ABORT_HANDLED.wait(PATIENCE)
            raise PlaneAborted
        super().allgather(send, counts, out, phases)

    def close(self) -> None:
        CLOSED.append(self.context.generation)
        super().close()


@pytest.fixture
def two() -> Iterator[Ranks]:
    with Ranks(2, init=False, env={"HVDLAB_PLANE": "shm"}) as ranks:
        ranks.run(begin)
        yield ranks


# -- on the ranks -------------------------------------------------------------------------------------------------


def begin() -> None:
    registry._CLASSES["shm"] = (__name__, "StubbornPlane", "")
    global BEFORE
    BEFORE = left_open()
    context.init().on_mail("stuck", lambda sender, body: OTHER_IS_STUCK.set())


BEFORE: tuple[int, list[str]] = (0, [])


def left_open() -> tuple[int, list[str]]:
    names = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_exists(fd)]
    return threading.active_count(), sorted(name for name in names if not name.startswith("/proc"))


def fd_exists(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def total(value: float, count: int = 200_000) -> float:
    return float(hvd.allreduce(np.full(count, value), "total", op=hvd.Sum)[0])


def get_stuck(waiting: bool) -> Any:
    """Rank 0 is stuck in an executor thread, or in a thread of the user's that waits."""
    engine = context.engine()
    operation = hvd.broadcast_async(np.ones(5000), 0, "stuck")
    if engine.rank == 1:
        engine.flush()
        assert OTHER_IS_STUCK.wait(PATIENCE)
        engine.withdraw("rank 1 gave up")
        hvd.synchronize(operation)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            hvd.synchronize(operation)
        except AbortedError as error:
            errors.append(error)

    if waiting:
        threading.Thread(target=wait, name="user").start()
    else:
        engine.flush()
    assert STUCK.wait(PATIENCE)
    before = generation()
    engine.post("stuck", b"", to=[1])
    until = time.monotonic() + PATIENCE
    while generation() == before:  # rank 0's submission before it learns of the abort is aborted as well
        assert time.monotonic() < until
        time.sleep(0.01)
    if not waiting:
        wait()
        assert isinstance(errors[0], AbortedError)
        assert errors[0].cause.kind is CauseKind.WITHDRAWN
    return None


def fail_while_the_plane_works() -> bool:
    """Return whether rank 0's handle had ended before the operation that the abort ends."""
    engine = context.engine()
    ended: SimpleQueue[bool] = SimpleQueue()
    operation = hvd.allgather_async(np.ones(5000), "slow")

    def record(message: object) -> None:
        ended.put(hvd.poll(operation))
        ABORT_HANDLED.set()

    engine.on_abort(record)
    engine.flush()
    if engine.rank == 0:
        assert STUCK.wait(PATIENCE)
        engine.withdraw("rank 0 gave up")
    with pytest.raises(AbortedError):
        hvd.synchronize(operation)
    return ended.get(timeout=PATIENCE)  # on rank 1 the operation can end before the callback


def generation() -> int:
    number: int = EngineProbe(context.engine()).locked.state.sets[0].generation
    return number


def stuck() -> int:
    abandoned: int = EngineProbe(context.engine()).executor.abandoned
    return abandoned


def release() -> tuple[int, int, bool, list[int]]:
    """Let the stuck thread return; report its leftovers after the next generation began."""
    RELEASED.set()
    THREADS[0].join(PATIENCE)
    for thread in threading.enumerate():
        if thread.name == "user":
            thread.join(PATIENCE)
    executor = EngineProbe(context.engine()).executor
    executor._join_abandoned()
    return executor.abandoned, len(executor._abandoned), THREADS[0].is_alive(), CLOSED


def end() -> tuple[tuple[int, list[str]], tuple[int, list[str]]]:
    context.shutdown()
    return BEFORE, left_open()


# -- tests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("waiting", [False, True], ids=["executor", "user"])
def test_the_next_generation_works_while_a_thread_is_stuck(two: Ranks, waiting: bool) -> None:
    first, second = two.outcomes(get_stuck, waiting)
    assert first is None
    assert isinstance(second, AbortedError)
    assert two.run(total, 2.0) == [4.0] * 2
    assert two.run(stuck) == [1, 0]
    assert two.run(total, 1.0, 3) == [2.0] * 2
    (left,) = two.run(release, ranks=[0])
    assert left == (0, 0, False, [1])
    assert two.run(total, 1.0) == [2.0] * 2
    for before, after in two.run(end):
        assert after == before


def test_handle_of_an_aborted_operation_ends_after_the_plane_is_done(two: Ranks) -> None:
    """Otherwise the plane could write to a tensor that the user has restored."""
    assert two.run(fail_while_the_plane_works)[0] is False


def test_a_world_can_be_left_while_a_thread_is_stuck(two: Ranks) -> None:
    assert two.outcomes(get_stuck, False)[0] is None
    assert two.run(total, 2.0) == [4.0] * 2
    for rank, (before, after) in enumerate(two.run(end)):
        assert after[0] == before[0] + (rank == 0)
