"""Tests on a real Ray cluster of two nodes on this machine, in the environment that ``make engines`` makes; elsewhere they are not collected.

The folder is not called ``ray``: it would be found under that name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from support.clusters.ray import connected
from support.leaks import nothing_of_ours_left

collect_ignore_glob = [] if importlib.util.find_spec("ray") else ["test_*.py"]

NODES, CPUS, GPUS = 2, 3, 2
"""The cluster: its nodes, and what each claims to have."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Two nodes take half a minute, so there is one cluster for all tests. This process is connected to it."""
    with connected(NODES, num_cpus=CPUS, num_gpus=GPUS, object_store_memory=100 << 20) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def leak_check(cluster: Any) -> Iterator[None]:
    """Replace the check of all tests: Ray's processes, threads and sockets come and go, but no coordinator of ours may
    stay."""
    with nothing_of_ours_left():
        yield
