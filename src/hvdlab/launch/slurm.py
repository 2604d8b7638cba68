"""The launcher ``slurm``: one job of Slurm's holds the slots of all ranks, and a step of it on each node runs the agent that forks them.

::

    launcher ── sbatch ──▶ job (a script that waits)          holds the slots; ended by scancel, by a process of its own
       └─────── srun  ──▶ step on a node: agent ── forks ──▶ ranks      orders and reports over srun's pipes
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import IO, cast

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.system import HOST_VARIABLE, HostPosition
from hvdlab.collectives.time_limits import Deadline
from hvdlab.launch.command import default_python, exported
from hvdlab.launch.host_agent.connection import AgentConnection, ProgramConnection, agent_command
from hvdlab.launch.host_agent.starter import ExecStarter
from hvdlab.launch.hosts import Host, assign
from hvdlab.launch.options import Option, OptionKind
from hvdlab.launch.queueing_starter import QueueingStarter, by_size
from hvdlab.launch.starter import (
    ENDED_WITH_JOB,
    Capabilities,
    Capability,
    Ended,
    LaunchRequest,
    RankObserver,
    Started,
    Waiting,
)

#: Options of the launcher that are options of ``sbatch`` by the same name, or by another one.
_OF_SBATCH = {
    "partition": ("partition", "partition of the job"),
    "account": ("account", "account that it is charged to"),
    "time": ("time", "time limit of the job, such as 2:00:00"),
    "qos": ("qos", "quality of service"),
    "constraint": ("constraint", "features that its nodes must have"),
    "reservation": ("reservation", "reservation that it runs in"),
    "nodes": ("nodes", "how many nodes (default: as Slurm chooses)"),
    "nodelist": ("nodelist", "nodes that it must have"),
    "exclude": ("exclude", "nodes that it must not have"),
    "mem": ("mem", "memory on each node, such as 64G"),
    "mem_per_cpu": ("mem-per-cpu", "memory for each processor, such as 4G"),
    "gres": ("gres", "other resources on each node, such as gpu:a100:4"),
    "cpus_per_rank": ("cpus-per-task", "processors of a rank (default: 1)"),
    "gpus_per_rank": ("gpus-per-task", "GPUs of a rank (default: none)"),
    "job_name": ("job-name", "name of the job (default: hvdlab)"),
}
_KEPT = ("HOME", "LOGNAME", "SHELL", "USER")
_KEPT_OF_SLURM = ("SLURM_CLUSTERS", "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_DEBUG", "SLURM_JWT")
_DEVICES = ("CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


class SlurmLauncher:
    """Launcher that starts ranks in one job of Slurm's, which it submits and cancels."""

    name = "slurm"
    capabilities = Capabilities.all_but(
        {Capability.KEEP: "the job that they run in belongs to the notebook that asked Slurm for it"}
    )
    forks = False

    def __init__(self) -> None:
        self._starter: SlurmStarter | None = None

    def options(self) -> Sequence[Option]:
        """Return the options for the job's resources, and for the program started in it."""
        return (
            *(Option(name, text) for name, (_, text) in _OF_SBATCH.items()),
            Option(
                "slots",
                "ranks that the job has room for (default: as many as it begins with)",
                OptionKind.COUNT,
            ),
            Option("args", "further arguments of sbatch", OptionKind.WORDS),
            Option(
                "srun_args", "further arguments of srun, which starts an agent on each node", OptionKind.WORDS
            ),
            Option("python", "interpreter of the ranks on every node (default: the path of this one)"),
        )

    def check(self, size: int, hosts: str, already: int = 0) -> None:
        """Raise ``StartError`` without Slurm's commands, ``InvalidRequestError`` if hosts are named or a job has too few slots."""
        missing = [name for name in COMMANDS if shutil.which(name) is None]
        if missing:
            raise StartError(
                f"the launcher `slurm` needs Slurm's commands, and `{missing[0]}` is not on the PATH; start it on a host "
                "of the cluster from which jobs are submitted, or choose another launcher, such as local."
            )
        if hosts:
            raise InvalidRequestError(
                "the launcher `slurm` has its nodes from Slurm: name no hosts, but for --launcher-option nodelist=…"
            )
        if self._starter is not None:
            self._starter.check_slots(size)

    def is_far(self, hosts: str) -> bool:
        """Return True always: nodes are, or may be, other hosts."""
        return True

    def starter(self, request: LaunchRequest, ranks: RankObserver) -> SlurmStarter:
        """Return the starter of a job's ranks. Nothing is asked of Slurm yet.

        Raises:
            InvalidRequestError: The program's hosts come and go, which the nodes of a job don't.
        """
        if request.program is not None and not request.size:
            raise InvalidRequestError(
                "the launcher `slurm` has the nodes of one job, which do not come and go: run it without a script that finds hosts."
            )
        options = request.options
        self._starter = SlurmStarter(
            request,
            ranks,
            _submission(options),
            slots=int(str(options.get("slots", 0))),
            slurm=Slurm(_environment(os.environ)),
            python=str(options.get("python") or default_python()),
            step=cast("tuple[str, ...]", options.get("srun_args", ())),
        )
        return self._starter


