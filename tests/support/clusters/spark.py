"""A SparkContext whose tasks run on this machine."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def context(slots: int) -> Iterator[Any]:
    """Yield the SparkContext of this process, with so many task slots, until the end of the block: a JVM takes half a
    minute."""
    from pyspark import SparkConf, SparkContext

    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "512m",
        "spark.driver.host": "127.0.0.1",
    }
    context = SparkContext(
        conf=SparkConf().setMaster(f"local[{slots}]").setAppName("hvdlab").setAll(settings.items())
    )
    context.setLogLevel("OFF")
    context.parallelize(range(slots), slots).sum()  # Spark's Python workers stay
    yield context
    context.stop()
