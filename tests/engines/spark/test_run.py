"""hvdlab.spark.run on a real Spark: values by rank, output, errors and jobs without room."""

from __future__ import annotations

import inspect
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hvdlab.spark
from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.runner.run_function import RankFailedError
from hvdlab.spark.task import get_available_devices


def summed(factor: int, *, more: int = 0) -> tuple[int, int, int, float]:
    import torch

    import hvdlab.torch as hvd

    hvd.init()
    total = hvd.allreduce(torch.full((3,), float(hvd.rank() + 1) * factor), op=hvd.Sum, name="x")
    return hvd.rank(), hvd.size(), hvd.local_rank(), float(total[0]) + more


def test_values_come_by_rank_and_the_same_spark_is_used_again(spark: Any) -> None:
    for factor in (1, 10):
        found = hvdlab.spark.run(summed, (factor,), {"more": 1}, num_proc=2)
        assert found == [(0, 2, 0, 3.0 * factor + 1), (1, 2, 1, 3.0 * factor + 1)]
    assert len(hvdlab.spark.run(lambda: 0)) == spark.defaultParallelism == 2
    assert spark.parallelize(range(4), 2).sum() == 6


def test_horovods_name_is_the_same_module() -> None:
    """In a process of its own: the tests' folder `horovod` would be found first here."""
    code = (
        "import hvdlab.horovod; hvdlab.horovod.install_as_horovod(force=True)\n"
        "import horovod.spark, hvdlab.spark, sys\n"
        "assert horovod.spark is hvdlab.spark\n"
        "assert 'pyspark' not in sys.modules\n"
        "from horovod.spark.common.store import Store\n"
        "from horovod.spark.common.backend import SparkBackend\n"
        "import horovod.spark.torch, hvdlab.spark.common.store, hvdlab.spark.torch\n"
        "assert Store is hvdlab.spark.common.store.Store\n"
        "assert horovod.spark.torch.TorchEstimator is hvdlab.spark.torch.TorchEstimator\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    wanted = (
        "fn args kwargs num_proc start_timeout use_mpi use_gloo extra_mpi_args env stdout stderr verbose nics "
        "prefix_output_with_timestamp executable"
    )
    assert list(inspect.signature(hvdlab.spark.run).parameters) == wanted.split()


