"""The events that the supervisor handles, and the effects that the job's loop carries out for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvdlab.launch.processes import ExitStatus

# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spawned:
    """Event: a rank's process runs."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """Event: a rank's process ended."""

    rank: int
    outcome: ExitStatus


@dataclass(frozen=True, slots=True)
class Unstartable:
    """Event: these ranks can't be started, or their host is lost. Ranks among them that have ended already are not concerned."""

    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Connected:
    """Event: a rank has joined the job (``hvd.init()``)."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankArrived:
    """Event: a newcomer has come to ``hvd.init()``, where it waits; :class:`Connected` follows once the others have let it in."""

    rank: int


@dataclass(frozen=True, slots=True)
class Formed:
    """Event: the first world is there: all ranks have come that were expected then, or the others continue without them."""


@dataclass(frozen=True, slots=True)
class RankDisconnected:
    """Event: a rank's connection to the coordinator has ended: no report can follow.

    Attributes:
        rank: Which one.
        reason: Why the coordinator gave it up, if it did (``no sign of life for 30 s``).
    """

    rank: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RankReturned:
    """Event: a rank that the coordinator had given up has connected again, with its memory, ``seconds`` after its last sign of life.

    :class:`Connected` follows once the others have let it in.
    """

    rank: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RanksKept:
    """Event: the coordinator keeps these released ranks in training, since too few would be left, or does so no more."""

    ranks: tuple[int, ...]
    kept: bool


@dataclass(frozen=True, slots=True)
class Reported:
    """Event: an uncaught exception ends a rank's program.

    Attributes:
        rank: Which one.
        error: One line, such as ``ValueError: boom``.
        culprits: Ranks that it blames, because they made its collective fail.
    """

    rank: int
    error: str
    culprits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stopped:
    """Event: the operator asks for the job's end: the launcher got SIGINT, SIGTERM or SIGHUP."""

    signal: int


@dataclass(frozen=True, slots=True)
class CoordinatorLost:
    """Event: the coordinator is lost and no successor could take over: the job can't go on."""

    text: str


@dataclass(frozen=True, slots=True)
class Hosts:
    """Event: these hosts exist now.

    Attributes:
        usable: Slots of those on which ranks may be started.
        aside: Those that have failed, and are not used for a while.
    """

    usable: Mapping[str, int]
    aside: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RanksWaiting:
    """Event: no rank can be started yet, and no time limit runs: ``text`` names the launcher's reason to wait.

    An empty ``text`` ends that: ``start_timeout`` runs from then on.
    """

    text: str


@dataclass(frozen=True, slots=True)
class JobTick:
    """Event: time has passed; :attr:`Supervisor.deadline` may be due."""


Event = (
    Spawned
    | ProcessEnded
    | Unstartable
    | RankArrived
    | Connected
    | Formed
    | RankDisconnected
    | RankReturned
    | RanksKept
    | Reported
    | Stopped
    | CoordinatorLost
    | Hosts
    | RanksWaiting
    | JobTick
)

# -- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendSignal:
    """Effect: send a signal to the process groups of these ranks."""

    ranks: tuple[int, ...]
    number: int


@dataclass(frozen=True, slots=True)
class Notice:
    """Effect: one line for the operator."""

    text: str


@dataclass(frozen=True, slots=True)
class FailureReport:
    """Effect: show why the job fails.

    Attributes:
        rank: Rank that failed first.
        outcome: How it ended, or ``None`` if it has not ended by itself.
        error: Its exception in one line, if known.
        followers: Ranks that failed because of it.
        early: Ranks that ended well while ``rank`` still needed them, and so made it fail.
    """

    rank: int
    outcome: ExitStatus | None
    error: str = ""
    followers: tuple[int, ...] = ()
    early: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReportRankDeath:
    """Effect: report to the coordinator how a rank's process ended."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class RestartRank:
    """Effect: restart a rank under its old number."""

    rank: int


@dataclass(frozen=True, slots=True)
class StartOn:
    """Effect: start new ranks.

    Attributes:
        hosts: Host of each of them.
    """

    hosts: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class ReleaseRanks:
    """Effect: let these ranks go at the next commit of their training; at once if they don't train."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostUnusable:
    """Effect: a host can't be used now.

    Attributes:
        host: Its name.
        reason: Why, as a clause.
        hangs: Whether starts that were begun there hang, so that the launcher has to give them up.
    """

    host: str
    reason: str
    hangs: bool = False


@dataclass(frozen=True, slots=True)
class SetExpectedRanks:
    """Effect: the world is made of these ranks from now on."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    """Effect: the job is over, with this exit code."""

    code: int


Effect = (
    SendSignal
    | Notice
    | FailureReport
    | ReportRankDeath
    | RestartRank
    | StartOn
    | ReleaseRanks
    | HostUnusable
    | SetExpectedRanks
    | Finish
)
