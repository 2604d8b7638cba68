"""Tests on a real Dask cluster of two workers on this machine, in the environment that ``make engines`` makes; elsewhere they are not collected.

The folder is not called ``dask``: it would be found under that name.
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

collect_ignore_glob = [] if importlib.util.find_spec("distributed") else ["test_*.py"]

WORKERS, THREADS = 2, 2
"""The cluster: its workers, and how many threads each has."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """There is one cluster for all tests, and this process has a client of it."""
    import distributed

    with (
        distributed.LocalCluster(
            n_workers=WORKERS, threads_per_worker=THREADS, dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster),
    ):
        yield cluster


@pytest.fixture(autouse=True)
def leak_check(cluster: Any) -> Iterator[None]:
    """Instead of the check of all tests: Dask's threads and sockets come and go, but no process of ours may stay."""
    before, memory = {process.pid for process in our_processes()}, shared_memory.entries()
    yield
    _, left = psutil.wait_procs(
        [each for each in our_processes() if each.pid not in before], timeout=PATIENCE
    )
    assert left == []
    assert shared_memory.left(memory) == set()
