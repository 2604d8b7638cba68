"""What the operator wants of a job, and what is known of its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from hvdlab.launch.exits import Outcome
from hvdlab.runner import events as e


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator wants. Times are in seconds.

    Attributes:
        hosts: Host of each rank; its length is the number of ranks.
        start_timeout: Time for all processes to be started.
        join_timeout: Time from the first rank's ``hvd.init()`` until the first world is there; ``None`` leaves that to the ranks.
        newcomer_timeout: Time from the start of a newcomer's process until its ``hvd.init()``, once there has been a world. No rank waits for
            it, but it keeps its slot and its number. ``None`` for no limit.
        settle: How long the launcher waits for the culprit's end.
        hang: How long a rank may take to end after an exception ended its program.
        grace: Time between SIGTERM and SIGKILL, and until a rank gets the former that was let go and has not joined.
        interrupt_grace: Time between SIGINT and SIGKILL.
        min_ranks: With how many ranks an elastic job goes on; ``None`` for a job that is not elastic.
        reset_limit: How many ranks are started anew in all.
        growth: How ranks are given to hosts that come and go; ``None`` for a job whose hosts are fixed. With a growth
            ``hosts`` is empty, and ``min_ranks`` is given.
    """

    hosts: tuple[str, ...]
    start_timeout: float = 30.0
    join_timeout: float | None = None
    newcomer_timeout: float | None = None
    settle: float = 1.0
    hang: float = 30.0
    grace: float = 5.0
    interrupt_grace: float = 30.0
    min_ranks: int | None = None
    reset_limit: int = 10
    growth: Growth | None = None


@dataclass(frozen=True, slots=True)
class Growth:
    """How many ranks a job has whose hosts come and go.

    Attributes:
        start: For how many slots the job waits at the beginning; after ``start_timeout``, ``min_ranks`` slots suffice.
        most: Ranks that the job has at most.
        wait: Seconds that the job waits for hosts while it has fewer than ``min_ranks`` ranks.
    """

    start: int
    most: int
    wait: float = 600.0


class Phase(Enum):
    RUNNING = "running"
    SETTLING = "settling"
    ENDING = "ending"
    DONE = "done"


@dataclass(slots=True)
class RankState:
    """What is known of a rank."""

    pid: int = 0
    outcome: Outcome | None = None
    report: e.Reported | None = None
    connected: bool = False
    joined: bool = False
    joined_at: int = 0
    """The event with which it was connected last, counted by the supervisor."""
    left_at: int | None = None
    """The event with which that connection, or the rank, has ended."""
    lost: str = ""
    """Why the coordinator gave it up."""
    returned: bool = False
    """Whether it was cut off, has connected again, and waits for the others to let it in."""
    anew: bool = False
    """Whether it was started while the job ran, in place of a lost rank or on a host that was found."""
    dismissed: bool = False
    """Whether it got SIGTERM since it came too late to take part."""
    host: str = ""
    """Where it was started."""
    start_by: float | None = None
    """When its process must run, if it was started while the job ran."""
    come_by: float | None = None
    """When it must have come to ``hvd.init()``, if it started once there had been a world."""
    given_up: bool = False
    """Whether it did not start or join in time: the others go on without it, and its process, if it gets or has one, is killed."""
    released: bool = False
    """Whether it leaves with its host."""
    leave_by: float | None = None
    """When it is ended if it leaves and has not joined by then; and when it is killed if it has not ended either."""
    ended: bool = False
    """Whether it got SIGTERM since it leaves and had not joined."""
    deadline: float | None = None
    """When it must have ended after its report."""

    @property
    def times(self) -> tuple[float | None, ...]:
        """When something is due."""
        return self.deadline, self.start_by, self.come_by, self.leave_by
