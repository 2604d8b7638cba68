"""hvdlab.ray.RayExecutor on a real Ray of two nodes: values by rank, memory, places, errors, interrupts and jobs
without room."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.ray import BaseHorovodWorker, RayExecutor
from hvdlab.ray.runner import StaticAdapter
from hvdlab.ray.strategy import create_placement_group
from hvdlab.runner.run_function import RankFailedError
from support.patience import PATIENCE

# Ray leaves files and sockets to the collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


class Counter:
    """Executable: joins when it is made, and counts."""

    def __init__(self, start: int, *, step: int) -> None:
        import hvdlab.numpy as hvd

        hvd.init()
        self.rank, self.value, self.step = hvd.rank(), start, step

    def next(self) -> tuple[int, int]:
        self.value += self.step
        return self.rank, self.value


def settings(**more: Any) -> Any:
    return RayExecutor.create_settings(timeout_s=PATIENCE, placement_group_timeout_s=PATIENCE, **more)


@pytest.fixture(scope="module")
def executor(cluster: Any) -> Iterator[RayExecutor]:
    """Yield two ranks on one node, which most tests share: also those in which a rank fails."""
    found = RayExecutor(settings(), num_workers=2)
    found.start(Counter, [10], {"step": 5}, extra_env_vars={"OF_THE_CALL": 7})
    yield found
    found.shutdown()


def everything_is_free(pids: list[int]) -> None:
    """No worker is there any more, and its room can be had by others."""
    living = []
    for pid in pids:
        # Those that have ended already need no wait.
        with contextlib.suppress(psutil.NoSuchProcess):
            living.append(psutil.Process(pid))
    _, left = psutil.wait_procs(living, timeout=PATIENCE)
    assert left == []
    # The shared executor has two CPUs of a node, or one of each.
    group, _ = create_placement_group({"CPU": 1, "GPU": 2}, 2, PATIENCE, "STRICT_SPREAD")
    ray.util.remove_placement_group(group)


def summed(factor: float, *, more: int = 0) -> tuple[int, int, int, float]:
    import torch

    import hvdlab.torch as hvd

    hvd.init()
    total = hvd.allreduce(torch.full((3,), float(hvd.rank() + 1) * factor), op=hvd.Sum, name="x")
    return hvd.rank(), hvd.size(), hvd.local_rank(), float(total[0]) + more


def place() -> tuple[str, str, str, str, int, int]:
    import ray

    import hvdlab.torch as hvd

    hvd.init()
    node = ray.get_runtime_context().get_node_id()
    where = os.environ["HOROVOD_LOCAL_RANK"], os.environ["HOROVOD_CROSS_RANK"]
    return (node, os.environ.get("CUDA_VISIBLE_DEVICES", ""), *where, hvd.local_rank(), hvd.cross_rank())


def test_values_come_by_rank_and_workers_keep_their_memory(executor: RayExecutor) -> None:
    for factor in (1, 10):
        found = executor.run(summed, [factor], {"more": 1})
        assert found == [(0, 2, 0, 3.0 * factor + 1), (1, 2, 1, 3.0 * factor + 1)]
    assert executor.execute(lambda counter: counter.next()) == [(0, 15), (1, 15)]
    assert executor.execute_single(lambda counter: counter.next()) == (0, 20)
    assert executor.execute(lambda counter: counter.next()) == [(0, 25), (1, 20)]
    assert ray.get(executor.run_remote(summed, [2])) == [(0, 2, 0, 6.0), (1, 2, 1, 6.0)]
    variables = executor.run(lambda: (os.environ["OF_THE_CALL"], os.environ.get("HVDLAB_TOKEN"), os.getpid()))
    assert [each[:2] for each in variables] == [("7", None)] * 2
    assert len({each[2] for each in variables} | {os.getpid()}) == 3


def test_what_ranks_log_is_given_to_callbacks(executor: RayExecutor) -> None:
    def train() -> None:
        import numpy as np

        import hvdlab.numpy as hvd
        from hvdlab.ray.ray_logger import log

        hvd.init()
        for step in range(3):
            log({"rank": hvd.rank(), "step": step, "loss": np.float32(0.5)})

    seen: list[Any] = []
    executor.run(train, callbacks=[seen.append])
    assert [each for each in seen if each["rank"] == 1] == [
        {"rank": 1, "step": step, "loss": 0.5} for step in range(3)
    ]
    assert len(seen) == 6


def test_what_a_rank_logs_before_the_call_has_reached_all_is_given_to_callbacks(
    executor: RayExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = executor._started()
    assert isinstance(adapter, StaticAdapter)
    submit = adapter._submit

    def submit_slowly(
        what: Any, call: bytes, workers: Any, function: Any, references: list[Any], **options: Any
    ) -> None:
        submit(what, call, workers, function, references, **options)
        ray.wait(references, num_returns=len(references))
        assert adapter._client is not None
        adapter._client.collect_events()

    def logs() -> None:
        import hvdlab.numpy as hvd
        from hvdlab.ray.ray_logger import log

        hvd.init()
        log({"rank": hvd.rank()})

    monkeypatch.setattr(adapter, "_submit", submit_slowly)
    seen: list[Any] = []
    executor.run(logs, callbacks=[seen.append])
    assert sorted(each["rank"] for each in seen) == [0, 1]


def test_what_a_rank_raises_names_it_while_the_other_waits_and_both_go_on(executor: RayExecutor) -> None:
    def fails_early() -> None:
        import numpy as np

        import hvdlab.numpy as hvd

        if os.environ["HVDLAB_RANK"] == "1":
            raise KeyError("no such column")
        hvd.init()
        hvd.allreduce(np.ones(3), name="lonely")

    pids = executor.run(os.getpid)
    with pytest.raises(KeyError) as caught:
        executor.run(fails_early)
    error = caught.value
    assert isinstance(error, RankFailedError)
    assert error.rank == 1
    assert "rank 1 raised KeyError: 'no such column'" in str(error)
    assert "in fails_early" in error.remote_traceback
    ended = executor.run_remote(fails_early)
    with pytest.raises(KeyError, match="no such column"):
        ray.get(ended[1])
    with pytest.raises(RuntimeError, match="rank 1 failed: KeyError"):
        ray.get(ended[0])
    with pytest.raises(RankFailedError, match="SystemExit"):
        executor.run(sys.exit, [3])
    assert executor.run(os.getpid) == pids
    assert [each[3] for each in executor.run(summed, [1])] == [3.0, 3.0]


def test_a_collective_on_one_rank_alone_fails(executor: RayExecutor) -> None:
    def alone(_: Any) -> None:
        import numpy as np

        import hvdlab.numpy as hvd

        hvd.allreduce(np.ones(3), name="alone")

    with pytest.raises(RankFailedError, match="rank 1"):
        executor.execute_single(alone)


def test_a_rank_that_does_not_notice_is_interrupted(
    executor: RayExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdlab.ray.runner._AFTER_A_FAILURE", 0.1)

    def one_waits() -> None:
        if os.environ["HVDLAB_RANK"] == "0":
            time.sleep(3600)
        raise ValueError("boom")

    with pytest.raises(ValueError, match="rank 1 raised ValueError: boom"):
        executor.run(one_waits)
    assert len(set(executor.run(os.getpid))) == 2


def test_an_interrupt_reaches_the_ranks(executor: RayExecutor) -> None:
    def waits() -> None:
        from hvdlab.ray.ray_logger import log

        log({"pid": os.getpid()})
        time.sleep(3600)

    def interrupt(_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    once = iter([interrupt])
    with pytest.raises(KeyboardInterrupt):
        executor.run(waits, callbacks=[lambda info: next(once, lambda _: None)(info)])
    assert [each[3] for each in executor.run(summed, [1])] == [3.0, 3.0]


def test_an_interrupt_before_the_driver_waits_reaches_the_ranks_too(
    executor: RayExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_once(adapter: Any, references: list[Any]) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hvdlab.ray.runner.StaticAdapter._outcome", at_once)
        with pytest.raises(KeyboardInterrupt):
            executor.run(lambda: time.sleep(3600))
    assert [each[3] for each in executor.run(summed, [1])] == [3.0, 3.0]


def test_what_can_not_be_sent_is_refused(executor: RayExecutor) -> None:
    lock = threading.Lock()
    with pytest.raises(InvalidRequestError, match="can't be pickled"):
        executor.run(lambda: lock.locked())
    with pytest.raises(RankFailedError, match="can't be pickled"):
        executor.run(lambda: sys._getframe())
    with pytest.raises(InvalidRequestError, match="started already"):
        executor.start()


def test_nodes_gpus_and_a_killed_rank(cluster: Any) -> None:
    executor = RayExecutor(settings(), num_hosts=2, num_workers_per_host=1, use_gpu=True)
    executor.start()
    found = executor.run(place)
    assert len({each[0] for each in found}) == 2
    assert [each[2:] for each in found] == [("0", "0", 0, 0), ("0", "1", 0, 1)]
    assert all(each[1] in ("0", "1") for each in found)
    assert [each[3] for each in executor.run(summed, [1])] == [3.0, 3.0]

    def killed() -> None:
        import hvdlab.numpy as hvd

        hvd.init()
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.barrier()

    pids = executor.run(os.getpid)
    with pytest.raises(RankFailedError, match="rank 1 ended") as caught:
        executor.run(killed)
    assert caught.value.rank == 1
    assert executor.execute_single(lambda _: os.getpid()) == pids[0]
    with pytest.raises(RankFailedError, match="rank 1"):
        executor.run(os.getpid)
    executor.shutdown()
    executor.shutdown()
    assert not hasattr(executor, "adapter")
    with pytest.raises(InvalidRequestError, match=r"call start\(\) first"):
        executor.run(os.getpid)
    everything_is_free(pids)


def test_ranks_of_a_node_see_the_same_gpus_and_a_class_that_raises_leaves_nothing(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a driver that shares no memory with the nodes: ranks connect over TLS."""
    monkeypatch.setenv("HVDLAB_HOST", "the driver's")
    executor = RayExecutor(
        settings(nics="lo"), num_workers=2, cpus_per_worker=1, use_gpu=True, gpus_per_worker=1
    )
    executor.start()
    assert {each[:4] for each in executor.run(lambda: os.environ["HVDLAB_COORDINATOR"])} == {"tls:"}
    assert [each[3] for each in executor.run(summed, [1])] == [3.0, 3.0]
    found = executor.run(place)
    pids = executor.run(os.getpid)
    executor.shutdown()
    by_node: dict[str, list[tuple[Any, ...]]] = {}
    for each in found:
        by_node.setdefault(each[0], []).append(each)
    for ranks in by_node.values():
        assert len({each[1] for each in ranks}) == 1
        assert len(ranks[0][1].split(",")) == len(ranks)
        assert [each[4] for each in ranks] == list(range(len(ranks)))
    everything_is_free(pids)

    class Breaks:
        def __init__(self) -> None:
            raise LookupError(os.getpid())

    with pytest.raises(LookupError) as caught:
        executor.start(Breaks)
    assert isinstance(caught.value, RankFailedError)
    assert caught.value.__cause__ is not None
    everything_is_free([caught.value.__cause__.args[0]])


