"""Effects of users' variables in real ranks."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import hvdlab.numpy as hvd
from hvdlab.collectives import context
from hvdlab.collectives.errors import AbortedError, CauseKind, InvalidRequestError
from hvdlab.collectives.system import bind_threads
from support.engine_probe import EngineProbe
from support.ranks.resident import RankFailed, Ranks


@pytest.fixture
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Yield two ranks, and a coordinator, with the test's variables."""
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)
    with Ranks(2) as ranks:
        yield ranks


def with_variables(**variables: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("pair", [variables], indirect=True, ids=[""])


def many_names() -> int:
    for step in range(3):
        for i in range(40):
            started = hvd.allreduce_async(np.full(5, step), f"name.{i}", op=hvd.Sum)
            assert (np.asarray(hvd.synchronize(started)) == 2 * step).all()
    return len(EngineProbe(context.engine()).locked.state.locals)


@with_variables(HOROVOD_CACHE_CAPACITY="7")
def test_the_cache_holds_as_many_tensors_as_it_may(pair: Ranks) -> None:
    assert pair.run(many_names) == [7, 7]


@with_variables(HOROVOD_CACHE_CAPACITY="0")
def test_without_a_cache_everything_works(pair: Ranks) -> None:
    assert pair.run(many_names) == [1, 1]


@with_variables()
def test_by_default_every_name_is_kept(pair: Ranks) -> None:
    assert pair.run(many_names) == [40, 40]


def cores_of_threads() -> list[set[int]]:
    engine = context.engine()
    threads = [EngineProbe(engine).control.thread, *EngineProbe(engine).executor.threads]
    return [os.sched_getaffinity(thread.native_id or 0) for thread in threads]


def test_threads_are_bound_to_the_cores_of_their_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = sorted(os.sched_getaffinity(0))
    chosen = [cores[0], cores[-1]]
    monkeypatch.setenv("HOROVOD_THREAD_AFFINITY", ",".join(map(str, chosen)))
    with Ranks(2) as ranks:
        assert ranks.run(cores_of_threads) == [[{chosen[0]}] * 2, [{chosen[1]}] * 2]


def test_rank_without_a_core_of_its_own_is_not_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = os.sched_getaffinity(0)
    monkeypatch.setenv("HOROVOD_THREAD_AFFINITY", str(min(free)))
    with Ranks(2) as ranks:
        assert ranks.run(cores_of_threads) == [[{min(free)}] * 2, [free] * 2]
    bind_threads([min(free)], 1, [threading.current_thread()])
    assert "names 1 cores, and this is local rank 1" in caplog.text


def test_a_core_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_THREAD_AFFINITY", "0,4000")
    with pytest.raises(RankFailed) as caught:
        Ranks(2)
    error = caught.value.errors[1]
    assert isinstance(error, InvalidRequestError)
    assert "core 4000 can't be used by local rank 1" in str(error)


def wait_alone() -> tuple[str, tuple[int, ...], float]:
    begun = time.monotonic()
    with pytest.raises(AbortedError) as caught:
        hvd.allreduce(np.ones(3), "alone")
    cause = caught.value.cause
    return cause.kind, cause.ranks, time.monotonic() - begun


def together() -> float:
    return float(np.asarray(hvd.allreduce(np.ones(1), "after", op=hvd.Sum))[0])


@with_variables(HOROVOD_STALL_SHUTDOWN_TIME_SECONDS="1", HOROVOD_LOG_LEVEL="error")
def test_what_stalls_too_long_ends_and_names_the_missing(pair: Ranks) -> None:
    ((kind, missing, seconds),) = pair.run(wait_alone, ranks=[0])
    assert (kind, missing) == (CauseKind.TIMEOUT, (1,))
    assert seconds >= 1.0
    pair.catch_up()
    assert pair.run(together) == [2.0, 2.0]


def seconds_of_one() -> float:
    hvd.allreduce(np.ones(1), "x")
    begun = time.monotonic()
    hvd.synchronize(hvd.allreduce_async(np.ones(1), "x"))
    return time.monotonic() - begun


@with_variables(HOROVOD_CYCLE_TIME="80")
def test_the_flush_delay_holds_a_collective(pair: Ranks) -> None:
    assert all(seconds >= 0.08 for seconds in pair.run(seconds_of_one))


def lines_of_a_new_set() -> list[str]:
    written, sys.stderr = sys.stderr, io.StringIO()
    try:
        added = context.engine().add_process_set([0, 1])
        context.engine().remove_process_set(added)
        return sys.stderr.getvalue().splitlines()
    finally:
        sys.stderr = written


@with_variables(HOROVOD_LOG_LEVEL="info", HOROVOD_LOG_HIDE_TIME="1")
def test_at_level_info_ranks_tell_of_process_sets(pair: Ranks) -> None:
    for rank, lines in enumerate(pair.run(lines_of_a_new_set)):
        head = f"hvdlab INFO: rank {rank}: process set 1, generation 1"
        assert f"{head}: ranks 0,1, plane shm" in lines


@with_variables(HOROVOD_LOG_LEVEL="info")
def test_lines_have_the_time_unless_it_is_hidden(pair: Ranks) -> None:
    for lines in pair.run(lines_of_a_new_set):
        assert lines
        assert lines[0][:2] == "20"


@with_variables()
def test_by_default_nothing_is_written(pair: Ranks) -> None:
    assert pair.run(lines_of_a_new_set) == [[], []]


def test_what_a_variable_should_not_hold_is_told_by_init(monkeypatch: pytest.MonkeyPatch) -> None:
    with Ranks(1, init=False, env={"HOROVOD_LOG_LEVEL": "loud", "HOROVOD_CYCLE_TIME": "x"}) as ranks:
        (error,) = ranks.outcomes(context.init)
    assert isinstance(error, InvalidRequestError)
    assert "HOROVOD_LOG_LEVEL='loud'" in str(error)
    assert "HOROVOD_CYCLE_TIME='x'" in str(error)
