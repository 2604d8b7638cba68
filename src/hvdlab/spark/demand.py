"""Executors for ranks under dynamic allocation: Spark asks for them only while tasks wait.

hvdlab starts a rank where it sees a free task slot, and Spark adds a slot when it sees a task that has none. So tasks that do nothing wait in the
place of the ranks that are lacking: once an executor comes they have run, and a rank gets the slot.
"""

from __future__ import annotations

import signal
import threading
import uuid
from collections.abc import Callable
from typing import Any


def is_dynamic(context: Any) -> bool:
    """Return whether Spark adds and removes executors of this SparkContext by itself."""
    local = context.master == "local" or context.master.startswith("local[")
    return (
        not local and str(context.getConf().get("spark.dynamicAllocation.enabled", "false")).lower() == "true"
    )


class Demand:
    """Tasks that wait for slots; without dynamic allocation there are none. Not for several threads at a time.

    Args:
        context: The SparkContext.
    """

    def __init__(self, context: Any) -> None:
        self._context, self._dynamic = context, is_dynamic(context)
        #: The Spark job group of the tasks, and the thread that runs their job.
        self._group = f"hvdlab.spark.demand.{uuid.uuid4().hex[:8]}"
        self._thread: threading.Thread | None = None

    def ask(self, lacking: int, *, hold: bool = False) -> None:
        """Have so many tasks wait for slots, unless some wait already.

        Args:
            lacking: How many slots are lacking.
            hold: Whether tasks keep their slots until :meth:`close`. Otherwise they have none to wait for while one is free.
        """
        if not self._dynamic or lacking < 1 or (self._thread is not None and self._thread.is_alive()):
            return
        from pyspark import InheritableThread  # pyright: ignore[reportMissingImports]

        thread: threading.Thread = InheritableThread(
            target=self._wait, args=(lacking, _hold if hold else _nothing), name=self._group
        )
        thread.daemon = True
        thread.start()
        self._thread = thread

    def close(self, timeout: float) -> None:
        """Cancel tasks that wait. Idempotent.

        Args:
            timeout: Seconds that Spark has for it.
        """
        if self._thread is not None:
            # Also if they were not submitted yet.
            self._context._jsc.sc().cancelJobGroupAndFutureJobs(self._group)
            self._thread.join(timeout)

    def _wait(self, lacking: int, task: Callable[[object], None]) -> None:
        from py4j.protocol import Py4JError  # pyright: ignore[reportMissingImports]

        try:
            self._context.setJobGroup(self._group, "hvdlab: waits for executors", interruptOnCancel=True)
            self._context.parallelize(range(lacking), lacking).foreach(task)
        except Py4JError:
            pass  # cancelled, or their executor was lost: it is asked again if slots are still lacking


def _nothing(_: object) -> None:
    """Return at once, as the work of a task that waited for a slot."""


def _hold(_: object) -> None:
    """Keep the slot: Spark ends the task's process when the job is cancelled."""
    signal.pause()
