"""``hvdlab.spark.run``: a function on ranks in the tasks of one barrier stage, which Spark starts all together or not at all.

:class:`TorchDistributor` has the signature of pyspark's, on ranks of hvdlab.

Under dynamic allocation, Spark asks for executors only while tasks wait (:class:`ExecutorRequest`): hvdlab starts a rank where it sees a free task slot,
and Spark adds a slot when it sees a task that has none. So tasks that do nothing wait in the place of the missing ranks: once an
executor comes they have run, and a rank gets the slot.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import runpy
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, TextIO, TypeVar

from hvdlab.collectives import system
from hvdlab.collectives.client import Client, Membership
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.settings import WorldEnvironment
from hvdlab.runner.function_worker import FunctionRaised
from hvdlab.runner.output import ConsoleSink, Writer
from hvdlab.runner.run_function import RankFailedError, pickled, results
from hvdlab.runner.run_function import run as run_here
from hvdlab.runner.supervisor import JobResult, origin_of
from hvdlab.spark.task import RankEnd, RankTask


def is_dynamic(context: Any) -> bool:
    """Return whether Spark adds and removes executors of this SparkContext by itself."""
    local = context.master == "local" or context.master.startswith("local[")
    return (
        not local and str(context.getConf().get("spark.dynamicAllocation.enabled", "false")).lower() == "true"
    )


class ExecutorRequest:
    """Request for executors, by tasks that wait for slots; without dynamic allocation there are none. Not for several threads at a time.

    Args:
        context: The SparkContext.
    """

    def __init__(self, context: Any) -> None:
        self._context, self._dynamic = context, is_dynamic(context)
        #: The Spark job group of the tasks, and the thread that runs their job.
        self._group = f"hvdlab.spark.runner.{uuid.uuid4().hex[:8]}"
        self._thread: threading.Thread | None = None

    def submit(self, missing: int, *, hold: bool = False) -> None:
        """Have so many tasks wait for slots, unless some wait already.

        Args:
            missing: How many slots are missing.
            hold: Whether tasks keep their slots until :meth:`close`. Otherwise they have none to wait for while one is free.
        """
        if not self._dynamic or missing < 1 or (self._thread is not None and self._thread.is_alive()):
            return
        from pyspark import InheritableThread  # pyright: ignore[reportMissingImports]

        thread: threading.Thread = InheritableThread(
            target=self._wait, args=(missing, _occupy_slot if hold else _nothing), name=self._group
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

    def _wait(self, missing: int, task: Callable[[object], None]) -> None:
        from py4j.protocol import Py4JError  # pyright: ignore[reportMissingImports]

        try:
            self._context.setJobGroup(self._group, "hvdlab: waits for executors", interruptOnCancel=True)
            self._context.parallelize(range(missing), missing).foreach(task)
        except Py4JError:
            pass  # cancelled, or their executor was lost: it is asked again if slots are still missing


def _nothing(_: object) -> None:
    """Return at once, as the work of a task that waited for a slot."""


def _occupy_slot(_: object) -> None:
    """Keep the slot: Spark ends the task's process when the job is cancelled."""
    signal.pause()


T = TypeVar("T")

START_TIMEOUT = 600
"""Seconds that Spark has to start the tasks, unless the call or ``HOROVOD_SPARK_START_TIMEOUT`` says otherwise."""
_LOOKS = 0.2
"""Seconds between two looks at Spark's status, of whose changes Spark sends no notice."""
_AFTER_A_FAILURE = 15.0
"""Seconds that the other ranks have to end once one has failed."""
_CLOSING = 5.0
"""Seconds that the coordinator, and a job that was cancelled, have to end."""

_jobs = itertools.count()


