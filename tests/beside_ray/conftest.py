"""Tests on a real Ray cluster of two nodes on this machine, in the environment that ``make engines`` makes; elsewhere they are not collected.

The folder is not called ``ray``: it would be found under that name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

import shared_memory
from our_processes import our_processes
from patience import PATIENCE
from ray_cluster import started

collect_ignore_glob = [] if importlib.util.find_spec("ray") else ["test_*.py"]

NODES, CPUS, GPUS = 2, 3, 2
"""The cluster: its nodes, and what each claims to have."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Two nodes take half a minute, so there is one cluster for all tests. This process is connected to it."""
    import ray

    cluster = started(NODES, num_cpus=CPUS, num_gpus=GPUS, object_store_memory=100 << 20)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


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