def _submission(options: Mapping[str, object]) -> list[str]:
    """Return the arguments of ``sbatch``. The job writes no file, is not run a second time, and outlives the loss of a node."""
    found = [
        "--parsable",
        "--no-requeue",
        "--no-kill",
        "--chdir=/",
        "--output=/dev/null",
        "--error=/dev/null",
    ]
    # The script needs no more variables than these; none may show a secret to users that can see the job.
    found += ["--export=PATH,LD_LIBRARY_PATH", "--job-name=hvdlab"]
    found += [f"--{option}={options[name]}" for name, (option, _) in _OF_SBATCH.items() if name in options]
    return [*found, *cast("tuple[str, ...]", options.get("args", ())), f"--wrap={SCRIPT}"]


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of Slurm's commands, and by ``srun`` of agents: without variables that a job or a display has given this process."""
    found = {
        name: value
        for name, value in exported(environ).items()
        if not name.startswith("SLURM") and name not in _DEVICES
    }
    return found | {name: environ[name] for name in (*_KEPT, *_KEPT_OF_SLURM) if name in environ}


FIRST_LOOK, LONGEST_LOOK = 0.25, 10.0
"""Seconds between looks at a job that waits, for which Slurm has no event: the first pause, then twice as long each time, and the
longest one."""
TASKS_REPORTED_WITHIN = 15.0
"""Seconds that the job's script has to write how many tasks each node has; after that they are divided evenly."""
CANCELLED_WITHIN = 10.0
"""Seconds that the end of a pool waits until Slurm has confirmed the cancellation; the shell goes on trying after that."""
ENDED_WITHIN = 5.0
"""Seconds that a job has from the end of its first step to the end of all of it."""


@dataclass(frozen=True, slots=True)
class StepTransport:
    """A :class:`~hvdlab.launch.host_agent.connection.HostTransport` by steps of a job.

    Attributes:
        job: Its number.
        commands: Slurm's commands, whose environment ``srun`` passes on to the agent.
        arguments: Further arguments of ``srun``.
    """

    job: str
    commands: Slurm
    arguments: Sequence[str] = ()

    def is_here(self, host: str) -> bool:
        """Return False always: a process outside of the job has none of its slots."""
        return False

    def connect(self, host: str, python: str, errors: IO[bytes] | None) -> AgentConnection:
        """Connect by a step of one task, with all that the job has on the node, beside which other steps may run.

        Its environment is that of Slurm's commands, without variables of another job that this process may be in.
        """
        step = ("--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--export=ALL", "--mpi=none")
        raw = ("--unbuffered", "--cpu-bind=none", "--job-name=hvdlab-agent", "--input=all", "--quiet")
        command = ["srun", f"--jobid={self.job}", *step, *raw, *self.arguments, *agent_command(python)]
        return ProgramConnection(command, errors=errors, environment=self.commands.environment)

    def machine(self, host: str) -> str:
        """Return the node."""
        return host

    def variables(self, host: str) -> Mapping[str, str]:
        """Return the variables by which a node counts as a host; its name, which shows where its ranks are, includes the job."""
        return {HOST_VARIABLE: f"{host} (job {self.job})"}


