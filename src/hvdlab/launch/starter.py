"""Starting ranks: one protocol for every launcher, its capabilities and its reports.

A :class:`Launcher` is a way to start ranks, known by a name. It makes a :class:`Starter` for a job, which starts and ends
processes and reports their events to a :class:`RankObserver`. A launcher's :class:`Capabilities` list its abilities
beside starting all ranks once; a caller that asks for another gets an error that names the reason.

Example:
    >>> from hvdlab.launch.starter import Capabilities, Capability
    >>> abilities = Capabilities.all_but({Capability.SINGLE_RANKS: "mpiexec starts all ranks at once"})
    >>> Capability.SINGLE_RANKS in abilities
    False
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from hvdlab.collectives.client import Client
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.settings import WorldEnvironment
from hvdlab.collectives.system import HostPosition
from hvdlab.launch.forkserver.client import ForkServer
from hvdlab.launch.options import Option

if TYPE_CHECKING:
    from hvdlab.launch.host_agent.connection import AgentLink

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
"""Signals that end a rank; one of them withdraws a rank that still waits for a free slot."""
ENDED_WITH_JOB = "it was ended with its job"
"""Reason of the end of a rank that a starter ends when it is closed."""


class Capability(StrEnum):
    """Capability that not every launcher has; the value completes "ranks … can't be …"."""

    SINGLE_RANKS = "started one by one"
    """A rank can be started while others run: lost ranks can be replaced."""
    RESIZE = "added or taken away"
    """Their number can change."""
    KEEP = "kept when their notebook ends"
    """They can outlive the process that started them, and a later process finds them again."""
    REASONS = "followed to the reason of their end"
    """How each one ended is reported: exit code or signal, and its last words."""
    SIGNALS = "sent signals on other hosts"
    """A signal reaches a rank wherever it runs."""
    PROGRAMS = "given a program to run"
    """They can be any program (``hvdlab run``), whose exit code is reported; see :class:`Program`."""
    PRELOADS = "forked with modules that were imported beforehand"
    """An agent on each host can import modules once and fork the ranks of a Python program (``hvdlab run --preload``)."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of a launcher, with the reason for each that it lacks.

    Attributes:
        has: The abilities that it has.
        lacks: The abilities that it lacks, each with the reason, as a clause that may follow "because".

    Raises:
        ValueError: A capability is in neither, or in both.
    """

    has: frozenset[Capability]
    lacks: Mapping[Capability, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.has & set(self.lacks) or self.has | set(self.lacks) != set(Capability):
            raise ValueError("each capability is either there or lacking, with a reason")

    @classmethod
    def all_but(cls, lacks: Mapping[Capability, str]) -> Capabilities:
        """Return all capabilities but those that the launcher lacks.

        Args:
            lacks: The missing ones, each with the reason, which completes the capability's sentence.
        """
        return cls(frozenset(set(Capability) - set(lacks)), dict(lacks))

    def __contains__(self, capability: Capability) -> bool:
        return capability in self.has

    def require(self, capability: Capability, launcher: str, remedy: str) -> None:
        """Refuse a request that needs a capability which is lacking.

        Args:
            capability: The ability that is needed.
            launcher: The launcher's name.
            remedy: The user's alternative, as a clause.

        Raises:
            InvalidRequestError: The capability is lacking; the message names the reason.
        """
        if capability not in self:
            raise InvalidRequestError(
                f"ranks of the launcher `{launcher}` can't be {capability.value}, because {self.lacks[capability]}; "
                f"{remedy}"
            )


# -- events of ranks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Started:
    """The rank has a process.

    Attributes:
        rank: The rank's number.
        pid: The number of its process on its host.
        host: Name of its host as the launcher knows it; empty for this host, or if the launcher does not know.
    """

    rank: int
    pid: int
    host: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """The rank's process has ended, or could not be started (``pid`` 0).

    Attributes:
        rank: Its number.
        pid: Its process.
        reason: How it ended, in words: ``killed by SIGKILL``.
        tail: The last lines of its standard error, as far as they were not shown elsewhere.
        detail: Further facts about its end, such as its peak memory.
        code: Its exit code, if it is known and no signal ended it. If the program could not be started, the code with which
            a shell would exit (127: there is no such program).
        signal: The signal that ended it, or 0.
        left: Output that it may not have sent, as in :class:`~hvdlab.launch.forkserver.messages.Exited`.
    """

    rank: int
    pid: int
    reason: str
    tail: str = ""
    detail: str = ""
    code: int | None = None
    signal: int = 0
    left: bytes | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """Report that ranks can't start yet, for a time that this process does not decide, such as a batch system's queue.

    Their time limit does not run meanwhile; it begins when the wait is over.

    Attributes:
        text: The starter's reason to wait, in one line; empty once the wait is over.
    """

    text: str


class RankObserver(Protocol):
    """Observer of a starter's reports."""

    def handle(self, event: Started | Ended | Waiting) -> None:
        """Receive an event of a rank. Called on any thread; must not block."""


# -- starting ---------------------------------------------------------------------------------------------------------


class ProgramOutput(Protocol):
    """Observer of the output and results of a program's ranks. Called on any thread."""

    def write(self, rank: int, stream: int, data: bytes) -> None:
        """Receive ``data`` that a rank wrote to a ``stream``: 1 for stdout, 2 for stderr. May wait for room, and so hold up the rank."""

    def returned(self, rank: int, data: bytes) -> None:
        """Receive ``data``, the next piece of a rank's result; all pieces come before the rank's end."""


