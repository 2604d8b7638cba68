"""Specification of a job: its program, its hosts and its launcher."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.protocol.messages import MOST_RANKS
from hvdlab.collectives.settings import CONSECUTIVE, Reader, for_reader
from hvdlab.launch import options, registry
from hvdlab.launch.command import PythonCommand
from hvdlab.launch.host_discovery import COOLDOWN, HostSource
from hvdlab.launch.hosts import Host, Slot, assign, is_local
from hvdlab.launch.starter import Capability, Launcher, Program, ProgramOutput
from hvdlab.runner.supervisor import Growth, Policy


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job. Making one raises ``InvalidRequestError`` if its hosts have too few slots, it has too many ranks, or can't preload.

    Attributes:
        command: Program and arguments; for a ``function`` the interpreter.
        size: Number of ranks.
        hosts: Where they run, in this order.
        named: Whether the operator named them; otherwise they are this host.
        function: A pickled call, or empty.
        environment: Variables for all ranks, beside the launcher's own.
        plane: Data plane.
        interfaces: Network interfaces to use between hosts; empty for a choice.
        ssh: Command that runs a command on another host: its name and a command line are appended.
        launcher: Name of the launcher, or a launcher itself.
        launcher_options: Its own options, as texts.
        stdin: Whether rank 0 reads the launcher's standard input.
        preload: Modules that each host imports once, before it forks ranks; empty to execute the command for each rank.
        slots: Where each rank runs; empty with a ``source``.
        source: Where hosts come from while the job runs, or ``None`` if they are fixed. With a source ``hosts`` is empty,
            and the job waits for ``size`` slots before it starts ranks.
        source_name: Name of the source in messages.
        max_ranks: Ranks that the job has at most; with a ``source`` only.
        cooldown: Seconds that a host that failed is put aside the first time, and at most; likewise.
        elastic_timeout: Seconds that the job waits for hosts while it has fewer ranks than it needs; likewise.
        mail: For each topic the function that receives mail of the ranks: it is called with the sender's rank and the body,
            on a thread of the launcher's.
        start_timeout, join_timeout, min_ranks, reset_limit: As in :class:`~hvdlab.runner.supervisor.Policy`.
    """

    command: tuple[str, ...]
    size: int
    hosts: tuple[Host, ...]
    named: bool = False
    function: bytes = b""
    environment: dict[str, str] = field(default_factory=dict)
    plane: str = "auto"
    interfaces: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ("ssh",)
    launcher: str | Launcher = "local"
    launcher_options: Mapping[str, str] = field(default_factory=dict)
    stdin: bool = False
    preload: tuple[str, ...] = ()
    start_timeout: float = 30.0
    join_timeout: float | None = None
    min_ranks: int | None = None
    reset_limit: int = 10
    source: HostSource | None = None
    source_name: str = "the source of hosts"
    max_ranks: int = MOST_RANKS
    cooldown: tuple[float, float] = COOLDOWN
    elastic_timeout: float = 600.0
    mail: Mapping[str, Callable[[int, bytes], None]] = field(default_factory=dict)
    slots: tuple[Slot, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InvalidRequestError(f"-np {self.size}: a job has at least one rank.")
        for flag, ranks in (("-np", self.size), ("--max-np", self.max_ranks)):
            if ranks > MOST_RANKS:
                raise InvalidRequestError(f"{flag} {ranks}: a job has {MOST_RANKS} ranks at most.")
        if self.preload and PythonCommand.parse(self.words) is None:
            raise InvalidRequestError(
                f"--preload: `{self.command[0]}` is no Python program that could be forked; name it as "
                "`python SCRIPT`, `python -m MODULE` or `python -c CODE`, or leave --preload out."
            )
        fixed = () if self.source is not None else tuple(assign(self.hosts, self.size))
        object.__setattr__(self, "slots", fixed)

    @property
    def words(self) -> tuple[str, ...]:
        """Return the command line of a rank."""
        return (*self.command, "-m", "hvdlab.runner.function_worker") if self.function else self.command

    @property
    def newcomer_timeout(self) -> float | None:
        """Return the seconds that a newcomer has to come to ``hvd.init()``; ``None`` for no limit."""
        return None if self.join_timeout is None else max(self.join_timeout, self.elastic_timeout)

    @property
    def used_hosts(self) -> tuple[int, ...]:
        """Return the indices of the hosts that have ranks."""
        return tuple(sorted({slot.host for slot in self.slots}))

    @property
    def remote(self) -> tuple[str, ...]:
        """Return the names of the other hosts that have ranks."""
        names = [self.hosts[index].name for index in self.used_hosts]
        return tuple(name for name in names if not is_local(name))

    def policy(self) -> Policy:
        """Return the policy that the supervisor follows."""
        return Policy(
            tuple(self.hosts[slot.host].name for slot in self.slots),
            start_timeout=self.start_timeout,
            join_timeout=self.join_timeout,
            newcomer_timeout=self.newcomer_timeout,
            min_ranks=self.min_ranks,
            reset_limit=self.reset_limit,
            growth=None
            if self.source is None
            else Growth(min(self.size, self.max_ranks), self.max_ranks, self.elastic_timeout),
        )

    @property
    def host_list(self) -> str:
        """Return the hosts in the form that launchers accept (``a:2,b:2``); empty if the operator named none."""
        return ",".join(f"{host.name}:{host.slots}" for host in self.hosts) if self.named else ""

    def host_of(self, rank: int) -> str:
        """Return the host that a rank was given to."""
        return self.hosts[self.slots[rank].host].name


def find_launcher(job: JobSpec) -> tuple[Launcher, dict[str, object]]:
    """Return the job's launcher, and the values of its options.

    Raises:
        InvalidRequestError: There is no launcher of this name, it can't start programs, or does not know an option.
        StartError: The launcher can't be imported, or lacks something.
    """
    found = registry.find(job.launcher) if isinstance(job.launcher, str) else job.launcher
    if found is None:
        known = ", ".join(registry.names())
        raise InvalidRequestError(f"there is no launcher {job.launcher!r}; choose one of {known}.")
    another = "choose another one by --launcher."
    found.capabilities.require(Capability.PROGRAMS, found.name, another)
    if job.min_ranks is not None:
        found.capabilities.require(
            Capability.SINGLE_RANKS, found.name, f"run the job without --min-np, or {another}"
        )
    if job.preload:
        found.capabilities.require(
            Capability.PRELOADS, found.name, f"run the job without --preload, or {another}"
        )
    values = options.parse(found.name, found.options(), job.launcher_options)
    if found.name == "ssh":
        values.setdefault("shell", job.ssh)
    if job.source is not None:
        found.capabilities.require(
            Capability.RESIZE, found.name, f"give fixed hosts by -H or --hostfile, or {another}"
        )
    else:
        found.check(job.size, job.host_list)
    return found, values


def own_address(job: JobSpec, launcher: Launcher) -> str | None:
    """Return the address by which ranks of other hosts reach this one; ``None`` if all ranks run here.

    Raises:
        InvalidRequestError, StartError: This host has no such address.
    """
    if job.source is None and not launcher.is_far(job.host_list):
        return None
    from hvdlab.collectives import system

    if job.interfaces:
        return system.interface_address(job.interfaces)
    return system.chosen_address({**os.environ, **job.environment}) or system.outward_address(job.remote[:1])


def variables(job: JobSpec) -> dict[str, str]:
    """Return the variables that the coordinator and the ranks of a job get beside those of the launcher's own environment."""
    late = {} if job.join_timeout is None else {"HVDLAB_START_TIMEOUT": f"{_patience_of_ranks(job):g}"}
    if job.min_ranks is None:
        return {**job.environment, **late}
    # Scripts for Horovod's elastic training count on rank() < size(), and on a rank 0.
    numbers = os.environ.get("HVDLAB_RANK_NUMBERS", "").strip() or CONSECUTIVE
    given = {"HVDLAB_RANK_NUMBERS": numbers, **job.environment, **late}
    return given | {"HVDLAB_ELASTIC": "1", "HOROVOD_ELASTIC": "1", "HVDLAB_MIN_NP": str(job.min_ranks)}


def patience(environment: Mapping[str, str], otherwise: float) -> float:
    """Return the seconds that ranks with these variables wait for each other in ``hvd.init()``; ``otherwise`` if none sets a limit.

    Raises:
        InvalidRequestError: The variable has a wrong value.
    """
    found = for_reader(Reader.RANK, environment).get("start_timeout")
    return found if isinstance(found, float) else otherwise


_LATER = 5.0
"""Seconds that ranks wait longer in ``hvd.init()`` than the launcher does, which can name the missing ranks with their hosts."""


def _patience_of_ranks(job: JobSpec) -> float:
    """Return the seconds that ranks wait for each other in ``hvd.init()``.

    The ranks of an elastic job wait on, as the launcher gives up those that don't come, and may have to find hosts for others.
    """
    patience = job.join_timeout if job.min_ranks is None else job.newcomer_timeout
    assert patience is not None
    return patience + _LATER


def program(job: JobSpec, output: ProgramOutput) -> Program:
    """Return the program of a job's ranks."""
    # A program that writes to a pipe would hold its output back. For a function, hvdlab.runner.function_worker makes the streams
    # flush each line, which costs less than unbuffered ones.
    flushed = bool(job.function) or "PYTHONUNBUFFERED" in os.environ
    environment = ({} if flushed else {"PYTHONUNBUFFERED": "1"}) | variables(job)
    return Program(job.words, environment, output, job.function, job.stdin, job.interfaces, job.preload)