class SlurmStarter(QueueingStarter):
    """A :class:`~hvdlab.launch.starter.Starter` of ranks in one job.

    A thread submits the job and waits until it has its nodes; then it explains ends of ranks that only Slurm can explain.

    Args:
        request: The job's launch request.
        ranks: Observer that gets the ranks' events.
        submission: Arguments of ``sbatch``, but for the number of ranks.
        slots: How many ranks the job has slots for, if those that it begins with are fewer.
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
        slots: int,
        slurm: Slurm,
        python: str,
        step: Sequence[str] = (),
    ) -> None:
        super().__init__(ranks, "Slurm")
        self._request = request
        self._submission, self._slots, self._step = tuple(submission), slots, tuple(step)
        self._slurm, self._python = slurm, python
        #: The job, once it was submitted. This and the following are guarded by the lock.
        self._job: SlurmAllocation | None = None
        #: Starts ranks, once the job has its nodes; below it the nodes, with their slots.
        self._exec: ExecStarter | None = None
        self._nodes: tuple[Host, ...] = ()
        #: Rank to its node, from its first start on: it is started there again.
        self._node_of: dict[int, str] = {}
        #: Why no rank can be started any more, or empty.
        self._over = ""
        #: Ends that wait for Slurm's explanation; ``None`` ends the thread.
        self._explain: queue.SimpleQueue[Ended | None] = queue.SimpleQueue()

    # -- any thread -----------------------------------------------------------------------------------------------

    def start(self, ranks: Sequence[int], size: int) -> None:
        """Have ranks started as soon as the job has its nodes. The first call submits the job.

        Raises:
            InvalidRequestError: The job has no slots for so many, or this was closed.
            StartError: The job has ended, or the program that starts an agent can't be run.
        """
        # The thread neither gives the job up nor places ranks between the order and its check.
        with self._changed:
            super().start(ranks, size)

    def _request_slots(self, ranks: Sequence[int], size: int, host: str) -> None:
        if self._over:
            raise StartError(f"no rank can be started any more: {self._over}")
        if self._job is not None:
            self.check_slots(size)
        if self._exec is not None:
            self._place(ranks, size)
        elif self._job is None:
            self._slots = max(self._slots, size)
            arguments = (*self._submission, f"--ntasks={self._slots}")
            job = self._job = SlurmAllocation(arguments, self._slurm.environment)
            self._ranks.handle(
                Waiting("asking Slurm for a job")
            )  # from now on the caller waits without a limit
            self._run_thread(partial(self._run, job), "slurm")

    def check_slots(self, size: int) -> None:
        """Raise ``InvalidRequestError`` if the job has no slots for so many ranks."""
        if self._job is not None and size > self._slots:
            where = ", ".join(f"{node.name}:{node.slots}" for node in self._nodes)
            raise InvalidRequestError(
                f"Slurm's job {self._job.id} has room for {self._slots} ranks{f' ({where})' if where else ''}, not for {size}; "
                f"start the pool with --launcher-option slots={size} to have room to grow."
            )

    def place(self, rank: int, size: int) -> HostPosition | None:
        """Return where a rank is, once the job has its nodes."""
        with self._changed:
            return assign(self._nodes, size)[rank].where if self._nodes else None

    def close(self, timeout: float) -> None:
        """End the ranks as every :class:`~hvdlab.launch.queueing_starter.QueueingStarter` does, and cancel the job. Idempotent."""
        super().close(timeout)
        with self._changed:
            job, running = self._job, any(thread.is_alive() for thread in self._threads)
        if job is not None and not running:
            job.wait(CANCELLED_WITHIN)

    def _signal_placed(self, rank: int, number: int) -> None:
        with self._changed:
            execs = self._exec
        if execs is not None:
            execs.signal(rank, number)

    def _close_placed(self, timeout: float) -> None:
        with self._changed:
            execs = self._exec
        if execs is not None:
            execs.close(timeout)

    def _release_slots(self) -> None:
        self._explain.put(None)
        with self._changed:
            job = self._job
        if job is not None:
            job.cancel()

    def handle(self, event: Started | Ended | Waiting) -> None:
        """Handle the agents' reports. Ends that only Slurm can explain, such as of an agent, wait for the explanation."""
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
            # Only now: ranks that could not be started still wait, and are withdrawn with the reason.
            self._claim(those)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self, job: SlurmAllocation) -> None:
        try:
            nodes = self._wait(job)
        except StartError as error:
            self._ranks.handle(Waiting(""))
            self._give_up(str(error))
            return
        self._ranks.handle(Waiting(""))
        self._begin(job, nodes)
        for event in iter(self._explain.get, None):
            self._ranks.handle(self._explained(event, job))

    def _wait(self, job: SlurmAllocation) -> list[Host]:
        """Wait until the job has its nodes, or this is closed. Raises ``StartError`` if it ends before."""
        number = job.submitted()
        pause, said, runs_for = FIRST_LOOK, "", 0.0
        while not self._closing.wait(pause):
            try:
                state = self._slurm.job(number)
            except StartError as error:
                text = f"job {number}: {error}"
            else:
                if state is not None and state.runs and (state.settled or runs_for > TASKS_REPORTED_WITHIN):
                    return hosts_with_slots(self._slurm.hostnames(state.nodes), state.tasks, self._slots)
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

    def _begin(self, job: SlurmAllocation, nodes: list[Host]) -> None:
        """Start the ranks that wait, since the job has its nodes."""
        transport = StepTransport(job.id, self._slurm, self._step)
        failed = ENDED_WITH_JOB
        with self._changed:
            # close() sets this under the same lock: ranks are either placed before, and ended by its second
            # _close_placed(), or not at all.
            if not self._closing.is_set():
                failed = self._place_waiting(nodes, transport)
            left = list(self._waiting)
        self._withdraw(left, failed)

    def _place_waiting(self, nodes: Sequence[Host], transport: StepTransport) -> str:
        """Start the ranks that wait. Returns why some were not started. The lock is held."""
        self._nodes = tuple(nodes)
        self._slots = sum(node.slots for node in nodes)
        self._exec = ExecStarter(self._request, self, nodes, transport=transport, python=self._python)
        try:
            for size, ranks in by_size(self._waiting).items():
                self._place(ranks, size)
        except (StartError, InvalidRequestError) as error:
            return str(error)
        return ""

    def _give_up(self, reason: str) -> None:
        with self._changed:
            self._over = reason
            left = list(self._waiting)
        self._withdraw(left, reason)

    def _explained(self, event: Ended, job: SlurmAllocation) -> Ended:
        """Return the end of a rank that its agent did not report: with the reason of the job's or the node's end."""
        node = self._node_of.get(event.rank, "")
        try:
            state = self._completed(job.id)
            # With --no-kill the job outlives a failed node, which only leaves the list of its nodes.
            if state is not None and state.runs and node not in self._slurm.hostnames(state.nodes):
                trouble = self._slurm.node_trouble(node)
                reason = f"node {node} of Slurm's job {job.id} failed{f' ({trouble})' if trouble else ''}"
                return replace(event, reason=reason)
        except StartError:  # Slurm's controller does not answer
            return event
        if state is not None and (state.runs or state.waits):
            return event
        reason = state.end_text(job.id) if state is not None else f"Slurm's job {job.id} is over"
        with self._changed:
            self._over = reason
        return replace(event, reason=reason)

    def _completed(self, job: str) -> JobState | None:
        """Return the state of the job. If it is ending, wait until it has ended: only then Slurm reports why. Raises ``StartError``."""
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


