"""A job of Slurm's as Slurm's commands show it: what it waits for, where it runs, and why it ended."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import IO

from hvdlab.collectives.errors import StartError
from hvdlab.launch.hosts import Host

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
    """What ``squeue`` shows of a job.

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
        """Whether it has not begun."""
        return self.state in _WAITING

    @property
    def runs(self) -> bool:
        """Whether it has its nodes."""
        return self.state in _ALIVE

    @property
    def settled(self) -> bool:
        """Whether it is known how many tasks each node has: the job's script has written it, or there is one node only."""
        return self.runs and bool(self.tasks or not set(self.nodes) & set("[,"))

    @property
    def never(self) -> bool:
        """Whether it would wait for ever."""
        return self.state == "PENDING" and (self.reason in _NEVER or _REFUSAL.search(self.reason) is not None)

    def waiting_text(self, job: str, now: datetime) -> str:
        """``job 7 is PENDING (Resources), expected at 14:30``."""
        if self.runs:
            return f"job {job} has {self.nodes}; its script begins"
        why = f" ({self.reason})" if self.reason not in ("", "None") else ""
        return f"job {job} is {self.state}{why}{_expected(self.start, now)}"

    def end_text(self, job: str) -> str:
        """Why it ended, as a clause: ``Slurm's job 7 came to its time limit``."""
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


def rooms(nodes: Sequence[str], tasks: str, size: int) -> list[Host]:
    """How many ranks each node has room for.

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
    """What a command of Slurm's wrote to its standard error, in one line, without the command's name."""
    lines = [_PREFIX.sub("", line.strip()) for line in text.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line))


class Slurm:
    """Slurm's commands.

    Args:
        environment: Their environment.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)

    def job(self, job: str) -> JobState | None:
        """What Slurm knows of a job; ``None`` if it does not know the job any more.

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
        if done.returncode == 0 or "Invalid job id" in done.stderr:
            return None
        raise StartError(plain(done.stderr) or f"`squeue` ended with exit code {done.returncode}")

    def hostnames(self, nodes: str) -> list[str]:
        """``n[1-2]`` to names. Raises ``StartError``."""
        done = self._run("scontrol", "show", "hostnames", nodes)
        if done.returncode != 0:
            raise StartError(plain(done.stderr) or f"`scontrol` ended with exit code {done.returncode}")
        return done.stdout.split()

    def node_trouble(self, node: str) -> str:
        """What is wrong with a node, in Slurm's words; empty if nothing is, or Slurm does not say."""
        try:
            done = self._run("sinfo", "--noheader", f"--nodes={node}", "--format=%T\t%E")
        except StartError:
            return ""
        state, _, reason = (done.stdout.splitlines() or [""])[0].partition("\t")
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

_KEEP = (
    'trap \'\' HUP INT PIPE TERM; job=$(sbatch "$@" </dev/null) || exit 1; echo "$job"; cat >/dev/null; '
    'tries=0; until scancel "${job%%;*}" || [ $tries -ge 60 ]; do tries=$((tries + 1)); sleep 5; done'
)


class HeldJob:
    """A job that is cancelled on :meth:`cancel`, or when this process ends, in whatever way.

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
        """Wait until Slurm has taken the job; returns its number.

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
        """Whether Slurm has taken the cancellation in time; if not, the shell goes on trying.

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
