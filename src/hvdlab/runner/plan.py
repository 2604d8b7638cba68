"""What is to be run where: from the operator's wishes to what each host's agent is told."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from hvdlab.collectives.environment import World, own_environment
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.launch.environment import FOREIGN, exported
from hvdlab.launch.exec_agent import wire
from hvdlab.launch.hosts import Host, Slot, assign, is_local
from hvdlab.runner.policy import Policy


@dataclass(frozen=True, slots=True)
class Job:
    """A job. Making one raises ``InvalidRequestError`` if its hosts have too few slots.

    Attributes:
        command: Program and arguments; for a ``function`` the interpreter.
        size: Number of ranks.
        hosts: Where they run, in this order.
        function: A pickled call, or empty.
        environment: Variables for all ranks, beside the launcher's own.
        plane: Data plane.
        interfaces: Network interfaces to use between hosts; empty for a choice.
        ssh: Command that runs a command on another host: its name and a command line are appended.
        stdin: Whether rank 0 reads the launcher's standard input.
        slots: Where each rank runs.
        min_ranks: As in :class:`~hvdlab.runner.policy.Policy`, as are the following.
    """

    command: tuple[str, ...]
    size: int
    hosts: tuple[Host, ...]
    function: bytes = b""
    environment: dict[str, str] = field(default_factory=dict)
    plane: str = "auto"
    interfaces: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ("ssh",)
    stdin: bool = False
    start_timeout: float = 30.0
    join_timeout: float | None = None
    min_ranks: int | None = None
    reset_limit: int = 10
    slots: tuple[Slot, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InvalidRequestError(f"-np {self.size}: a job has at least one rank.")
        object.__setattr__(self, "slots", tuple(assign(self.hosts, self.size)))

    @property
    def used_hosts(self) -> tuple[int, ...]:
        """Indices of the hosts that have ranks."""
        return tuple(sorted({slot.host for slot in self.slots}))

    @property
    def remote(self) -> tuple[str, ...]:
        """Names of the hosts with ranks that are not this one."""
        names = [self.hosts[index].name for index in self.used_hosts]
        return tuple(name for name in names if not is_local(name))

    def policy(self) -> Policy:
        """What the supervisor goes by."""
        return Policy(
            tuple(self.hosts[slot.host].name for slot in self.slots),
            start_timeout=self.start_timeout,
            join_timeout=self.join_timeout,
            min_ranks=self.min_ranks,
            reset_limit=self.reset_limit,
        )


def own_address(job: Job) -> str | None:
    """The address of this host that ranks of other hosts reach it by; ``None`` if all ranks run here.

    Raises:
        InvalidRequestError, StartError: There is none.
    """
    remote = job.remote
    if not remote:
        return None
    from hvdlab.collectives import addresses

    if job.interfaces:
        return addresses.of_interfaces(job.interfaces)
    return addresses.chosen({**os.environ, **job.environment}) or addresses.outward(remote[:1])


def start_message(job: Job, host: int, world: World, *, here: bool) -> wire.Start:
    """What the agent of a host is told first."""
    ranks = [slot.rank for slot in job.slots if slot.host == host]
    # A program would hold its output back, as it writes to a pipe; a function has its lines flushed, which costs less.
    flushed = bool(job.function) or "PYTHONUNBUFFERED" in os.environ
    environment = {} if flushed else {"PYTHONUNBUFFERED": "1"}
    environment |= ({} if here else exported(os.environ)) | job.environment
    if job.min_ranks is not None:
        environment |= {"HVDLAB_ELASTIC": "1", "HOROVOD_ELASTIC": "1", "HVDLAB_MIN_NP": str(job.min_ranks)}
    command = (*job.command, "-m", "hvdlab.runner.function") if job.function else job.command
    return wire.Start(
        tuple(map(os.fsencode, command)),
        os.fsencode(os.getcwd()),
        {os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
        removed=FOREIGN,
        function=job.function,
        threads=len(ranks),
        stdin_rank=0 if job.stdin and here else -1,
        coordinator=world.coordinator,
        interfaces=job.interfaces,
    )


def rank_spec(job: Job, rank: int, world: World) -> wire.RankSpec:
    """What makes a process this rank."""
    slot = job.slots[rank]
    environment = own_environment(world, rank, job.size, slot.where)
    environment["HOROVOD_HOSTNAME"] = job.hosts[slot.host].name
    return wire.RankSpec(rank, environment)
