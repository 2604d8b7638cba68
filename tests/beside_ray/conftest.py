"""Tests on a real Ray cluster of two nodes on this machine, in the environment that ``make engines`` makes; elsewhere they are not collected.

The folder is not called ``ray``: it would be found under that name.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

import shared_memory
from our_processes import our_processes
from patience import PATIENCE

collect_ignore_glob = [] if importlib.util.find_spec("ray") else ["test_*.py"]

NODES, CPUS, GPUS = 2, 3, 2
"""The cluster: its nodes, and what each claims to have."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Two nodes take half a minute, so there is one cluster for all tests. This process is connected to it."""
    # Ray warns of what its next version will do; an actor without GPUs keeps the variable as it is.
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    cluster = _started()
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def _started() -> Any:
    """Ray gives a node 30 s to start, which no setting changes: on a busy machine it may take a second try."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": CPUS, "num_gpus": GPUS, "object_store_memory": 100 << 20}
    for attempt in range(3):
        cluster = Cluster()
        try:
            cluster.add_node(**node, include_dashboard=False)
            for _ in range(NODES - 1):
                cluster.add_node(**node)
            cluster.wait_for_nodes()
            return cluster
        except Exception:
            cluster.shutdown()
            if attempt == 2:
                raise
    raise AssertionError


@pytest.fixture(autouse=True)
def leak_check(cluster: Any) -> Iterator[None]:
    """Instead of the check of all tests: Ray's processes, threads and sockets come and go, but no coordinator of ours may stay."""
    before, memory = {process.pid for process in our_processes()}, shared_memory.entries()
    yield
    _, left = psutil.wait_procs(
        [each for each in our_processes() if each.pid not in before], timeout=PATIENCE
    )
    assert left == []
    assert shared_memory.left(memory) == set()
