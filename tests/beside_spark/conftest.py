"""Tests on a real Spark of two task slots, in the environment that ``make engines`` makes; elsewhere they are not collected.

The folder is not called ``spark``: it would be found under that name.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

import shared_memory
from our_processes import our_processes
from patience import PATIENCE

collect_ignore_glob = [] if importlib.util.find_spec("pyspark") else ["test_*.py"]


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """The SparkContext: a JVM takes half a minute, so there is one for all tests."""
    from pyspark import SparkConf, SparkContext

    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "512m",
        "spark.driver.host": "127.0.0.1",
    }
    context = SparkContext(
        conf=SparkConf().setMaster("local[2]").setAppName("hvdlab").setAll(settings.items())
    )
    context.setLogLevel("OFF")
    context.parallelize(range(2), 2).sum()  # Spark's Python workers stay
    yield context
    context.stop()


@pytest.fixture(autouse=True)
def leak_check() -> Iterator[None]:
    """Instead of the check of all tests: Spark's own processes, threads and sockets come and go, but none of ours may stay."""
    memory = shared_memory.entries()
    yield
    _, left = psutil.wait_procs(our_processes(), timeout=PATIENCE)
    assert left == []
    assert shared_memory.left(memory) == set()
