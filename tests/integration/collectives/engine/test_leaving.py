"""A rank that leaves, or never comes, keeps no other rank waiting."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any, NoReturn

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.client import Client
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.engine import engine as engine_module
from hvdlab.collectives.engine.control_thread import Control
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.engine.executor import Executor
from hvdlab.collectives.engine.telemetry import TimelineTap
from hvdlab.collectives.engine.world_view import WorldView
from hvdlab.collectives.errors import AbortedError, CauseKind, StartError
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.settings import Settings
from support.engine_probe import EngineProbe
from support.patience import HOUR, PATIENCE, without_heartbeat
from support.ranks.resident import Ranks

LARGE = 1 << 22


@pytest.fixture(params=["shm", "gloo"])
def three(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(3, env={"HVDLAB_PLANE": request.param}) as ranks:
        ranks.run(total)
        yield ranks


# -- on the ranks -------------------------------------------------------------------------------------------------


def total() -> float:
    return float(hvd.allreduce(np.ones(100_000), "total", op=hvd.Sum)[0])


def reduce(count: int, times: int, *, leave: bool) -> list[float] | str:
    """Begin some large operations, and leave at once without waiting for them."""
    engine = context.engine()
    rank = engine.rank
    if leave:
        hvd.barrier()  # the coordinator knows all announcements of the others then
    operations = [hvd.allreduce_async(np.full(count, rank), f"x{i}", op=hvd.Sum) for i in range(times)]
    engine.flush()
    if leave:
        context.shutdown()
    else:
        hvd.barrier()
    try:
        return [float(np.asarray(hvd.synchronize(operation))[0]) for operation in operations]
    except AbortedError as error:
        return error.cause.kind.value


def broadcast_and_leave(count: int) -> float:
    rank = context.engine().rank
    x = hvd.broadcast(np.full(count, rank, np.float32), 1, "b")
    if rank == 1:
        context.shutdown()
    return float(x[-1])


def announce_and_leave() -> str:
    operation = hvd.allreduce_async(np.ones(LARGE), "never")
    context.engine().flush()
    context.engine().close(HOUR)  # only for running operations
    context.shutdown()
    with pytest.raises(AbortedError) as told:
        hvd.synchronize(operation)
    return told.value.cause.kind.value


def leave_soon() -> None:
    """Leave while an operation can't end, since another member is stopped."""
    engine = context.engine()
    hvd.allreduce_async(np.ones(LARGE), "stopped", op=hvd.Sum)
    engine.flush()
    while not any(pending.executing for pending in engine.pending()):
        time.sleep(0.001)
    engine.close(0.5)


def wait_for_the_first() -> None:
    operation = hvd.allreduce_async(np.ones(LARGE), "stopped", op=hvd.Sum)
    context.engine().flush()
    context.engine().post("waiting", b"")
    hvd.synchronize(operation)


# -- tests ----------------------------------------------------------------------------------------------------------


def test_what_is_executing_is_finished_before_a_rank_leaves(three: Ranks) -> None:
    outcomes = [three.start(reduce_keeping if rank else reduce_leaving, ranks=[rank]) for rank in range(3)]
    results = [outcome.results(PATIENCE)[0] for outcome in outcomes]
    # Those that had begun are right everywhere; later ones were given up, on all ranks.
    for result in results[1:]:
        assert result == [3.0] * 3 or result == CauseKind.RANK_LEFT.value, results
    assert results[1] == results[2]


def reduce_leaving() -> Any:
    return reduce(LARGE, 3, leave=True)


def reduce_keeping() -> Any:
    return reduce(LARGE, 3, leave=False)


def test_the_last_operation_is_whole_although_its_source_has_left(three: Ranks) -> None:
    assert three.run(broadcast_and_leave, LARGE) == [1.0] * 3


def test_what_only_one_has_asked_for_is_given_up(three: Ranks) -> None:
    assert three.run(announce_and_leave, ranks=[1], timeout=PATIENCE)[0] in ("rank_left", "shutdown")


