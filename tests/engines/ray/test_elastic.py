"""Elastic calls on Ray: ranks come and go with the nodes, and calls that have no room."""

from __future__ import annotations

import os
import queue
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.time_limits import Deadline
from hvdlab.ray import ElasticRayExecutor, RayExecutor
from hvdlab.ray.elastic import RayHostDiscovery
from hvdlab.ray.strategy import create_placement_group
from hvdlab.runner.cli import main
from hvdlab.runner.run_function import RankFailedError
from support.patience import PATIENCE

NODES, CPUS = 2, 3
"""The cluster, and what each of its nodes claims to have."""

# Ray leaves files and sockets to the collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def settings() -> Any:
    return RayExecutor.create_settings(timeout_s=PATIENCE, placement_group_timeout_s=PATIENCE)


def everything_is_free() -> None:
    """All CPUs of the two nodes can be had."""
    group, _ = create_placement_group({"CPU": CPUS}, 2, PATIENCE, "STRICT_SPREAD")
    ray.util.remove_placement_group(group)


def until_sizes(wanted: list[int], given: str) -> tuple[int, list[int], int, str]:
    """Train until the world has had these sizes, in this order."""
    import torch

    import hvdlab.torch as hvd
    from hvdlab.ray.ray_logger import log

    hvd.init()
    state: Any = hvd.elastic.TorchState(sizes=[], step=0)
    entered = 0

    @hvd.elastic.run
    def train(state: Any) -> None:
        nonlocal entered
        entered += 1
        while state.sizes != wanted:
            size = int(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="size")[0])
            if size == wanted[len(state.sizes)]:
                state.sizes = [*state.sizes, size]
                if hvd.rank() == 0:
                    log({"reached": size, "step": state.step})
            state.step += 1
            state.commit()
            time.sleep(0.1)  # as long as a step: a node needs the processors to start

    train(state)
    return hvd.rank(), state.sizes, entered, os.environ["GIVEN"] + given


def test_ranks_come_and_go_with_nodes(cluster: Any) -> None:
    """Two ranks on the two nodes that there are, a third on one that is added, which is then killed."""
    executor = RayExecutor(
        settings(), min_workers=2, cpus_per_worker=CPUS, elastic_timeout=PATIENCE, cooldown_range=(1, 2)
    )
    executor.start(extra_env_vars={"GIVEN": 5})
    reached: queue.Queue[int] = queue.Queue()
    with ThreadPoolExecutor(1) as thread:  # Ray adds nodes on the main thread only
        job = thread.submit(
            executor.run,
            until_sizes,
            ([2, 3, 2], "!"),
            callbacks=[lambda info: reached.put(info["reached"])],
        )
        assert reached.get(timeout=PATIENCE) == 2
        node = cluster.add_node(num_cpus=CPUS, object_store_memory=100 << 20)
        assert reached.get(timeout=PATIENCE) == 3
        cluster.remove_node(node, allow_graceful=False)
        assert reached.get(timeout=PATIENCE) == 2
        found = job.result(PATIENCE)
    executor.shutdown()
    deadline = Deadline(PATIENCE)
    while sum(node["Alive"] for node in ray.nodes()) > NODES:  # which Ray finds out by and by
        deadline.check("the end of the node")
        time.sleep(0.1)
    assert [each[:2] + each[3:] for each in found] == [(rank, [2, 3, 2], "5!") for rank in (0, 1)]
    assert [each[2] for each in found] == [
        3,
        3,
    ]  # they kept their processes: the function was entered again in them
    everything_is_free()


def sleeps_at_first(once: str) -> tuple[list[int], int]:
    """One of the first ranks never comes to ``hvd.init()``; the one that is started in its place trains with the other."""
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL))
        time.sleep(1000)
    except FileExistsError:
        rank, sizes, *_ = until_sizes([1, 2], "!")
    return sizes, rank


def test_the_others_begin_without_a_rank_that_never_comes(
    cluster: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    executor = RayExecutor(
        settings(),
        min_workers=1,
        max_workers=2,
        cpus_per_worker=CPUS,
        elastic_timeout=PATIENCE,
        cooldown_range=(1, 2),
    )
    executor.start(extra_env_vars={"GIVEN": 5, "HVDLAB_START_TIMEOUT": 5})
    found = executor.run(sleeps_at_first, (str(tmp_path / "slept"),))
    executor.shutdown()
    assert sorted(found) == [([1, 2], 0), ([1, 2], 1)]
    assert "did not come to hvd.init() within 5 s; going on without it" in capfd.readouterr().err
    everything_is_free()


def test_an_executable_and_a_rank_that_raises(cluster: Any) -> None:
    executor = ElasticRayExecutor(
        ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=2, reset_limit=0, timeout_s=PATIENCE),
        env_vars={"GIVEN": "x"},
    )
    with pytest.raises(InvalidRequestError, match="start"):
        executor.run(os.getpid)
    executor.start()

    def fails() -> str:
        if os.environ["HVDLAB_RANK"] == "1":
            raise KeyError("no such column")
        import numpy as np

        import hvdlab.numpy as hvd

        hvd.init()
        hvd.allreduce(np.ones(1), name="lonely")
        return os.environ["GIVEN"]

    with pytest.raises(KeyError, match="rank 1 raised KeyError: 'no such column'") as caught:
        executor.run(fails)
    assert isinstance(caught.value, RankFailedError)
    newer = RayExecutor(settings(), min_workers=2, max_workers=2)
    newer.start(str, ("executable",))
    assert newer.execute(lambda made: made + os.environ["HVDLAB_RANK"]) == ["executable0", "executable1"]
    for unsupported in (lambda: newer.run_remote(os.getpid), lambda: newer.execute_single(str)):
        with pytest.raises(NotImplementedError):
            unsupported()
    newer.shutdown()
    everything_is_free()


def test_too_few_nodes_and_hosts_of_the_users(cluster: Any) -> None:
    little = RayExecutor.create_settings(placement_group_timeout_s=1)
    with pytest.raises(
        TimeoutError, match=r"room for 2 workers within 1 s, and min_workers is 3.* of 6 CPUs"
    ):
        RayExecutor(little, min_workers=3, cpus_per_worker=CPUS).start()
    (address,) = RayHostDiscovery().find()
    own = settings()
    own.discovery = lambda: {address: 1}
    executor = RayExecutor(own, min_workers=1, max_workers=1, override_discovery=False)
    executor.start()
    assert executor.run(os.getenv, ("HOROVOD_HOSTNAME",)) == [address]
    executor.shutdown()
    with pytest.warns(DeprecationWarning, match="min_num_proc"):
        assert ElasticRayExecutor.create_settings(min_np=3).min_num_proc == 3
    everything_is_free()


def test_program_without_room_fails_with_the_free_resources(
    cluster: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """`hvdlab run --launcher ray`, in this process."""
    options = ["--launcher-option", "cpus=50", "--launcher-option", "timeout=1"]
    assert main(["run", "--launcher", "ray", "-np", "3", *options, sys.executable, "-c", "pass"]) == 1
    assert "Ray had no room for it within 1 s; free:" in capfd.readouterr().err
    everything_is_free()
