"""``hvdlab.spark``: ranks in the tasks of a Spark job, also as ``horovod.spark``.

It needs pyspark (``pip install hvdlab[spark]``), which is imported when ranks are started.

Example:
    >>> from pyspark import SparkContext
    >>> import hvdlab.spark
    >>> context = SparkContext("local[1]")
    >>> hvdlab.spark.run(lambda: 6 * 7, num_proc=1, verbose=0)
    [42]
    >>> context.stop()
"""

from __future__ import annotations

from hvdlab.spark.elastic import run_elastic
from hvdlab.spark.runner import TorchDistributor, run

__all__ = ["TorchDistributor", "run", "run_elastic"]