def run(
    fn: Callable[..., T],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Collection[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
) -> list[T]:
    """Call ``fn(*args, **kwargs)`` on ranks in Spark's tasks and return its results, by rank.

    The tasks are one barrier stage: all run at the same time. Each starts its rank as a separate process. Tasks of a host
    get consecutive ranks; the host of task 0 comes first.

    Args:
        fn: Called on each rank; joins the others by ``hvd.init()``. It may come from a notebook or a closure.
        args, kwargs: Its arguments; they and its result must be picklable.
        num_proc: Number of ranks; by default ``spark.default.parallelism``.
        start_timeout: Seconds within which all tasks must run; by default ``HOROVOD_SPARK_START_TIMEOUT``, or 600.
        use_gloo: Horovod's; it changes nothing.
        use_mpi: True is refused: Spark's tasks are not started by MPI.
        extra_mpi_args: Refused as well.
        env: Variables for the ranks, beside those of Spark's executors. The driver's are not passed on.
        stdout, stderr: Streams on the driver that get the ranks' output, with ranks in front, when the ranks have ended: the
            last 4 MiB of each. Without either, output goes line by line to the executors' logs, which with ``local[n]`` is
            this process's standard error.
        verbose: 2 also prints where the coordinator is and when tasks run.
        nics: Network interfaces of the driver, of which one must be reached by the executors.
        prefix_output_with_timestamp: Put the time at which output is written in front of each line.
        executable: Python interpreter of the ranks; by default the executors'.

    Raises:
        StartError: pyspark is missing, no SparkContext is active, its executors are allocated dynamically, or Spark did not start all
            tasks in time, or has too few slots for them.
        RankFailedError: A rank failed; also an instance of the class of its function's exception, with the rank and its traceback.
        InvalidRequestError: The arguments make no sense, or the function can't be pickled.
        RuntimeError: Spark's job failed, such as with an executor that was lost. A note of the error has Spark's message.
        KeyboardInterrupt: The call was interrupted; the job was cancelled.
    """
    if use_mpi or extra_mpi_args:
        raise InvalidRequestError(
            "use_mpi= and extra_mpi_args= ask for MPI, and Spark's tasks start without it; leave them out."
        )
    captured = stdout is not None or stderr is not None
    context = active_context()
    task = RankTask(
        pickled(fn, args, dict(kwargs or {})), dict(env or {}), executable or "", captured=captured
    )
    job = run_tasks(context, task, num_proc, start_timeout, nics, verbose)
    if captured:
        out, err = Writer(stdout or sys.stdout), Writer(stderr or sys.stderr)
        sink = ConsoleSink(out, err, timestamp=prefix_output_with_timestamp)
        for end in job.ends:
            for stream, data in end.output:
                sink.write(end.rank, stream, data)
            sink.ended(end.rank)
    return results(job.done(), len(job.ends))


def run_tasks(
    context: Any,
    task: RankTask,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    nics: Collection[str] | str | None = None,
    verbose: int = 1,
) -> SparkJob:
    """Run a task on each of so many ranks; the arguments and errors are those of :func:`run`.

    Returns:
        The job, which has ended; ranks may have failed.
    """
    size = context.defaultParallelism if num_proc is None else num_proc
    if size < 1:
        raise InvalidRequestError(f"num_proc={size}: there must be at least one rank.")
    if is_dynamic(context):
        raise StartError(
            "Spark can't start all ranks together, as barrier stages do, while it adds and removes executors by itself: set "
            "spark.dynamicAllocation.enabled to false for this application, or use hvdlab.spark.run_elastic, whose ranks come and go with "
            "the executors."
        )
    timeout = chosen_timeout(start_timeout)
    deadline = time.monotonic() + timeout
    # Before the job: Spark fails a barrier stage that needs more slots than there are, with an error of its
    # own.
    wait_for_slots(context, size, deadline, timeout)
    job = SparkJob(context, size, deadline, timeout)
    say = _speaker(verbose)
    with contextlib.ExitStack() as cleanup:
        address = _driver_address(context, nics)
        environ = {**os.environ, **task.environment}
        coordinator = CoordinatorProcess.start(size=size, tcp_host=address, environ=environ)
        cleanup.callback(coordinator.close, _CLOSING)
        client = cleanup.enter_context(Client.connect(coordinator.address, coordinator.client_token))
        client.on_membership(job.on_membership)
        where = (coordinator.tls_address if address else None) or coordinator.address
        say(f"coordinator {where}; {size} ranks")
        world = WorldEnvironment(where, coordinator.token, coordinator.certificate if address else None)
        job.run(replace(task, world=world, client_token=coordinator.client_token), say)
    return job


class SparkJob:
    """One job of Spark, run on a separate thread so that this thread can watch it.

    Args:
        context: The SparkContext.
        size: Number of ranks.
        deadline: When all tasks must run, by the monotonic clock.
        timeout: The seconds that were given, for messages.

    Attributes:
        ends: The tasks' results, by rank.
    """

    def __init__(self, context: Any, size: int, deadline: float, timeout: float) -> None:
        self._context, self._size, self._deadline, self._timeout = context, size, deadline, timeout
        self._group = f"horovod.spark.run.{next(_jobs)}"
        #: Set when the job has ended, and when a rank has failed.
        self._ended_or_failed = threading.Event()
        self._ended = threading.Event()
        self.ends: list[RankEnd] = []
        #: Why Spark's job failed; ``None`` if it did not.
        self._error: Exception | None = None
        #: Ranks that failed, in the order in which the coordinator learnt it, with the reasons.
        self._failed: dict[int, str] = {}

    def on_membership(self, membership: Membership) -> None:
        """Record which ranks have failed, as the coordinator reports. On its client's thread."""
        for death in membership.deaths:
            self._failed.setdefault(death.rank, death.reason)
        if self._failed:
            self._ended_or_failed.set()

    def run(self, task: RankTask, say: Callable[[str], None]) -> None:
        """Run the job and keep the tasks' results. Cancels the job however this method ends."""
        from pyspark import InheritableThread  # pyright: ignore[reportMissingImports]

        # The job group belongs to the JVM's thread that pyspark pins to this one; InheritableThread ends
        # that thread as well.
        thread = InheritableThread(target=self._submit, args=(task,), name=self._group)
        thread.daemon = True
        thread.start()
        try:
            self._wait_until_started()
            say("all tasks run")
            self._ended_or_failed.wait()
            if not self._ended.wait(_AFTER_A_FAILURE if self._failed else None):
                (rank, reason), *_ = self._failed.items()
                error = RankFailedError(f"rank {rank} failed: {reason}")
                error.rank = rank
                raise error
        finally:
            if not self._ended.is_set():
                self._context.cancelJobGroup(self._group)
                self._ended.wait(_CLOSING)
        if self._error is not None:
            raise self._job_error() from self._error

    def _submit(self, task: RankTask) -> None:
        try:
            self._context.setJobGroup(self._group, "Horovod Spark Run", interruptOnCancel=True)
            tasks = self._context.parallelize(range(self._size), self._size).barrier().mapPartitions(task)
            self.ends = sorted(tasks.collect(), key=lambda end: end.rank)
        except Exception as error:  # noqa: BLE001  # the caller raises it
            self._error = error
        finally:
            self._ended.set()
            self._ended_or_failed.set()

    def _wait_until_started(self) -> None:
        while not self._ended_or_failed.wait(_LOOKS):
            # Completed tasks count, too: those of short ranks may end between two rounds.
            running = sum(stage.numActiveTasks + stage.numCompletedTasks for stage in self._stages())
            if running >= self._size:
                return
            if time.monotonic() > self._deadline:
                raise StartError(_timeout_text(f"{running} of {self._size} run", self._timeout))

    def _stages(self) -> Iterator[Any]:
        status = self._context.statusTracker()
        for number in status.getJobIdsForGroup(self._group):
            job = status.getJobInfo(number)
            for stage in job.stageIds if job else ():
                info = status.getStageInfo(stage)
                if info is not None:
                    yield info

    def _job_error(self) -> Exception:
        assert self._error is not None
        error: Exception
        if self._failed:
            (rank, reason), *_ = self._failed.items()
            error = RankFailedError(f"rank {rank} failed: {reason}")
            error.rank = rank
        else:
            error = RuntimeError("Spark job has failed, see the error above.")  # in Horovod's words
        error.add_note(f"Spark says: {spark_error_text(self._error)}")
        return error

    def done(self) -> JobResult:
        """Return the job's end as ``hvdlab.run`` has it."""
        bad = [end.rank for end in self.ends if not end.outcome.ok]
        first = next((rank for rank in self._failed if rank in bad), bad[0] if bad else None)
        done = JobResult()
        done.outcomes = {end.rank: end.outcome for end in self.ends}
        done.results = {end.rank: end.result for end in self.ends}
        if first is not None:
            # The coordinator hears of a rank's end before that of the rank which that one waited for.
            first = origin_of(first, {end.rank: _blamed(end) for end in self.ends if not end.outcome.ok})
            done.failed, done.code = first, done.outcomes[first].exit_code
        return done


def _blamed(end: RankEnd) -> tuple[int, ...]:
    """Return the ranks that caused the exception of a rank's function."""
    # Safe to unpickle: our own ranks sent it through Spark, which runs the same user's code.
    found = pickle.loads(end.result) if end.result else None  # noqa: S301
    return found.culprits if isinstance(found, FunctionRaised) else ()


def chosen_timeout(start_timeout: float | None) -> float:
    """Return the seconds that Spark has to start the tasks."""
    return float(start_timeout or os.environ.get("HOROVOD_SPARK_START_TIMEOUT") or START_TIMEOUT)


def wait_for_slots(context: Any, size: int, deadline: float, timeout: float) -> None:
    """Wait until Spark has room for so many tasks at once.

    Args:
        context: The SparkContext.
        size: Number of tasks.
        deadline: Until when, by the monotonic clock.
        timeout: The seconds that were given, for the message.

    Raises:
        StartError: Spark has no room in time, or never can have.
    """
    executor_request = ExecutorRequest(context)
    try:
        while (there := slots(context)) < size:
            left = deadline - time.monotonic()
            if is_local(context) or left <= 0:
                raise StartError(_timeout_text(f"it has {there} task slots for {size} ranks", timeout))
            executor_request.submit(size, hold=True)
            threading.Event().wait(min(left, _LOOKS))  # Spark reports new executors only when asked
    finally:
        executor_request.close(_CLOSING)


def slots(context: Any) -> int:
    """Return how many tasks of one processor Spark can run at once, free or not."""
    scala = context._jsc.sc()
    return int(scala.maxNumConcurrentTasks(scala.resourceProfileManager().defaultResourceProfile()))


def spark_error_text(error: Exception) -> str:
    """Return Spark's text on a job that failed, without py4j's before it and the traces behind it."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line.removeprefix(": ") for line in lines if line.startswith(": ")), lines[0])


def active_context() -> Any:
    """Return the SparkContext of this process. Raises ``StartError`` without one."""
    try:
        from pyspark import SparkContext  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise StartError(f"hvdlab.spark needs pyspark ({error}): pip install 'hvdlab[spark]'") from error
    context = SparkContext._active_spark_context
    if context is None:
        if "SPARK_CONNECT_MODE_ENABLED" in os.environ or "SPARK_REMOTE" in os.environ:
            raise StartError(
                "hvdlab.spark needs a SparkContext, and a session of Spark Connect has none: run it where the driver is, in a "
                "classic session."
            )
        raise StartError("Could not find an active SparkContext, are you running in a PySpark session?")
    return context


def _driver_address(context: Any, nics: Collection[str] | str | None) -> str | None:
    """Return where executors reach the coordinator; ``None`` if all of them are this process's."""
    if nics:
        return system.interface_address([nics] if isinstance(nics, str) else sorted(nics))
    if is_local(context):
        return None
    return system.chosen_address(os.environ) or system.outward_address(
        [context.getConf().get("spark.driver.host", "")]
    )


def is_local(context: Any) -> bool:
    """Return whether the tasks run on this host, in slots that are there from the start; not so for ``local-cluster[…]``."""
    return bool(context.master == "local" or context.master.startswith("local["))


def _timeout_text(why: str, timeout: float) -> str:
    return (
        f"Timed out waiting for Spark tasks to start: {why}. Please check that Spark has enough free task slots to run "
        f"all ranks at the same time (cores, executors, other jobs), ask for fewer by num_proc, or raise start_timeout "
        f"(now {timeout:g} s)."
    )


def _speaker(verbose: int) -> Callable[[str], None]:
    def say(text: str) -> None:
        if verbose >= 2:
            print(f"hvdlab.spark: {text}", file=sys.stderr, flush=True)

    return say


class TorchDistributor:
    """Distributor that runs a training function or script on ranks, each with the variables that torchrun sets.

    Args:
        num_processes: Number of ranks.
        local_mode: Whether they run on the driver's host; otherwise in Spark's tasks.
        use_gpu: Whether each rank sees the GPUs that Spark gave to it. False for CPUs.

    Raises:
        InvalidRequestError: ``num_processes`` is less than 1.
        RuntimeError: GPUs are requested, and Spark is not configured to give any.
        StartError: No SparkContext is active.
    """

    def __init__(self, num_processes: int = 1, local_mode: bool = True, use_gpu: bool = True) -> None:
        if num_processes < 1:
            raise InvalidRequestError(f"num_processes={num_processes}: there must be at least one.")
        self.num_processes, self.local_mode, self.use_gpu = num_processes, local_mode, use_gpu
        self._devices = self._find_devices() if use_gpu else []

    def _find_devices(self) -> list[str]:
        context = active_context()
        if self.local_mode:
            found = context.resources.get("gpu")
            if found is None or not found.addresses:
                raise RuntimeError(
                    "The driver was given no GPUs (spark.driver.resource.gpu.amount); use_gpu=False trains on CPUs."
                )
            return list(found.addresses)
        if not int(float(context.getConf().get("spark.task.resource.gpu.amount", "0"))):
            raise RuntimeError(
                "Tasks are given no GPUs (spark.task.resource.gpu.amount); use_gpu=False trains on CPUs."
            )
        return []

    def run(self, train_object: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Any:
        """Train, and return rank 0's result.

        Args:
            train_object: A function, called as ``train_object(*args, **kwargs)``, or the path of a script.
            args: Its arguments; a script's are texts.
            kwargs: Its keyword arguments; a script has none.

        Returns:
            The value of rank 0; ``None`` for a script.

        Raises:
            RankFailedError: A rank failed; also an instance of the class of its exception.
            InvalidRequestError: A script was given keyword arguments.
        """
        if isinstance(train_object, str):
            if kwargs:
                raise InvalidRequestError(
                    "a script has no keyword arguments; write them as texts (`--epochs`, `3`)."
                )
            function, args = _run_script, (train_object, [str(each) for each in args])
        else:
            function = train_object
        if not self.local_mode:
            task = RankTask(pickled(function, args, kwargs), {}, gpus=self.use_gpu)
            job = run_tasks(active_context(), task, self.num_processes)
            return results(job.done(), self.num_processes)[0]
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(self._devices)} if self.use_gpu else {}
        return run_here(function, args, kwargs, num_proc=self.num_processes, env=devices)[0]


def _run_script(path: str, arguments: list[str]) -> None:
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