def test_what_has_no_room_says_what_was_asked_and_what_is_free(cluster: Any) -> None:
    little = RayExecutor.create_settings(placement_group_timeout_s=1)
    too_much: list[dict[str, Any]] = [
        {"num_workers": 9},
        {"num_hosts": 5},
        {"num_workers": 2, "cpus_per_worker": 50},
    ]
    for wanted in too_much:
        executor = RayExecutor(little, **wanted)
        with pytest.raises(TimeoutError, match=r"Requested resources: {'CPU': .*of 6 CPUs, .* on 2 nodes"):
            executor.start()
        assert not hasattr(executor, "adapter")
    everything_is_free([])


def test_arguments() -> None:
    refused: list[dict[str, Any]] = [
        {"max_workers": 3},
        {"num_workers": 2, "min_workers": 1},
        {"num_workers": 2, "gpus_per_worker": 1},
        {"num_workers": 2, "use_gpu": True, "gpus_per_worker": -1},
        {"min_workers": 0},
        {"min_workers": 3, "max_workers": 2},
    ]
    for wrong in refused:
        with pytest.raises(ValueError):  # noqa: PT011
            RayExecutor(settings(), **wrong)
    both_and_none: list[dict[str, Any]] = [{"num_workers": 2, "num_hosts": 2}, {}]
    for neither in both_and_none:
        with pytest.raises(AssertionError, match="num_workers or num_hosts"):
            RayExecutor(settings(), **neither).start()


def test_settings_and_names(tmp_path: Path) -> None:
    key = tmp_path / "key"
    made = RayExecutor.create_settings(5, str(key), "secret", 7, {"lo"})
    assert (made.start_timeout, made.placement_group_timeout_s, made.nics) == (5, 7, {"lo"})
    assert (key.read_text(), key.stat().st_mode & 0o777) == ("secret", 0o600)
    RayExecutor.create_settings(5, str(key), "other")
    assert key.read_text() == "secret"
    assert (RayExecutor.create_settings().timeout_s, made.key != RayExecutor.create_settings().key) == (
        30,
        True,
    )
    worker = BaseHorovodWorker(1, 2)
    assert worker.hostname() == os.uname().nodename
    code = (
        "import hvdlab.horovod; hvdlab.horovod.install_as_horovod(force=True)\n"
        "import horovod.ray, horovod.ray.runner, horovod.ray.strategy, horovod.ray.worker, hvdlab.ray, sys\n"
        "assert horovod.ray is hvdlab.ray\n"
        "assert 'ray' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