ANSWER_WITHIN = 30.0
"""Seconds that a command of Slurm's has; Slurm's controller may be busy."""

COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")

_WAITING = frozenset(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD"))
_ALIVE = frozenset(("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"))
_ENDS = {
    "BOOT_FAIL": "a node could not be booted",
    "CANCELLED": "it was cancelled",
    "COMPLETED": "it is over",
    "COMPLETING": "it is over",
    "DEADLINE": "it came to its deadline",
    "FAILED": "it failed",
    "NODE_FAIL": "a node of it failed",
    "OUT_OF_MEMORY": "it had no memory left",
    "PREEMPTED": "it was preempted",
    "REVOKED": "it was revoked",
    "TIMEOUT": "it came to its time limit",
}
_NEVER = frozenset(
    (
        "AccountNotAllowed",
        "BadConstraints",
        "InvalidAccount",
        "InvalidQOS",
        "PartitionConfig",
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "QOSNotAllowed",
    )
)
"""Reasons for which a job would wait for ever, unless the cluster's configuration changes."""
_REFUSAL = re.compile(r"can't use this partition|not (?:allowed|permitted)", re.IGNORECASE)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_PREFIX = re.compile(r"^(?:sbatch|srun|squeue|scontrol): (?:error: )?")

MARK = "hvdlab tasks="
"""The beginning of the job's comment: its script writes there how many tasks each node has, which no command shows."""


@dataclass(frozen=True, slots=True)
class JobState:
    """State of a job, from ``squeue``.

    Attributes:
        state: Slurm's word, such as ``PENDING``.
        reason: Why it waits, or ended as it did; the text ``None`` is Slurm's word for nothing.
        start: When it is expected to start, or has; as Slurm writes it.
        nodes: Slurm's list of its nodes, such as ``n[1-2]``.
        tasks: How many tasks each of them has, such as ``2(x2),1``; empty as long as the job's script has not written it.
    """

    state: str
    reason: str = ""
    start: str = ""
    nodes: str = ""
    tasks: str = ""

    @property
    def waits(self) -> bool:
        """Return whether it has not begun."""
        return self.state in _WAITING

    @property
    def runs(self) -> bool:
        """Return whether it has its nodes."""
        return self.state in _ALIVE

    @property
    def settled(self) -> bool:
        """Return whether it is known how many tasks each node has: the job's script has written it, or there is one node only."""
        return self.runs and bool(self.tasks or not set(self.nodes) & set("[,"))

    @property
    def never(self) -> bool:
        """Return whether it would wait for ever."""
        return self.state == "PENDING" and (self.reason in _NEVER or _REFUSAL.search(self.reason) is not None)

    def waiting_text(self, job: str, now: datetime) -> str:
        """Return a text such as ``job 7 is PENDING (Resources), expected at 14:30``."""
        if self.runs:
            return f"job {job} has {self.nodes}; its script begins"
        why = f" ({self.reason})" if self.reason not in ("", "None") else ""
        return f"job {job} is {self.state}{why}{_expected(self.start, now)}"

    def end_text(self, job: str) -> str:
        """Return why it ended, as a clause: ``Slurm's job 7 came to its time limit``."""
        what = _ENDS.get(self.state, f"it is {self.state}").removeprefix("it ")
        said = f" ({self.reason})" if self.state == "FAILED" and self.reason not in ("", "None") else ""
        return f"Slurm's job {job}{': ' if what.startswith('a node') else ' '}{what}{said}"


def _expected(start: str, now: datetime) -> str:
    try:
        when = datetime.fromisoformat(start)
    except ValueError:  # N/A
        return ""
    form = "%H:%M" if when.date() == now.date() else "%Y-%m-%d %H:%M"
    return f", expected at {when:{form}}"


def hosts_with_slots(nodes: Sequence[str], tasks: str, size: int) -> list[Host]:
    """Return the nodes as hosts, each with its slots.

    Args:
        nodes: The nodes' names.
        tasks: ``2(x2),1``; if it is empty, ``size`` ranks are divided evenly.
        size: How many ranks the job was asked for.
    """
    counts = [int(count) for count, times in _TASKS.findall(tasks) for _ in range(int(times or 1))]
    if len(counts) != len(nodes):
        counts = [size // len(nodes) + (index < size % len(nodes)) for index in range(len(nodes))]
    return [Host(name, count) for name, count in zip(nodes, counts, strict=True) if count]


def plain(text: str) -> str:
    """Return the standard error of a command of Slurm's in one line, without the command's name."""
    lines = [_PREFIX.sub("", line.strip()) for line in text.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))


class Slurm:
    """Commands of Slurm.

    Args:
        environment: Their environment.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)

    def job(self, job: str) -> JobState | None:
        """Return Slurm's state of a job; ``None`` if Slurm does not know the job any more.

        Raises:
            StartError: Slurm's controller does not answer.
        """
        form = "%T\t%S\t%N\t%k\t%r"
        done = self._run("squeue", "--noheader", "--states=all", f"--jobs={job}", f"--format={form}")
        fields = done.stdout.strip("\n").split("\t")
        if done.returncode == 0 and len(fields) == 5:
            state, start, nodes, comment, reason = (field.strip() for field in fields)
            tasks = comment.removeprefix(MARK) if comment.startswith(MARK) else ""
            return JobState(state, reason, start, nodes, tasks)
        # Slurm forgets a job some minutes after its end (MinJobAge): squeue then prints no line, or refuses
        # the number.
        if done.returncode == 0 or "Invalid job id" in done.stderr:
            return None
        raise StartError(plain(done.stderr) or f"`squeue` ended with exit code {done.returncode}")

    def hostnames(self, nodes: str) -> list[str]:
        """Parse ``n[1-2]`` to names. Raises ``StartError``."""
        done = self._run("scontrol", "show", "hostnames", nodes)
        if done.returncode != 0:
            raise StartError(plain(done.stderr) or f"`scontrol` ended with exit code {done.returncode}")
        return done.stdout.split()

    def node_trouble(self, node: str) -> str:
        """Return a node's trouble in Slurm's words; empty if it has none, or Slurm names none."""
        try:
            done = self._run("sinfo", "--noheader", f"--nodes={node}", "--format=%T\t%E")
        except StartError:
            return ""
        state, _, reason = (done.stdout.splitlines() or [""])[0].partition("\t")
        # A star behind the state means that the node does not respond.
        if not state.startswith(("down", "drain", "fail", "unknown")) and not state.endswith("*"):
            return ""
        return f"{state}, {reason.strip()}" if reason.strip() not in ("", "none") else state

    def cancel(self, job: str) -> None:
        """Cancel a job that may have ended."""
        self._run("scancel", job)

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                words,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=ANSWER_WITHIN,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise StartError(f"`{words[0]}` did not answer within {ANSWER_WITHIN:g} s") from error
        except OSError as error:
            raise StartError(f"`{words[0]}` can't be run: {error.strerror or error}") from error


SCRIPT = (
    f'scontrol update "jobid=$SLURM_JOB_ID" "comment={MARK}$SLURM_TASKS_PER_NODE" >/dev/null 2>&1; '
    "idle=0; while [ $idle -lt 5 ]; do sleep 60; "
    'if steps=$(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i 2>/dev/null) && '
    '! echo "$steps" | grep -qvE "batch|extern|interactive"; then idle=$((idle + 1)); else idle=0; fi; done'
)
"""What the job itself runs. The launcher cancels the job; if the launcher is lost with its host, the job ends after five minutes
without a step."""

# sbatch gets no input: it must not read from the pipe whose end has the job cancelled.
_KEEP = (
    'trap \'\' HUP INT PIPE TERM; job=$(sbatch "$@" </dev/null) || exit 1; echo "$job"; cat >/dev/null; '
    'tries=0; until scancel "${job%%;*}" || [ $tries -ge 60 ]; do tries=$((tries + 1)); sleep 5; done'
)


class SlurmAllocation:
    """Job that is cancelled on :meth:`cancel`, or when this process ends for any reason.

    A shell submits it, and cancels it when its input ends: it has a session of its own, and is not stopped by signals.

    Args:
        arguments: Arguments of ``sbatch``.
        environment: The environment of Slurm's commands.

    Attributes:
        id: Slurm's number, once :meth:`submitted` has returned.

    Raises:
        StartError: The shell can't be run.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.id = ""
        try:
            self._process = subprocess.Popen(
                ["sh", "-c", _KEEP, "hvdlab-job", *arguments],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise StartError(f"`sh` can't be run: {error.strerror or error}") from error

    def submitted(self) -> str:
        """Wait until Slurm has accepted the job; returns its number.

        Raises:
            StartError: Slurm refused it; the text is Slurm's own.
        """
        line = _pipe(self._process.stdout).readline().decode("utf-8", "replace")
        self.id = line.strip().partition(";")[0]
        if not self.id:
            said = plain(_pipe(self._process.stderr).read().decode("utf-8", "replace"))
            raise StartError(f"Slurm refused the job: {said or 'sbatch said nothing'}")
        return self.id

    def cancel(self) -> None:
        """Have the job cancelled; :meth:`wait` waits for that. Idempotent."""
        _pipe(self._process.stdin).close()

    def wait(self, timeout: float) -> bool:
        """Return whether Slurm has accepted the cancellation in time; if not, the shell goes on trying.

        Call it when no thread reads from the shell any more.
        """
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        _pipe(self._process.stdout).close()
        _pipe(self._process.stderr).close()
        return True


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
