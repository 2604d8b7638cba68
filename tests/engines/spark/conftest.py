"""Tests on a real Spark of two task slots, in the environment that ``make engines`` makes; elsewhere they are not collected.

The folder is not called ``spark``: it would be found under that name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from support.clusters.spark import context
from support.leaks import nothing_of_ours_left

collect_ignore_glob = [] if importlib.util.find_spec("pyspark") else ["test_*.py"]


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """Yield the SparkContext, of which a process has one: there is one for all tests."""
    with context(slots=2) as made:
        yield made


@pytest.fixture(autouse=True)
def leak_check() -> Iterator[None]:
    """Replace the check of all tests: Spark's own processes, threads and sockets come and go, but none of ours may
    stay."""
    with nothing_of_ours_left():
        yield
