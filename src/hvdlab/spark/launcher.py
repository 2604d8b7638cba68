"""The launcher ``spark``: each rank is a process of a task, and each task a Spark job of its own.

::

    launcher ── a job of one task ──▶ Spark ──▶ task ── spawns ──▶ rank ── hvdlab's own channel ──▶ coordinator

Tasks of one job share its fate: Spark starts all of them or none, and all again when one is lost. So ranks that come and go
by themselves are jobs by themselves. A cause that ends a rank's job, such as the loss of its executor, ends no other.
"""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hvdlab.collectives.client import Membership
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.settings import own_environment
from hvdlab.collectives.system import HostPosition
from hvdlab.launch.command import default_python, exported
from hvdlab.launch.host_discovery import HostSource
from hvdlab.launch.options import Option
from hvdlab.launch.processes import describe_exit
from hvdlab.launch.queueing_starter import QueueingStarter
from hvdlab.launch.starter import (
    ENDED_WITH_JOB,
    ENDING_SIGNALS,
    Capabilities,
    Capability,
    Ended,
    LaunchRequest,
    RankObserver,
    Started,
)
from hvdlab.spark.runner import ExecutorRequest, active_context, is_local, slots, spark_error_text
from hvdlab.spark.task import RankEnd, SingleRankTask

_CANCELLED_WITHIN = 5.0
"""Seconds that Spark has to end the tasks of jobs that were cancelled; Spark gives a worker two before it kills that worker."""
_NOT_THEIRS = ("SPARK_", "PYSPARK_", "PYTHON_WORKER", "JAVA_", "CUDA_VISIBLE")
"""Beginnings of variables of the driver that mean something else on an executor."""


class SparkLauncher:
    """Launcher that starts ranks in tasks of the SparkContext of this process.

    Args:
        captured: Whether the ranks' output is brought to the driver, when they have ended; otherwise it goes to the executors' logs.
        most: How many ranks there are at most.
    """

    name = "spark"
    capabilities = Capabilities.all_but(
        {
            Capability.KEEP: "their tasks belong to the notebook's SparkContext",
            Capability.PRELOADS: "each task executes its rank's program",
            Capability.SIGNALS: "Spark can end a task, and passes nothing else on to it",
        }
    )
    forks = False

    def __init__(self, *, captured: bool = False, most: int | None = None) -> None:
        self._captured, self._most = captured, most
        self._starter: SparkStarter | None = None
        self._executor_request: ExecutorRequest | None = None

    def options(self) -> Sequence[Option]:
        """Return the option for the ranks' interpreter."""
        return (Option("python", "the ranks' interpreter on the executors (default: that of Spark's tasks)"),)

    def check(self, size: int, hosts: str, already: int = 0) -> None:
        """Raise ``InvalidRequestError`` if hosts are named or tasks are too few, ``StartError`` without a SparkContext."""
        if hosts:
            raise InvalidRequestError(
                "the launcher `spark` has Spark choose the executors: name no hosts; Spark's own settings say where its tasks run."
            )
        context = active_context()
        if is_local(context) and slots(context) < size:
            raise InvalidRequestError(
                f"Spark has {slots(context)} task slots for {size} ranks; start it as `local[{size}]`, or ask for fewer ranks."
            )

    def is_far(self, hosts: str) -> bool:
        """Return True unless Spark's tasks run in this process's own host."""
        return not is_local(active_context())

    def starter(self, request: LaunchRequest, ranks: RankObserver) -> SparkStarter:
        """Return the starter of a job's ranks. Raises ``StartError`` without a SparkContext."""
        self._starter = SparkStarter(request, ranks, active_context(), captured=self._captured)
        return self._starter

    def source(self) -> HostSource:
        """Return the task slots as hosts of an elastic job, of which each accepts one rank."""
        return _Slots(self)

    def close(self) -> None:
        """Ask for executors no more. Idempotent."""
        if self._executor_request is not None:
            self._executor_request.close(_CANCELLED_WITHIN)

    def free_and_taken(self) -> dict[str, int]:
        """Return the slots of living ranks under the names that they have, and as many free ones as Spark has.

        If ranks have all slots and there can be more ranks, more executors are requested from dynamic allocation.
        """
        taken = self._starter.taken() if self._starter is not None else set()
        total = slots(active_context())
        total = total if self._most is None else min(total, self._most)
        if self._most is not None and total <= len(taken):
            if self._executor_request is None:
                self._executor_request = ExecutorRequest(active_context())
            self._executor_request.submit(self._most - len(taken))
        names = (
            name for name in (f"slot-{number}" for number in range(total + len(taken))) if name not in taken
        )
        # A rank that lives keeps its slot when another's executor is lost.
        return dict.fromkeys(
            [*sorted(taken), *[name for name, _ in zip(names, range(total - len(taken)), strict=False)]], 1
        )