def test_output_and_variables(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_DRIVER", "1")

    def talk() -> tuple[str | None, str | None, int]:
        print("to stdout")
        print("to stderr", file=sys.stderr)
        return os.environ.get("OF_THE_CALL"), os.environ.get("OF_THE_DRIVER"), os.getppid()

    out, err = io.StringIO(), io.StringIO()
    found = hvdlab.spark.run(talk, num_proc=2, env={"OF_THE_CALL": "2"}, stdout=out, stderr=err)
    assert [each[:2] for each in found] == [("2", None)] * 2
    assert os.getpid() not in [each[2] for each in found]
    assert sorted(out.getvalue().splitlines()) == ["[0]<stdout>:to stdout", "[1]<stdout>:to stdout"]
    assert sorted(err.getvalue().splitlines()) == ["[0]<stderr>:to stderr", "[1]<stderr>:to stderr"]


def test_what_a_rank_raises_names_rank_and_traceback_while_the_other_waits_for_it(spark: Any) -> None:
    def fails_early() -> None:
        import hvdlab.torch as hvd

        if os.environ["HVDLAB_RANK"] == "1":
            raise KeyError("no such column")
        hvd.init()

    with pytest.raises(KeyError) as caught:
        hvdlab.spark.run(fails_early, num_proc=2)
    error = caught.value
    assert isinstance(error, RankFailedError)
    assert error.rank == 1
    assert "rank 1 raised KeyError: 'no such column'" in str(error)
    assert "in fails_early" in error.remote_traceback


@pytest.mark.parametrize("attempt", range(3))
def test_the_error_is_that_of_the_rank_that_failed_first_whichever_end_comes_first(
    spark: Any, attempt: int
) -> None:
    def fails_while_the_other_waits() -> None:
        import hvdlab.torch as hvd

        hvd.init()
        hvd.barrier()
        if hvd.rank() == 1:
            raise KeyError("no such column")
        hvd.barrier()

    with pytest.raises(KeyError) as caught:
        hvdlab.spark.run(fails_while_the_other_waits, num_proc=2)
    assert isinstance(caught.value, RankFailedError)
    assert caught.value.rank == 1


def test_a_rank_that_is_killed_is_named(spark: Any) -> None:
    def killed() -> None:
        import hvdlab.torch as hvd

        hvd.init()
        if hvd.rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.barrier()

    with pytest.raises(RankFailedError, match=r"rank 0 .*SIGKILL") as caught:
        hvdlab.spark.run(killed, num_proc=2)
    assert caught.value.rank == 0
    assert hvdlab.spark.run(lambda: 1, num_proc=2) == [1, 1]


def test_a_rank_that_does_not_notice_is_ended_with_the_job(
    spark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("hvdlab.spark.runner._AFTER_A_FAILURE", 1.0)
    place = tmp_path / "pid"

    def one_waits() -> None:
        if os.environ["HVDLAB_RANK"] == "0":
            place.write_text(str(os.getpid()))
            signal.pause()
        while not place.exists():
            os.sched_yield()
        raise ValueError("boom")

    with pytest.raises(RankFailedError, match="rank 1 failed: its function raised ValueError: boom"):
        hvdlab.spark.run(one_waits, num_proc=2)
    try:
        descriptor = os.pidfd_open(int(place.read_text()))
    except ProcessLookupError:
        return
    from hvdlab.launch.processes import readable

    assert readable(descriptor, 60)
    os.close(descriptor)


def test_what_has_no_room_is_refused_in_horovods_words(spark: Any) -> None:
    with pytest.raises(
        Exception, match=r"^Timed out waiting for Spark tasks to start.*2 task slots for 3 ranks"
    ):
        hvdlab.spark.run(summed, (1,), num_proc=3)
    with pytest.raises(InvalidRequestError, match="num_proc=0"):
        hvdlab.spark.run(summed, (1,), num_proc=0)
    with pytest.raises(InvalidRequestError, match="ask for MPI"):
        hvdlab.spark.run(summed, (1,), num_proc=1, use_mpi=True)


def test_tasks_behind_another_job_are_waited_for_no_longer_than_was_said(spark: Any, tmp_path: Path) -> None:
    from pyspark import InheritableThread

    taken, done = tmp_path / "taken", tmp_path / "done"

    def hold(_: Any) -> Any:
        taken.touch()
        while not done.exists():
            os.sched_yield()
        return iter(())

    other = InheritableThread(target=lambda: spark.parallelize([0], 1).mapPartitions(hold).collect())
    other.start()
    try:
        while not taken.exists():
            os.sched_yield()
        with pytest.raises(Exception, match=r"^Timed out waiting for Spark tasks to start: 0 of 2 run"):
            hvdlab.spark.run(summed, (1,), num_proc=2, start_timeout=1)
    finally:
        done.touch()
        other.join(60)
    assert hvdlab.spark.run(lambda: 1, num_proc=2) == [1, 1]


def test_without_a_context_and_without_the_interpreter(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankFailedError, match="/no/python"):
        hvdlab.spark.run(lambda: 0, num_proc=1, executable="/no/python")
    monkeypatch.setattr(type(spark), "_active_spark_context", None)
    with pytest.raises(
        Exception, match="Could not find an active SparkContext, are you running in a PySpark session"
    ):
        hvdlab.spark.run(lambda: 0, num_proc=1)


def test_spark_connect_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark import SparkContext

    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    with pytest.raises(StartError, match="a session of Spark Connect has none"):
        hvdlab.spark.run(lambda: 0, num_proc=1)


def test_the_gpus_of_a_task_are_none_outside_of_one() -> None:
    assert get_available_devices() == []


@pytest.mark.parametrize("local_mode", [False, True])
def test_torch_distributor(spark: Any, tmp_path: Path, local_mode: bool) -> None:
    def train(start: float, *, step: float) -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        value = torch.full((1,), start + step * dist.get_rank())
        dist.all_reduce(value)
        dist.destroy_process_group()
        return float(value)

    distributor = hvdlab.spark.TorchDistributor(2, local_mode, use_gpu=False)
    assert distributor.run(train, 1.0, step=0.5) == 2.5
    script = tmp_path / "train.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "assert __name__ == '__main__'\n"
        "pathlib.Path(sys.argv[1], os.environ['RANK']).write_text(os.environ['WORLD_SIZE'])\n"
    )
    assert distributor.run(str(script), str(tmp_path)) is None
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2", "2"]
    with pytest.raises(InvalidRequestError, match="keyword arguments"):
        distributor.run(str(script), epochs=3)
    with pytest.raises(RuntimeError, match=r"GPUs .*use_gpu=False"):
        hvdlab.spark.TorchDistributor(2, local_mode)
