"""Tests on a real Dask cluster of two workers on this machine, in the environment that ``make engines`` makes; elsewhere they are not collected.

The folder is not called ``dask``: it would be found under that name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from support.clusters.dask import running
from support.leaks import nothing_of_ours_left

collect_ignore_glob = [] if importlib.util.find_spec("distributed") else ["test_*.py"]

WORKERS, THREADS = 2, 2
"""The cluster: its workers, and how many threads each has."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """There is one cluster for all tests, and this process has a client of it."""
    with running(WORKERS, THREADS) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def leak_check(cluster: Any) -> Iterator[None]:
    """Replace the check of all tests: Dask's threads and sockets come and go, but no process of ours may stay."""
    with nothing_of_ours_left():
        yield