@dataclass(frozen=True, slots=True)
class Program:
    """Program of the user's that ranks run.

    Attributes:
        command: Program and arguments; for a ``function`` the interpreter, with its arguments.
        environment: Variables for all ranks, beside this process's own and those of their place in the job.
        output: Gets the ranks' output, as it comes and before their ends are reported. Output that a launcher can't catch
            goes to this process's own streams.
        function: A pickled call, or empty; see :class:`hvdlab.launch.host_agent.wire.Start`. Only launchers that have
            an agent on each host get one.
        stdin: Whether rank 0 reads this process's standard input, if it is on this host.
        interfaces: Network interfaces to use between hosts; empty for a choice.
        preload: Modules that each host's agent imports once before it forks ranks; see :attr:`Capability.PRELOADS`.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    output: ProgramOutput
    function: bytes = b""
    stdin: bool = False
    interfaces: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """Request to start the ranks of a job.

    Attributes:
        world: The job as every rank must know it.
        client: A connection to the job's coordinator.
        fork_server: The job's fork server on this host; ``None`` if it has none.
        module: The module of a rank that is started as a program: ``python -m module``.
        forked: The program of a rank that a fork server of its host forks: the name of a
            :class:`~hvdlab.launch.forkserver.program.ForkedProgram`; empty if ranks can't be forked.
        program: The ranks' program instead, for launchers with :attr:`Capability.PROGRAMS`.
        size: How many ranks the job begins with; 0 if that is not known yet.
        hosts: ``a:4,b:4`` as the user gave it, or empty.
        options: The launcher's own options, as :func:`~hvdlab.launch.options.parse` has validated them.
        agent: An agent of this host that has no orders yet, if one was started beforehand.
    """

    world: WorldEnvironment
    client: Client
    fork_server: ForkServer | None = None
    module: str = ""
    forked: str = ""
    program: Program | None = None
    size: int = 0
    hosts: str = ""
    options: Mapping[str, object] = field(default_factory=dict)
    agent: AgentLink | None = None


class StartRequest(Protocol):
    """Part of a :class:`LaunchRequest` with a rank's program, for host agents."""

    @property
    def world(self) -> WorldEnvironment:
        """Return :attr:`LaunchRequest.world`."""
        ...

    @property
    def module(self) -> str:
        """Return :attr:`LaunchRequest.module`."""
        ...

    @property
    def forked(self) -> str:
        """Return :attr:`LaunchRequest.forked`."""
        ...

    @property
    def program(self) -> Program | None:
        """Return :attr:`LaunchRequest.program`."""
        ...

    @property
    def options(self) -> Mapping[str, object]:
        """Return :attr:`LaunchRequest.options`."""
        ...


class Starter(Protocol):
    """Starter of one job: starts and ends its ranks."""

    def start(self, ranks: Sequence[int], size: int) -> None:
        """Begin to start these ranks of a job of ``size``; does not wait until they run.

        Raises:
            StartError: The ranks can't be started.
            InvalidRequestError: Ranks were started before, and the launcher starts them only once.
        """

    def signal(self, rank: int, number: int) -> None:
        """Send the signal of this ``number`` to a rank's process; does nothing if it has ended, or this launcher can't reach it."""

    def place(self, rank: int, size: int) -> HostPosition | None:
        """Return where a rank is in a job of ``size``; ``None`` if all are on this host, or only the launcher knows."""
        ...

    def close(self, timeout: float) -> None:
        """Wait ``timeout`` seconds, while ranks are leaving, for the processes that started them; end the rest. Idempotent."""


@runtime_checkable
class PlacingStarter(Starter, Protocol):
    """A starter whose caller can choose the host of ranks, also a host that the starter did not know when it was made."""

    def start_on(self, host: str, ranks: Sequence[int], size: int) -> None:
        """Start ``ranks``, of a job of this ``size``, as :meth:`start` does, on the host of this name."""

    def give_up(self, host: str) -> None:
        """End the processes that were started on a host; its ranks are reported as not started, or ended."""


def require_running(closed: bool) -> None:
    """Raise ``InvalidRequestError`` if the starter that is asked for a rank was closed."""
    if closed:
        raise InvalidRequestError("no rank can be started any more: the job has ended.")


class Launcher(Protocol):
    """A way to start ranks. An entry point of the group ``hvdlab.launchers`` names such an object, or its class.

    Attributes:
        name: The name that users give.
        capabilities: Its abilities.
        forks: Whether :attr:`LaunchRequest.fork_server` forks the ranks, which then has to import their common modules.
    """

    name: str
    capabilities: Capabilities
    forks: bool

    def options(self) -> Sequence[Option]:
        """Return the options that the launcher accepts."""
        ...

    def check(self, size: int, hosts: str, already: int = 0) -> None:
        """Check whether such ranks can be started, before anything is.

        Args:
            size: How many ranks there will be in all.
            hosts: As in :class:`LaunchRequest`.
            already: How many of them run already.

        Raises:
            StartError: Software that the launcher needs is not installed.
            InvalidRequestError: There is no room for so many, or ``hosts`` is not understood.
        """

    def is_far(self, hosts: str) -> bool:
        """Return whether ranks may run on other hosts, so that the coordinator has to listen on the network."""
        ...

    def starter(self, request: LaunchRequest, ranks: RankObserver) -> Starter:
        """Return the starter of a job's ranks.

        Args:
            request: The job: its size, its program and its environment.
            ranks: Observer of the ranks' starts and ends.

        Raises:
            InvalidRequestError: The request can't be met by this launcher.
        """
        ...
