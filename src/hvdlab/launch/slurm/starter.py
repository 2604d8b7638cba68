"""Starts ranks in a job of Slurm's: asks for the job, waits in its queue, and has an agent on each of its nodes."""

from __future__ import annotations

import queue
import signal
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import IO

from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.engine.hosts import HOST_VARIABLE, Place
from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.launch.exec_agent.link import AgentConnection, ProgramConnection, agent_command
from hvdlab.launch.exec_agent.starter import ExecStarter
from hvdlab.launch.hosts import Host, assign
from hvdlab.launch.slurm.job import HeldJob, JobState, Slurm, rooms
from hvdlab.launch.starter import Ended, LaunchRequest, RankObserver, Started, Waiting

FIRST_LOOK, LONGEST_LOOK = 0.25, 10.0
"""Seconds between looks at a job that waits, for which Slurm has no event: the first pause, then twice as long each time, and the
longest one."""
TOLD_WITHIN = 15.0
"""Seconds that the job's script has to write how many tasks each node has; after that they are divided evenly."""
CANCELLED_WITHIN = 10.0
"""Seconds that the end of a pool waits until Slurm has confirmed the cancellation; the shell goes on trying after that."""
ENDED_WITHIN = 5.0
"""Seconds that a job has from the end of its first step to the end of all of it."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class StepReach:
    """A :class:`~hvdlab.launch.exec_agent.link.Reach` by steps of a job.

    Attributes:
        job: Its number.
        commands: Slurm's commands, whose environment ``srun`` passes on to the agent.
        arguments: Further arguments of ``srun``.
    """

    job: str
    commands: Slurm
    arguments: Sequence[str] = ()

    def is_here(self, host: str) -> bool:
        """Always False: a process outside of the job has none of its room."""
        return False

    def connect(self, host: str, python: str, errors: IO[bytes] | None) -> AgentConnection:
        """By a step of one task, with all that the job has on the node, beside which other steps may run.

        Its environment is that of Slurm's commands, without variables of another job that this process may be in.
        """
        step = ("--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--export=ALL", "--mpi=none")
        raw = ("--unbuffered", "--cpu-bind=none", "--job-name=hvdlab-agent", "--input=all", "--quiet")
        command = ["srun", f"--jobid={self.job}", *step, *raw, *self.arguments, *agent_command(python)]
        return ProgramConnection(command, errors=errors, environment=self.commands.environment)

    def machine(self, host: str) -> str:
        """The node."""
        return host

    def variables(self, host: str) -> Mapping[str, str]:
        """Variables by which a node counts as a host; its name, which shows where its ranks are, includes the job."""
        return {HOST_VARIABLE: f"{host} (job {self.job})"}


class SlurmStarter:
    """A :class:`~hvdlab.launch.starter.Starter` of ranks in one job.

    A thread submits the job and waits until it has its nodes; then it looks into ends of ranks that only Slurm can explain.

    Args:
        request: What the ranks are started for.
        ranks: Takes what happens to ranks.
        submission: Arguments of ``sbatch``, but for the number of ranks.
        room: How many ranks the job has room for, if those that it begins with are fewer.
        slurm: Slurm's commands.
        python: The interpreter of agents and ranks.
        step: Further arguments of ``srun``.
    """

    def __init__(
        self,
        request: LaunchRequest,
        ranks: RankObserver,
        submission: Sequence[str],
        *,
        room: int,
        slurm: Slurm,
        python: str,
        step: Sequence[str] = (),
    ) -> None:
        self._request, self._ranks = request, ranks
        self._submission, self._room, self._step = tuple(submission), room, tuple(step)
        self._slurm, self._python = slurm, python
        self._lock = threading.Lock()
        #: The job, once it was submitted. This and the following are guarded by the lock.
        self._job: HeldJob | None = None
        #: What starts ranks, once the job has its nodes; below it the nodes, with their room.
        self._exec: ExecStarter | None = None
        self._nodes: tuple[Host, ...] = ()
        #: Ranks that wait for the job, with the size that they were started for.
        self._pending: dict[int, int] = {}
        #: Rank to its node, from its first start on: it is started there again.
        self._node_of: dict[int, str] = {}
        #: Why no rank can be started any more, or empty.
        self._over = ""
        self._closing = threading.Event()
        self._explain: queue.SimpleQueue[Ended | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # -- any thread -----------------------------------------------------------------------------------------------

    def start(self, ranks: Sequence[int], size: int) -> None:
        """Have ranks started as soon as the job has its nodes. The first call submits the job.

        Raises:
            InvalidRequestError: The job has no room for so many, or this was closed.
            StartError: The job has ended, or the program that starts an agent can't be run.
        """
        with self._lock:
            if self._closing.is_set():
                raise InvalidRequestError("no rank can be started any more: the job has ended.")
            if self._over:
                raise StartError(f"no rank can be started any more: {self._over}")
            if self._job is not None:
                self.check_room(size)
            if self._exec is not None:
                self._place(ranks, size)
                return
            self._pending |= dict.fromkeys(ranks, size)
            if self._job is None:
                self._room = max(self._room, size)
                arguments = (*self._submission, f"--ntasks={self._room}")
                self._job = HeldJob(arguments, self._slurm.environment)
                self._ranks.handle(
                    Waiting("asking Slurm for a job")
                )  # from now on the caller waits without a limit
                self._thread = threading.Thread(
                    target=self._run, args=(self._job,), name="hvdlab-slurm", daemon=True
                )
                self._thread.start()

    def check_room(self, size: int) -> None:
        """Raises ``InvalidRequestError`` if the job has no room for so many ranks."""
        if self._job is not None and size > self._room:
            where = ", ".join(f"{node.name}:{node.slots}" for node in self._nodes)
            raise InvalidRequestError(
                f"Slurm's job {self._job.id} has room for {self._room} ranks{f' ({where})' if where else ''}, not for {size}; "
                f"start the pool with --launcher-option slots={size} to have room to grow."
            )

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to the rank, by its node's agent. A rank that waits for the job is dropped by a signal that ends it."""
        with self._lock:
            waited = rank in self._pending and number in _ENDING
            if waited:
                del self._pending[rank]
            execs = self._exec
        if waited:
            said = f"it was ended by {signal.Signals(number).name} before Slurm had room for it"
            self._ranks.handle(Ended(rank, 0, said))
        elif execs is not None:
            execs.signal(rank, number)

    def place(self, rank: int, size: int) -> Place | None:
        """Where a rank is, once the job has its nodes."""
        with self._lock:
            return assign(self._nodes, size)[rank].where if self._nodes else None

    def close(self, timeout: float) -> None:
        """Wait ``timeout`` seconds for ranks that are leaving, end what is left, and cancel the job. Idempotent."""
        with self._lock:
            execs, first = self._exec, not self._closing.is_set()
        if execs is not None:
            execs.close(timeout)
        self._closing.set()
        self._explain.put(None)
        if not first or self._job is None or self._thread is None:
            return
        self._job.cancel()
        self._thread.join(CANCELLED_WITHIN)
        if not self._thread.is_alive():
            self._job.wait(CANCELLED_WITHIN)

    def handle(self, event: Started | Ended | Waiting) -> None:
        """Take what the agents report. Ends that only Slurm can explain, such as of an agent, wait for the explanation."""
        if (
            isinstance(event, Ended)
            and event.code is None
            and not event.signal
            and not self._closing.is_set()
        ):
            self._explain.put(event)
        else:
            self._ranks.handle(event)

    def _place(self, ranks: Sequence[int], size: int) -> None:
        """Have ranks started by their nodes' agents. The caller holds the lock."""
        assert self._exec is not None
        wanted: dict[str, list[int]] = {}
        slots = assign(self._nodes, size)
        for rank in ranks:
            node = self._nodes[slots[rank].host].name
            self._node_of[rank] = node
            wanted.setdefault(node, []).append(rank)
        for node, those in wanted.items():
            self._exec.start_on(node, those, size)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self, job: HeldJob) -> None:
        try:
            nodes = self._wait(job)
        except StartError as error:
            self._ranks.handle(Waiting(""))
            self._give_up(str(error))
            return
        if self._closing.is_set():
            self._give_up("it was ended with its job")
            return
        self._ranks.handle(Waiting(""))
        self._begin(job, nodes)
        for event in iter(self._explain.get, None):
            self._ranks.handle(self._explained(event, job))

    def _wait(self, job: HeldJob) -> list[Host]:
        """Wait until the job has its nodes, or this is closed. Raises ``StartError`` if it ends before."""
        number = job.submitted()
        pause, said, runs_for = FIRST_LOOK, "", 0.0
        while not self._closing.wait(pause):
            try:
                state = self._slurm.job(number)
            except StartError as error:
                text = f"job {number}: {error}"
            else:
                if state is not None and state.runs and (state.settled or runs_for > TOLD_WITHIN):
                    return rooms(self._slurm.hostnames(state.nodes), state.tasks, self._room)
                if state is not None and state.runs:
                    runs_for, pause = runs_for + pause, FIRST_LOOK
                elif state is None or not state.waits or state.never:
                    raise StartError(_why_never(number, state))
                text = state.waiting_text(number, datetime.now())
            if text != said:
                self._ranks.handle(Waiting(text))
                said = text
            pause = min(pause * 2, LONGEST_LOOK)
        return []

    def _begin(self, job: HeldJob, nodes: list[Host]) -> None:
        """The job has its nodes: start the ranks that wait."""
        reach = StepReach(job.id, self._slurm, self._step)
        failed = ""
        with self._lock:
            waiting, self._pending = self._pending, {}
            self._nodes = tuple(nodes)
            self._room = sum(node.slots for node in nodes)
            self._exec = ExecStarter(self._request, self, nodes, reach=reach, python=self._python)
            try:
                for size, ranks in _by_size(waiting).items():
                    self._place(ranks, size)
            except (StartError, InvalidRequestError) as error:
                failed = str(error)
        if failed:
            for rank in waiting:
                self._ranks.handle(Ended(rank, 0, failed))

    def _give_up(self, reason: str) -> None:
        with self._lock:
            self._over = reason
            waiting, self._pending = self._pending, {}
        for rank in waiting:
            self._ranks.handle(Ended(rank, 0, reason))

    def _explained(self, event: Ended, job: HeldJob) -> Ended:
        """The end of a rank that its agent did not report: with the reason of the job's or the node's end."""
        node = self._node_of.get(event.rank, "")
        try:
            state = self._completed(job.id)
            if state is not None and state.runs and node not in self._slurm.hostnames(state.nodes):
                trouble = self._slurm.node_trouble(node)
                reason = f"node {node} of Slurm's job {job.id} failed{f' ({trouble})' if trouble else ''}"
                return replace(event, reason=reason)
        except StartError:  # Slurm's controller does not answer
            return event
        if state is not None and (state.runs or state.waits):
            return event
        reason = state.end_text(job.id) if state is not None else f"Slurm's job {job.id} is over"
        with self._lock:
            self._over = reason
        return replace(event, reason=reason)

    def _completed(self, job: str) -> JobState | None:
        """The state of the job. If it is ending, wait until it has ended: only then Slurm says why. Raises ``StartError``."""
        deadline = Deadline(ENDED_WITHIN)
        while True:
            state = self._slurm.job(job)
            ending = state is not None and state.state == "COMPLETING"
            if not ending or deadline.expired or self._closing.wait(FIRST_LOOK):
                return state


def _why_never(job: str, state: JobState | None) -> str:
    if state is None:
        return f"Slurm does not know job {job} any more"
    if state.never:
        return f"Slurm would never run job {job}: {state.reason}"
    return f"{state.end_text(job)} before it had its nodes"


def _by_size(waiting: Mapping[int, int]) -> dict[int, list[int]]:
    return {
        size: [rank for rank, its in waiting.items() if its == size] for size in Counter(waiting.values())
    }
