"""``hvdlab.spark.run_elastic``: a function on ranks that come and go with the task slots that Spark has."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any, TextIO, TypeVar

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.launch.command import default_python
from hvdlab.runner.job import JobRun
from hvdlab.runner.job_spec import JobSpec, patience
from hvdlab.runner.output import ConsoleSink, Writer
from hvdlab.runner.run_function import pickled, results
from hvdlab.spark.launcher import SparkLauncher
from hvdlab.spark.runner import active_context, chosen_timeout, wait_for_slots

T = TypeVar("T")

_ELASTIC_TIMEOUT = 600.0
"""Seconds that a job waits for slots or a newcomer, unless the user sets another limit."""
_RESETS = 10
"""How many lost ranks are started anew, where the user says nothing."""
_COOLDOWN = (1.0, 60.0)
"""Seconds that a slot is put aside after its rank failed. A slot is no host: Spark itself excludes executors that fail."""


def run_elastic(
    fn: Callable[..., T],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Collection[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[T]:
    """Call ``fn(*args, **kwargs)`` on ranks in Spark's tasks that come and go; it uses ``hvd.elastic.run``.

    Each rank is a Spark job of one task, so that the loss of one ends no other. Lost ranks are restarted, and more ranks are started,
    up to ``max_num_proc``, when Spark has more task slots, such as by dynamic allocation.

    Args:
        fn: Called on each rank. It may come from a notebook or a closure.
        args, kwargs: Its arguments; they and its result must be picklable.
        num_proc: With how many ranks it begins; by default ``spark.default.parallelism``.
        min_num_proc, max_num_proc: With how many ranks it goes on, and how many there are at most; by default ``num_proc``.
        start_timeout: Seconds within which Spark must have slots for ``min_num_proc`` ranks, and ranks must have come to ``hvd.init()`` once
            one has; by default ``HOROVOD_SPARK_START_TIMEOUT``, or 600. One that has not come is given up, and the others begin without it.
            ``HVDLAB_START_TIMEOUT`` in ``env`` sets the latter apart.
        elastic_timeout: Seconds that it waits for slots while there are fewer than ``min_num_proc`` ranks, and that a rank that is started
            later has to come to ``hvd.init()``; by default
            ``HOROVOD_ELASTIC_TIMEOUT``, or 600.
        reset_limit: How many lost ranks are restarted; by default 10.
        env: Variables for the ranks, beside those of Spark's executors. The driver's are not passed on.
        stdout, stderr: Streams on the driver that get the output of each rank when it has ended; without either it goes to the
            executors' logs.
        verbose: With 0, lost and new ranks are not reported.
        nics: Network interfaces of the driver, of which one must be reached by the executors.
        prefix_output_with_timestamp: Put the time at which output is written in front of each line.
        min_np, max_np: Older names of ``min_num_proc`` and ``max_num_proc``.

    Returns:
        The results of ``fn``, by rank, of the ranks that existed at the end.

    Raises:
        StartError: pyspark is missing, no SparkContext is active, or Spark has too few slots.
        RankFailedError: The job failed; it names the rank that failed first, and is also an instance of the class of its exception.
        InvalidRequestError: The arguments make no sense, or the function can't be pickled.
        KeyboardInterrupt: The call was interrupted; the ranks have ended.
    """
    for old, new, value in (("min_np", "min_num_proc", min_np), ("max_np", "max_num_proc", max_np)):
        if value is not None:
            warnings.warn(f"{old} is called {new} now", DeprecationWarning, stacklevel=2)
    context = active_context()
    size = int(context.defaultParallelism if num_proc is None else num_proc)
    least = next((value for value in (min_num_proc, min_np) if value is not None), size)
    most = next((value for value in (max_num_proc, max_np) if value is not None), size)
    if not 1 <= least <= size <= most:
        raise InvalidRequestError(
            f"min_num_proc={least}, num_proc={size}, max_num_proc={most}: there is one rank at least, and none of the numbers is below "
            "the one before it."
        )
    timeout, environment = chosen_timeout(start_timeout), dict(env or {})
    wait_for_slots(context, least, time.monotonic() + timeout, timeout)
    launcher = SparkLauncher(captured=stdout is not None or stderr is not None, most=most)
    job = JobSpec(
        (default_python(),),
        size,
        (),
        source=launcher.source(),
        source_name="Spark",
        max_ranks=most,
        cooldown=_COOLDOWN,
        elastic_timeout=float(
            elastic_timeout or os.environ.get("HOROVOD_ELASTIC_TIMEOUT") or _ELASTIC_TIMEOUT
        ),
        function=pickled(fn, args, dict(kwargs or {})),
        environment=environment,
        interfaces=(nics,) if isinstance(nics, str) else tuple(sorted(nics or ())),
        launcher=launcher,
        start_timeout=timeout,
        join_timeout=patience(environment, timeout),
        min_ranks=least,
        reset_limit=_RESETS if reset_limit is None else reset_limit,
    )
    err = Writer(stderr or sys.stderr)
    sink = ConsoleSink(Writer(stdout or sys.stdout), err, timestamp=prefix_output_with_timestamp)
    try:
        done = JobRun(job, sink, err if verbose else None).run()
    finally:
        launcher.close()
    if done.stopped:
        raise KeyboardInterrupt
    return results(done, max(done.outcomes, default=-1) + 1)