def test_a_member_that_does_not_move_does_not_keep_a_rank_from_leaving(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_heartbeat(monkeypatch)
    told: SimpleQueue[int] = SimpleQueue()
    with Ranks(3, env={"HVDLAB_PLANE": "shm"}) as ranks:
        ranks.run(total)
        client = Client.connect(ranks.coordinator.address, ranks.coordinator.client_token)
        try:
            client.on_mail("waiting", lambda sender, body: told.put(sender))
            one, two = [ranks.start(wait_for_the_first, ranks=[rank]) for rank in (1, 2)]
            assert {told.get(timeout=PATIENCE), told.get(timeout=PATIENCE)} == {1, 2}
        finally:
            client.close()
        ranks.kill(2, signal.SIGSTOP)
        ranks.run(leave_soon, ranks=[0], timeout=PATIENCE)
        (error,) = one.outcomes(PATIENCE)
        assert isinstance(error, AbortedError)
        assert error.cause.kind is CauseKind.RANK_LEFT
        assert error.cause.ranks == (0,)
        ranks.kill(2, signal.SIGCONT)
        assert isinstance(two.outcomes(PATIENCE)[0], AbortedError)


def test_a_rank_that_died_is_not_waited_for() -> None:
    with CoordinatorProcess.start(size=3, timeout=PATIENCE) as coordinator:
        settings = Settings(coordinator.address, coordinator.token, 0, plane="shm")
        engine = Engine.connect(settings, timeout=PATIENCE)
        client = Client.connect(coordinator.address, coordinator.client_token)
        try:
            client.rank_lost(2, 4711, "killed by SIGKILL")
            with pytest.raises(StartError, match=r"rank 2 .*killed by SIGKILL"):
                engine.wait_for_world(HOUR)
        finally:
            client.close()
            engine.close()


def test_a_death_counts_only_as_long_as_nobody_has_come_for_it() -> None:
    view = WorldView()
    member = [m.Member(rank, "host", rank) for rank in range(2)]
    death = m.Death(1, 7, 0.0, "killed by SIGKILL")
    view.update(m.World((0, 1), (member[0],), (death,), 1))
    with pytest.raises(StartError, match="rank 1 ended before"):
        view.wait_complete(10, 0)
    view.update(m.World((0, 1), (member[0],), (), 1))
    with pytest.raises(StartError, match="rank 0 waited"):
        view.wait_complete(0, 0)
    view.configured([0, 1], 1)
    view.update(
        m.World((0, 1), (member[0],), (death,), 1)
    )  # a member that dies later is no matter of starting
    view.wait_complete(0, 0)


def interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", [(Control, "stop"), (Executor, "close"), (CoordinatorProcess, "close")])
def test_interrupted_shutdown_is_finished_by_the_next(
    step: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    context.init()
    parts = EngineProbe(context.engine())
    with monkeypatch.context() as patch:
        patch.setattr(*step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            context.shutdown()
    context.shutdown()
    assert not context.is_initialized()
    assert not parts.control.thread.is_alive()
    assert not any(thread.is_alive() for thread in parts.executor.threads)


def test_interrupted_shutdown_is_finished_by_the_next_init(monkeypatch: pytest.MonkeyPatch) -> None:
    context.init()
    parts = EngineProbe(context.engine())
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "_drain", interrupt)
        with pytest.raises(KeyboardInterrupt):
            context.shutdown()
    context.init()
    assert not parts.control.thread.is_alive()
    assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == 1.0
    context.shutdown()


def test_rank_whose_timeline_fails_leaves_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError("no space left")

    context.init()
    parts = EngineProbe(context.engine())
    monkeypatch.setattr(TimelineTap, "stop", fail)
    with pytest.raises(OSError, match="no space left"):
        context.shutdown()
    assert not parts.control.thread.is_alive()
    monkeypatch.undo()
    context.shutdown()