class _Slots(HostSource):
    """Host source that asks a launcher."""

    def __init__(self, launcher: SparkLauncher) -> None:
        self._launcher = launcher

    def find(self) -> Mapping[str, int]:
        return self._launcher.free_and_taken()


class _RankJob:
    """Spark job of one rank; guarded by the starter's lock."""

    def __init__(self, rank: int, host: str, group: str) -> None:
        self.rank, self.host, self.group = rank, host, group
        #: Its process on the executor, once it has connected; 0 before.
        self.pid = 0
        #: Why it was cancelled, or empty.
        self.cancel_reason = ""


class SparkStarter(QueueingStarter):
    """A :class:`~hvdlab.launch.starter.PlacingStarter` of tasks. A thread for each rank waits for the end of its job.

    Spark itself queues the job of a rank until a slot is free, so that no rank waits here.

    Args:
        request: The job's launch request.
        ranks: Observer that gets the ranks' events.
        context: The SparkContext.
        captured: Whether the ranks' output is brought here.
    """

    def __init__(
        self, request: LaunchRequest, ranks: RankObserver, context: Any, *, captured: bool = False
    ) -> None:
        super().__init__(ranks, "Spark")
        self._request, self._context, self._captured = request, context, captured
        self._name = f"spark.{uuid.uuid4().hex[:8]}"
        #: Rank to its job, from the order to start it to its end. With the following, guarded by the condition.
        self._jobs: dict[int, _RankJob] = {}
        self._begun = 0
        #: Rank to its last process that has ended: the coordinator may still count that process as a member for a moment.
        self._ended: dict[int, int] = {}
        request.client.on_membership(self._on_membership)

    # -- any thread ---------------------------------------------------------------------------------------------------

    def start_on(self, host: str, ranks: Sequence[int], size: int) -> None:
        """Start a rank as :meth:`start` does, under the name of a slot; Spark chooses the executor.

        Raises:
            InvalidRequestError: This was closed.
        """
        self._order(ranks, size, host)

    def _request_slots(self, ranks: Sequence[int], size: int, host: str) -> None:
        with self._changed:
            for rank in self._claim(ranks):
                group = f"hvdlab.{self._name}.{self._begun}"
                job = self._jobs[rank] = _RankJob(rank, host or f"slot-{rank}", group)
                self._run_thread(partial(self._follow, job, size), f"{self._name}.{self._begun}")
                self._begun += 1

    def _make_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        from pyspark import InheritableThread  # pyright: ignore[reportMissingImports]

        thread: threading.Thread = InheritableThread(target=target, name=name)
        thread.daemon = True
        return thread

    def taken(self) -> set[str]:
        """Return the names of slots whose ranks have not ended."""
        with self._changed:
            return {job.host for job in self._jobs.values()}

    def give_up(self, host: str) -> None:
        """Cancel the job of a slot; its rank is reported."""
        with self._changed:
            jobs = [job for job in self._jobs.values() if job.host == host]
        for job in jobs:
            self._cancel(job, f"{host} was given up")

    def place(self, rank: int, size: int) -> HostPosition | None:
        """Return ``None``: Spark places ranks."""
        return None

    def _signal_placed(self, rank: int, number: int) -> None:
        """End a rank, by cancelling its job; Spark can pass on no other signal."""
        with self._changed:
            job = self._jobs.get(rank)
        if job is not None and number in ENDING_SIGNALS:
            self._cancel(job, f"it was ended by {signal.Signals(number).name}")

    def _close_placed(self, timeout: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs, timeout)
            left = list(self._jobs.values())
        for job in left:
            self._cancel(job, ENDED_WITH_JOB)

    def _cancel(self, job: _RankJob, reason: str) -> None:
        with self._changed:
            # Before the cancellation: the rank's thread reads the reason as soon as Spark reports the end
            # of the job. The first one stays.
            job.cancel_reason = job.cancel_reason or reason
        # Also if it was not submitted yet.
        self._context._jsc.sc().cancelJobGroupAndFutureJobs(job.group)

    # -- a rank's thread ----------------------------------------------------------------------------------------------

    def _follow(self, job: _RankJob, size: int) -> None:
        """Run a rank's job, and report its end."""
        try:
            self._context.setJobGroup(job.group, f"hvdlab: rank {job.rank}", interruptOnCancel=True)
            tasks = self._context.parallelize([job.rank], 1).mapPartitions(self._task(job.rank, size))
            (end,) = tasks.collect()
        except Exception as error:  # noqa: BLE001  # whatever Spark raises for a job that failed or was cancelled
            self._end(job, job.cancel_reason or f"its Spark job failed: {spark_error_text(error)}")
            return
        if end.outcome.text:
            self._end(job, end.outcome.text, end.outcome.exit_code or None)
        else:
            self._deliver(end)
            code, number = end.outcome.code, end.outcome.signal
            self._end(job, describe_exit(code, number), None if number else code, number)

    def _task(self, rank: int, size: int) -> SingleRankTask:
        request = self._request
        program = request.program
        python = str(request.options.get("python", ""))
        environment = {
            name: value for name, value in exported(os.environ).items() if not name.startswith(_NOT_THEIRS)
        }
        if program is not None:
            # Ranks of a function do not get the driver's variables.
            environment = {} if program.function else environment
            environment |= program.environment
        command = program.command if program else ("", "-m", request.module)
        if command[0] in ("", default_python()):
            command = (python, *command[1:])
        return SingleRankTask(
            command,
            program.function if program else b"",
            rank,
            environment | own_environment(request.world, rank, size),
            self._captured,
        )

    def _deliver(self, end: RankEnd) -> None:
        program = self._request.program
        if program is None:
            return
        for stream, data in end.output:
            program.output.write(end.rank, stream, data)
        if end.result:
            program.output.returned(end.rank, end.result)

    def _end(self, job: _RankJob, reason: str, code: int | None = None, number: int = 0) -> None:
        self._ranks.handle(Ended(job.rank, job.pid, reason, "", "", code, number))
        with self._changed:
            # After the report: close() waits until no job is left, and the observer must have all ends by
            # then.
            # The observer can have started the rank again in the line before.
            if self._jobs.get(job.rank) is job:
                del self._jobs[job.rank]
                self._ended[job.rank] = job.pid
            self._changed.notify_all()

    # -- the coordinator's client's thread ------------------------------------------------------------------------------

    def _on_membership(self, membership: Membership) -> None:
        """Record that ranks run, once they have connected."""
        started = []
        with self._changed:
            for member in membership.members:
                job = self._jobs.get(member.rank)
                if job is not None and member.pid not in (job.pid, self._ended.get(member.rank)):
                    job.pid = member.pid
                    started.append(Started(member.rank, member.pid, job.host))
        for event in started:
            self._ranks.handle(event)
