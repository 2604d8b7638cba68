"""A driver of the tests, on a standalone cluster: ``python on_executors.py CASE DIRECTORY SECONDS``. Prints its
findings as JSON.

``SECONDS`` are the limit of each start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import hvdlab.spark

DYNAMIC = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.maxExecutors": "2",
    "spark.dynamicAllocation.executorIdleTimeout": "2s",
    "spark.executor.cores": "1",
}
"""Spark adds executors for tasks that wait, and takes them away 2 s after their last one."""


def kill_the_executor() -> None:
    """Kill the executor that runs this rank's task, as if its host had failed."""
    import psutil

    for parent in psutil.Process().parents():
        if any("CoarseGrainedExecutorBackend" in word for word in parent.cmdline()):
            parent.send_signal(signal.SIGKILL)
            return
    raise AssertionError([parent.cmdline() for parent in psutil.Process().parents()])


def where() -> tuple[float, str, int, int]:
    """Return the sum over the ranks, and where this one is: in which worker's directory, and beside how many."""
    import numpy as np

    import hvdlab.numpy as hvd

    hvd.init()
    total = float(hvd.allreduce(np.full(1, 1.0 + hvd.rank()), op=hvd.Sum)[0])
    return total, Path.cwd().parts[-3], hvd.local_rank(), hvd.local_size()


def lose(directory: str) -> None:
    """Rank 1 takes its executor along."""
    import hvdlab.numpy as hvd

    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        kill_the_executor()
        signal.pause()
    hvd.barrier()


def train(directory: str) -> tuple[list[int], int, int]:
    """Train on while the executor of rank 1 is lost and another one takes its place. Returns sizes, entries and the process."""
    import time

    import numpy as np

    import hvdlab.numpy as hvd
    from hvdlab.collectives.elastic import ObjectState, run_fn

    lost = Path(directory, "lost")
    hvd.init()
    state: Any = ObjectState(hvd.broadcast_object, hvd.rank, sizes=[], step=0)
    entered = 0

    def steps(state: Any) -> None:
        nonlocal entered
        entered += 1
        while state.sizes != [2, 1, 2]:
            size = int(hvd.allreduce(np.ones(1), op=hvd.Sum, name="size")[0])
            if size == [2, 1, 2][len(state.sizes)]:
                state.sizes = [*state.sizes, size]
            state.step += 1
            state.commit()
            if hvd.rank() == 1 and not lost.exists():
                lost.touch()
                kill_the_executor()
                signal.pause()
            time.sleep(0.05)  # as long as a step: the new executor needs the processors to start

    run_fn(steps, lambda: None)(state)
    return state.sizes, entered, os.getpid()


def grow(directory: str) -> list[int]:
    """Train until Spark has added an executor, for a second rank. Returns the sizes that the world had."""
    import time

    import numpy as np

    import hvdlab.numpy as hvd
    from hvdlab.collectives.elastic import ObjectState, run_fn

    hvd.init()
    state: Any = ObjectState(hvd.broadcast_object, hvd.rank, sizes=[])

    def steps(state: Any) -> None:
        while state.sizes != [1, 2]:
            size = int(hvd.allreduce(np.ones(1), op=hvd.Sum, name="size")[0])
            if size not in state.sizes:
                state.sizes = [*state.sizes, size]
            state.commit()
            time.sleep(0.05)  # as long as a step: the new executor needs the processors to start

    run_fn(steps, lambda: None)(state)
    return list(state.sizes)


def executors(context: Any) -> int:
    """Return how many executors there are beside the driver."""
    return int(context._jsc.sc().getExecutorMemoryStatus().size()) - 1


def raised(directory: str, limit: float) -> Exception | None:
    """Return the error of a run whose rank 1 takes its executor along."""
    try:
        hvdlab.spark.run(lose, args=(directory,), num_proc=2, start_timeout=limit)
    except Exception as error:  # noqa: BLE001  # the test examines any error
        return error
    return None


def on_a_fixed_number(context: Any, directory: str, limit: float) -> dict[str, Any]:
    """Run ranks on two executors; lose one in a run, and one in a run of elastic ranks. The cluster replaces each."""
    found: dict[str, Any] = {"run": hvdlab.spark.run(where, num_proc=2, start_timeout=limit)}
    lost = raised(directory, limit)
    found["lost"] = lost and "\n".join([str(lost), *getattr(lost, "__notes__", [])])
    found["run after"] = hvdlab.spark.run(where, num_proc=2, start_timeout=limit)
    limits: dict[str, Any] = {"start_timeout": limit, "elastic_timeout": limit}
    found["elastic"] = hvdlab.spark.run_elastic(
        train, args=(directory,), num_proc=2, min_num_proc=1, **limits
    )
    return found


def on_a_varying_number(context: Any, directory: str, limit: float) -> dict[str, Any]:
    """Run ranks on executors that Spark adds for them, of which one is lost; Spark takes all away again, and adds them for the next ranks."""
    import time

    limits: dict[str, Any] = {"start_timeout": limit, "elastic_timeout": limit}
    found: dict[str, Any] = {}
    try:
        hvdlab.spark.run(where, num_proc=2, start_timeout=limit)
    except Exception as error:  # noqa: BLE001  # as above
        found["refused"] = [type(error).__name__, str(error)]
    counts = [executors(context)]
    found["grown"] = hvdlab.spark.run_elastic(
        grow, args=(directory,), num_proc=1, min_num_proc=1, max_num_proc=2, **limits
    )
    counts.append(executors(context))
    until = time.monotonic() + limit
    while executors(context) and time.monotonic() < until:
        time.sleep(0.1)  # Spark gives no notice
    found["executors"] = [*counts, executors(context)]
    found["elastic"] = hvdlab.spark.run_elastic(
        train, args=(directory,), num_proc=2, min_num_proc=1, **limits
    )
    return found


CASES = {"fixed": ({}, on_a_fixed_number), "dynamic": (DYNAMIC, on_a_varying_number)}
"""Settings of Spark by case, and its runs, which share a context: a driver and its executors take half a minute to start."""


def main(case: str, directory: str, seconds: str) -> None:
    """Run one case."""
    from pyspark import SparkConf, SparkContext

    of_the_case, runs = CASES[case]
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.executor.memory": "512m",
        **of_the_case,
    }
    conf = SparkConf().setMaster(os.environ["SPARK_MASTER"]).setAppName("hvdlab").setAll(settings.items())
    context = SparkContext(conf=conf)
    context.setLogLevel("OFF")
    try:
        found = runs(context, directory, float(seconds))
    finally:
        context.stop()
    print("found", json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
