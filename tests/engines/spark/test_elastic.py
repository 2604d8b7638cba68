"""run_elastic on a real Spark: ranks that are lost and come again, and calls that have no room."""

from __future__ import annotations

import inspect
import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import hvdlab.spark
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.runner.run_function import RankFailedError
from support.patience import PATIENCE

SETTINGS: dict[str, Any] = {"start_timeout": 4 * PATIENCE, "elastic_timeout": 4 * PATIENCE}


def until_sizes(wanted: list[int], killed: str, alone: str) -> tuple[list[int], int, int]:
    """Train until the world has had these sizes; once, the last rank is killed in a step. It comes again when the other was alone."""
    import time

    import numpy as np

    import hvdlab.numpy as hvd
    from hvdlab.collectives.elastic import ObjectState, run_fn

    lone = os.open(alone, os.O_RDWR)  # a pipe with a name; opened so, it waits for no other end
    if os.path.exists(killed):
        os.read(lone, 1)
    hvd.init()
    state: Any = ObjectState(hvd.broadcast_object, hvd.rank, sizes=[], step=0)
    entered = 0

    def train(state: Any) -> None:
        nonlocal entered
        entered += 1
        while state.sizes != wanted:
            size = int(hvd.allreduce(np.ones(1), op=hvd.Sum, name="size")[0])
            if size == wanted[len(state.sizes)]:
                state.sizes = [*state.sizes, size]
                if size == 1:
                    os.write(lone, b"once for each time that it may come")
            state.step += 1
            state.commit()
            if hvd.rank() == 1 and not os.path.exists(killed):
                open(killed, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.05)  # as long as a step: the new rank needs the processors to start

    run_fn(train, lambda: None)(state)
    print("trained", os.environ["GIVEN"])
    return state.sizes, entered, os.getpid()


def test_a_rank_that_is_killed_comes_again_and_the_other_keeps_its_memory(spark: Any, tmp_path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    os.mkfifo(tmp_path / "alone")
    found = hvdlab.spark.run_elastic(
        until_sizes,
        ([2, 1, 2], str(tmp_path / "killed"), str(tmp_path / "alone")),
        num_proc=2,
        min_num_proc=1,
        env={"GIVEN": "5"},
        stdout=out,
        stderr=err,
        **SETTINGS,
    )
    assert [sizes for sizes, *_ in found] == [[2, 1, 2]] * 2
    # The first has kept its process; it may have begun alone.
    assert found[0][1] >= 3
    assert found[1][1] == 1
    assert sorted(out.getvalue().splitlines()) == ["[0]<stdout>:trained 5", "[1]<stdout>:trained 5"]
    assert "SIGKILL" in err.getvalue()


def sleeps_at_first(once: str) -> int:
    """One of the first ranks never comes to ``hvd.init()``; returns the size when another one has come in its place."""
    import time

    import hvdlab.numpy as hvd
    from hvdlab.collectives.elastic import ObjectState, run_fn

    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL))
        time.sleep(1000)
    except FileExistsError:
        hvd.init()

    def train(state: Any) -> int:
        while hvd.size() < 2:
            state.check_host_updates()
            time.sleep(0.05)  # as long as a step: the new rank needs the processors to start
        return hvd.size()

    return run_fn(train, lambda: None)(ObjectState(hvd.broadcast_object, hvd.rank))


def test_the_others_begin_without_a_rank_that_never_comes(spark: Any, tmp_path: Path) -> None:
    err = io.StringIO()
    found = hvdlab.spark.run_elastic(
        sleeps_at_first,
        (str(tmp_path / "slept"),),
        num_proc=2,
        min_num_proc=1,
        env={"HVDLAB_START_TIMEOUT": "5"},
        stderr=err,
        **SETTINGS,
    )
    assert found == [2, 2]
    assert "did not come to hvd.init() within 5 s; going on without it" in err.getvalue()


def test_what_a_rank_raises_comes_back(spark: Any) -> None:
    def fails() -> None:
        raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column") as caught:
        hvdlab.spark.run_elastic(fails, num_proc=1, reset_limit=0, verbose=0, **SETTINGS)
    assert isinstance(caught.value, RankFailedError)


def test_numbers_that_make_no_sense_and_too_few_slots(spark: Any) -> None:
    impossible: list[dict[str, Any]] = [
        {"num_proc": 1, "min_num_proc": 2},
        {"num_proc": 2, "max_num_proc": 1},
        {"num_proc": 0},
    ]
    for numbers in impossible:
        with pytest.raises(InvalidRequestError, match="none of the numbers is below"):
            hvdlab.spark.run_elastic(os.getpid, **numbers)
    with pytest.raises(
        Exception, match=r"^Timed out waiting for Spark tasks to start.*2 task slots for 3 ranks"
    ):
        hvdlab.spark.run_elastic(os.getpid, num_proc=3)
    with (
        pytest.warns(DeprecationWarning, match="min_np is called min_num_proc"),
        pytest.raises(InvalidRequestError),
    ):
        hvdlab.spark.run_elastic(os.getpid, num_proc=1, min_np=2)
    wanted = (
        "fn args kwargs num_proc min_num_proc max_num_proc start_timeout elastic_timeout reset_limit env stdout stderr verbose nics "
        "prefix_output_with_timestamp min_np max_np"
    )
    assert list(inspect.signature(hvdlab.spark.run_elastic).parameters) == wanted.split()
