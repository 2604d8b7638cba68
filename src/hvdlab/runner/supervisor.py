"""Which rank failed first, when the others are ended, and the job's exit code: the launcher's decisions, without I/O.

::

    RUNNING ── a rank fails ──▶ SETTLING ── the culprit is known ─────▶ ENDING ── all have ended ──▶ DONE
       └────── Ctrl-C, SIGTERM, a host is lost, a timeout ────────────▶ ENDING

A rank often fails only because another one did: its collective is aborted. Its report names that other rank, so the
launcher waits a moment for the culprit's end before it reports which rank was first.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from hvdlab.collectives.text import format_ranks
from hvdlab.launch.hosts import LOCALHOST
from hvdlab.launch.processes import ExitStatus
from hvdlab.runner import events as e


@dataclass(slots=True)
class JobResult:
    """Outcome of a job.

    Attributes:
        code: Its exit code.
        failed: The rank that failed first, or ``None``.
        failure: The lines that the operator got on that failure, or without them all other lines of the supervisor.
        outcomes: End of each rank.
        results: The function's results, pickled, by rank.
        left: Ranks that were let go, and have not come back, or that were given up since they did not come.
        stopped: The signal that ended it, or 0.
    """

    code: int = 0
    failed: int | None = None
    failure: list[str] = field(default_factory=list)
    outcomes: dict[int, ExitStatus] = field(default_factory=dict)
    results: dict[int, bytes] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    stopped: int = 0


def origin_of(rank: int, culprits: Mapping[int, Sequence[int]]) -> int:
    """Follow the failed ranks that a failed rank blames, up to one that failed for a reason of its own.

    Args:
        rank: A rank that failed.
        culprits: For each rank that failed the ranks that it blames, which need not have failed.
    """
    seen = {rank}
    # Without `seen` two ranks that blame each other would keep this loop going for ever.
    while guilty := [r for r in culprits.get(rank, ()) if r in culprits and r not in seen]:
        rank = guilty[0]
        seen.add(rank)
    return rank


@dataclass(frozen=True, slots=True)
class Policy:
    """Limits of a job, as the operator has set them. Times are in seconds.

    Attributes:
        hosts: Host of each rank; its length is the number of ranks.
        start_timeout: Time for all processes to be started.
        join_timeout: Time from the first rank's ``hvd.init()`` until the first world is there; ``None`` leaves that to the ranks.
        newcomer_timeout: Time from the start of a newcomer's process until its ``hvd.init()``, once there has been a world. No rank waits for
            it, but it keeps its slot and its number. ``None`` for no limit.
        settle: How long the launcher waits for the culprit's end: the end of an interpreter with a framework takes seconds.
        hang: Time limit of a rank's end after an exception ended its program.
        grace: Time between SIGTERM and SIGKILL, and until a rank gets the former that was let go and has not joined.
        interrupt_grace: Time between SIGINT and SIGKILL.
        min_ranks: With how many ranks an elastic job continues; ``None`` for a job that is not elastic.
        reset_limit: How many ranks are restarted in all.
        growth: How ranks are given to hosts that come and go; ``None`` for a job whose hosts are fixed. With a growth
            ``hosts`` is empty, and ``min_ranks`` is given.
    """

    hosts: tuple[str, ...]
    start_timeout: float = 30.0
    join_timeout: float | None = None
    newcomer_timeout: float | None = None
    settle: float = 5.0
    hang: float = 30.0
    grace: float = 5.0
    interrupt_grace: float = 30.0
    min_ranks: int | None = None
    reset_limit: int = 10
    growth: Growth | None = None


@dataclass(frozen=True, slots=True)
class Growth:
    """Number of ranks of a job whose hosts come and go.

    Attributes:
        start: For how many slots the job waits at the beginning; after ``start_timeout``, ``min_ranks`` slots suffice.
        most: Ranks that the job has at most.
        wait: Seconds that the job waits for hosts while it has fewer than ``min_ranks`` ranks.
    """

    start: int
    most: int
    wait: float = 600.0


class JobPhase(Enum):
    RUNNING = "running"
    SETTLING = "settling"
    ENDING = "ending"
    DONE = "done"


@dataclass(slots=True)
class SupervisedRank:
    """The supervisor's record of a rank. Times are on the clock of :meth:`Supervisor.handle`."""

    pid: int = 0
    """Its process, or 0 before it runs."""
    outcome: ExitStatus | None = None
    """How its process has ended; ``None`` while it has not."""
    report: e.Reported | None = None
    """The exception that ended its program, if it reported one."""
    connected: bool = False
    """Whether it is connected to the coordinator."""
    joined: bool = False
    """Whether it has joined the job since its process was started."""
    joined_at: int = 0
    """The event with which it was connected last, counted by the supervisor."""
    left_at: int | None = None
    """The event with which that connection, or the rank, has ended."""
    lost: str = ""
    """Why the coordinator gave it up."""
    returned: bool = False
    """Whether it was cut off, has connected again, and waits for the others to let it in."""
    restarted: bool = False
    """Whether it was started while the job ran, in place of a lost rank or on a host that was found."""
    terminated_late: bool = False
    """Whether it got SIGTERM since it came too late to take part."""
    host: str = ""
    """Where it was started."""
    start_by: float | None = None
    """When its process must run, if it was started while the job ran."""
    init_deadline: float | None = None
    """When it must have come to ``hvd.init()``, if it started once there had been a world."""
    abandoned: bool = False
    """Whether it did not start or join in time: the others go on without it, and its process, if it gets or has one, is killed."""
    releasing: bool = False
    """Whether it leaves with its host, at the next commit."""
    kept: bool = False
    """Whether the coordinator keeps it in training all the same, since too few would be left."""
    release_deadline: float | None = None
    """When it is ended if it leaves and has not joined by then; and when it is killed if it has not ended either."""
    ended: bool = False
    """Whether it got SIGTERM since it leaves and had not joined."""
    deadline: float | None = None
    """When it must have ended after its report."""

    @property
    def times(self) -> tuple[float | None, ...]:
        """Return the times at which an action is due."""
        return self.deadline, self.start_by, self.init_deadline, self.release_deadline


@dataclass(slots=True)
class _Ending:
    code: int
    until: float
    killed: bool = False


class Supervisor:
    """State machine of a job. Feed it with :meth:`handle`; carry out the effects that it returns; call again with ``JobTick`` at :attr:`deadline`."""

    def __init__(self, policy: Policy, now: float) -> None:
        self.policy = policy
        self.phase = JobPhase.RUNNING
        self.ranks = [SupervisedRank(host=host) for host in policy.hosts]
        self.failed: int | None = None
        """The rank that made the job fail, once known."""
        #: When all processes must run; ``None`` once they do, or while a queue decides.
        self._start_by: float | None = now + policy.start_timeout
        #: With hosts that come and go: the hosts that are there; whether ranks were started; and, while there are fewer
        #: ranks than needed, when the job gives up.
        self._hosts = e.Hosts({})
        self._begun = policy.growth is None
        self._enough_by = None if policy.growth is None else now + policy.growth.wait
        #: Whether no rank is started any more.
        self._settled = False
        #: Whether there has been a world; until then ``_join_by`` is when all ranks must have joined, once one has.
        self._formed = False
        self._join_by: float | None = None
        #: The rank whose failure is being judged, or would be if too few stay, and until when its culprit's end is awaited.
        self._first = -1
        self._settle_by = 0.0
        #: The exit code of the job that ends, and when ranks that are left are killed.
        self._ending = _Ending(0, 0.0)
        #: Ranks that were restarted so far, at most ``policy.reset_limit``.
        self._resets = 0
        #: Ranks that ended before they had joined, each with its host, until one of that number joins there.
        self._unjoined: set[tuple[int, str]] = set()
        #: Exceptions of their own that ended the programs of ranks since a rank joined last, by rank.
        self._raised: dict[int, str] = {}
        #: Events so far: in this order ranks join and leave.
        self._events = 0
        #: Effects of the event that :meth:`handle` is at.
        self._effects: list[e.Effect] = []

    @property
    def living(self) -> tuple[int, ...]:
        """Return the ranks that have not ended."""
        return tuple(rank for rank, state in enumerate(self.ranks) if state.outcome is None)

    @property
    def expected(self) -> tuple[int, ...]:
        """Return the ranks of :attr:`living` that were not given up: the world's ranks."""
        return tuple(rank for rank in self.living if not self.ranks[rank].abandoned)

    @property
    def left(self) -> set[int]:
        """Return the ranks that were released or given up, without those on which the program has ended all the same."""
        return {
            rank
            for rank, state in enumerate(self.ranks)
            if (state.releasing or state.abandoned) and not self._has_finished(state)
        }

    @property
    def deadline(self) -> float | None:
        """Return when :class:`~hvdlab.runner.events.JobTick` is due, or ``None``."""
        if self.phase is JobPhase.DONE:
            return None
        if self.phase is JobPhase.ENDING:
            return self._ending.until
        if self.phase is JobPhase.SETTLING:
            return self._settle_by
        alive = [state for state in self.ranks if state.outcome is None]
        own = [when for state in alive for when in state.times]
        times = [when for when in (self._start_by, self._join_by, self._enough_by, *own) if when is not None]
        return min(times, default=None)

    def handle(self, event: e.Event, now: float) -> list[e.Effect]:
        """Handle one event. Nothing comes after :class:`~hvdlab.runner.events.Finish`."""
        self._effects = []
        self._events += 1
        if self.phase is JobPhase.DONE:
            return []
        match event:
            case e.Spawned(rank, pid):
                self._spawned(rank, pid, now)
            case e.ProcessEnded(rank, outcome):
                self._exited(rank, outcome, now)
            case e.Unstartable(ranks, text):
                self._unstartable(ranks, text, now)
            case e.Connected(rank):
                self._connected(rank, now)
            case e.RankArrived(rank):
                self.ranks[rank].init_deadline = None
                # Now, before the others let it in: the signals of `_end_released` would hit a member of their world then.
                self._release_again(rank)
            case e.Formed():
                self._formed, self._join_by = True, None
                for rank in self.expected:
                    self._await(rank, now)
            case e.RankDisconnected(rank, reason):
                self.ranks[rank].connected, self.ranks[rank].lost = False, reason
                self.ranks[rank].left_at = self._events
            case e.RankReturned(rank, seconds):
                self._returned(rank, seconds)
            case e.RanksKept(ranks, kept):
                self._keep(ranks, kept=kept)
            case e.Reported(rank):
                self._reported(rank, event, now)
            case e.Stopped(number):
                self._stop(number, now)
            case e.CoordinatorLost(text):
                self._abandon(f"{text}; ending {self._count()}", 1, now)
            case e.Hosts():
                self._hosts = event
                self._grow(now)
            case e.RanksWaiting(text):
                self._start_by = None if text else now + self.policy.start_timeout
            case e.JobTick():
                self._tick(now)
        # After every event: it may have been the end, or the loss, of the last rank that a report blames.
        self._settle(now)
        # After `_settle`: no job finishes while it is SETTLING, so if this event has settled it, it must be ENDING by now.
        self._maybe_finish()
        return self._effects

    # -- single events --------------------------------------------------------------------------------------------

    def _spawned(self, rank: int, pid: int, now: float) -> None:
        state = self.ranks[rank]
        state.pid, state.start_by = pid, None
        self._await(rank, now)
        # It was given up while it had no process that a signal could reach.
        if state.abandoned and state.outcome is None:
            self._effects.append(e.SendSignal((rank,), signal.SIGKILL))
        if self._begun and all(self.ranks[expected].pid for expected in self.expected):
            self._start_by = None

    def _await(self, rank: int, now: float) -> None:
        """Give a newcomer that has started, and has not joined, its time to come to ``hvd.init()``."""
        state, limit = self.ranks[rank], self.policy.newcomer_timeout
        started = bool(state.pid) and not (state.joined or state.abandoned)
        if self._formed and started and limit is not None and self.policy.min_ranks is not None:
            state.init_deadline = now + limit

    def _connected(self, rank: int, now: float) -> None:
        self.ranks[rank].connected = self.ranks[rank].joined = True
        self._raised.clear()
        self.ranks[rank].init_deadline = None
        self.ranks[rank].joined_at, self.ranks[rank].left_at = self._events, None
        self.ranks[rank].lost, self.ranks[rank].returned = "", False
        self._unjoined.discard((rank, self.ranks[rank].host))
        self._release_again(rank)
        self._grow(now)  # there may be ranks to spare now
        if self.policy.join_timeout is None or self._formed or self.phase is not JobPhase.RUNNING:
            return
        if all(self.ranks[expected].joined for expected in self.expected):
            self._join_by = None
        elif self._join_by is None:
            self._join_by = now + self.policy.join_timeout

    def _release_again(self, rank: int) -> None:
        """Release a rank that was released before it had come: since then the coordinator was perhaps told to expect it."""
        if self.ranks[rank].releasing:
            self._effects.append(e.ReleaseRanks((rank,)))

    def _keep(self, ranks: tuple[int, ...], *, kept: bool) -> None:
        for rank in ranks:
            self.ranks[rank].kept = kept
        if kept:
            verb = "stays" if len(ranks) == 1 else "stay"
            text = f"{format_ranks(ranks)} {verb} until others have come: fewer than {self.policy.min_ranks} (--min-np) would be left"
            self._effects.append(e.Notice(text))

    def _returned(self, rank: int, seconds: float) -> None:
        self.ranks[rank].returned = True
        self._effects.append(
            e.Notice(f"rank {rank} was cut off for {seconds:.0f} s, and is back with its memory")
        )
        self._end_late()

    def _reported(self, rank: int, report: e.Reported, now: float) -> None:
        state = self.ranks[rank]
        # A report can come after the end of its process, and so after its successor's start: until that has joined, none is its own.
        if state.report is None and (state.joined or not state.restarted):
            state.report = report
            state.deadline = now + self.policy.hang

    def _exited(self, rank: int, outcome: ExitStatus, now: float) -> None:
        state = self.ranks[rank]
        if state.outcome is not None:
            return
        state.outcome = outcome
        # If its connection was lost before, its part in the job ended then: `_with_finished` compares spans of connections.
        if state.left_at is None:
            state.left_at = self._events
        # Only now, since the end is recorded in any case: `living`, and so the end of the job, depend on it.
        if self.phase is JobPhase.ENDING:
            return
        if self._start_by is not None and all(self.ranks[expected].pid for expected in self.expected):
            self._start_by = None
        if state.abandoned:  # the others know already that it does not come
            self._effects.append(e.ReportRankDeath(rank, str(outcome)))
            self._end_late()
            self._grow(now)
            return
        if self.policy.growth is not None and not (state.joined or outcome.ok):
            self._effects.append(
                e.SetExpectedRanks(self.expected)
            )  # otherwise ranks that wait for it would fail at the report of its end
        self._effects.append(
            e.ReportRankDeath(rank, str(outcome) if not outcome.ok else "its program has ended")
        )
        if state.releasing and self.phase is JobPhase.RUNNING and not self._has_finished(state):
            self._effects += [
                e.Notice(f"rank {rank} has left {state.host}"),
                e.SetExpectedRanks(self.expected),
            ]
            if self._has_too_few():
                # It was leaving already when the others lost the last rank that they could spare.
                self._judge(self._first, now)
            else:
                self._grow(now)
            return
        if outcome.ok or self.phase is not JobPhase.RUNNING:
            self._end_late()
            return
        if self._fails_alike(rank):
            self._effects.append(
                e.Notice("all ranks failed with the same exception: starting them anew would not help")
            )
            self._fail(rank, now)
            return
        if self.policy.growth is not None and self._go_on(rank, outcome, now):
            return
        if (
            self.policy.growth is None
            and self.policy.min_ranks is not None
            and self._replace(rank, outcome, now)
        ):
            return
        self._judge(rank, now)

    def _judge(self, rank: int, now: float) -> None:
        """End the job for the failure of this rank, as soon as it is known which rank failed first."""
        self.phase = JobPhase.SETTLING
        self._first = rank
        self._settle_by = now + self.policy.settle

    def _fails_alike(self, rank: int) -> bool:
        """Return whether an elastic job has no rank left that did not fail by the same exception of its own program.

        No rank is left then whose memory the others could go on with, and the same program would fail again.
        """
        report = self.ranks[rank].report
        if self.policy.min_ranks is None or report is None or report.culprits:
            return False
        self._raised[rank] = report.error
        ranks = [
            r for r, state in enumerate(self.ranks) if state.joined or state.restarted or r in self._raised
        ]
        return len(ranks) > 1 and all(self._raised.get(r) == report.error for r in ranks)

    def _replace(self, rank: int, outcome: ExitStatus, now: float) -> bool:
        """Restart a lost rank of an elastic job, or continue without it. Returns whether the job continues."""
        assert self.policy.min_ranks is not None
        done = self._is_over
        known = self.ranks[rank].joined or self.ranks[rank].restarted
        if known and not done and self._resets < self.policy.reset_limit:
            self._resets += 1
            host, start_by = self.ranks[rank].host, now + self.policy.start_timeout
            self.ranks[rank] = SupervisedRank(host=host, restarted=True, start_by=start_by)
            every = self.expected  # without lost ranks that were not restarted
            text = f"rank {rank}: {outcome}; starting it anew ({self._resets} of {self.policy.reset_limit})"
            self._effects += [e.Notice(text), e.SetExpectedRanks(every), e.RestartRank(rank)]
            return True
        if self._well() < self.policy.min_ranks and not (done and self._is_late(rank)):
            return False
        self._effects += [
            e.Notice(f"rank {rank}: {outcome}; going on without it"),
            e.SetExpectedRanks(self.expected),
        ]
        return True

    def _well(self) -> int:
        """Return how many ranks can continue: those that live and those whose program has ended well."""
        well = [state for state in self.ranks if state.outcome is None or state.outcome.ok]
        return sum(not state.abandoned for state in well)

    # -- ranks that do not come -----------------------------------------------------------------------------------

    def _named(self, ranks: Sequence[int]) -> str:
        """Return these ranks, and the hosts where they were to be."""
        hosts = [self.ranks[rank].host for rank in ranks]
        where = ", ".join(dict.fromkeys(host for host in hosts if host not in ("", LOCALHOST)))
        return format_ranks(list(ranks)) + (f" on {where}" if where else "")

    def _give_up(self, ranks: Sequence[int], text: str, now: float) -> None:
        """Have the job go on without these ranks, which did not start or join in time, or end it if too few are left."""
        least, left = self.policy.min_ranks, self._well() - len(ranks)
        goes_on = least is not None and (self.policy.growth is not None or left >= least)
        for rank in ranks:
            self.ranks[rank].start_by = self.ranks[rank].init_deadline = None
            # As the job ends it waits for processes, which can still report, but not for ranks without a process.
            self.ranks[rank].abandoned = goes_on or not self.ranks[rank].pid
        if not goes_on:
            self._abandon(text if least is None else f"{text}, and --min-np is {least}", 1, now)
            return
        it = "it" if len(ranks) == 1 else "them"
        self._effects += [e.Notice(f"{text}; going on without {it}"), e.SetExpectedRanks(self.expected)]
        if running := tuple(rank for rank in ranks if self.ranks[rank].pid):
            self._effects.append(e.SendSignal(running, signal.SIGKILL))
        if self.policy.growth is not None:
            for host in dict.fromkeys(self.ranks[rank].host for rank in ranks):
                its = [rank for rank in ranks if self.ranks[rank].host == host]
                hangs = not self._runs_on(host)
                self._put_aside(host, f"{format_ranks(its)} did not come to hvd.init()", hangs=hangs)
            self._grow(now)

    # -- hosts that come and go -----------------------------------------------------------------------------------

    def _unstartable(self, ranks: tuple[int, ...], text: str, now: float) -> None:
        if self.policy.growth is not None and self.phase is JobPhase.RUNNING:
            failed = [rank for rank in ranks if rank in self.expected and not self.ranks[rank].releasing]
            for host in dict.fromkeys(self.ranks[rank].host for rank in failed):
                self._put_aside(host, text)
            if failed and not (self._is_over or self._settled):
                for rank in failed:
                    self.ranks[rank].outcome = ExitStatus(1, text=text)
                # Those that have never joined are no members that have died: ranks that wait for them need not fail.
                self._effects += [e.ReportRankDeath(rank, text) for rank in failed if self.ranks[rank].joined]
                self._effects.append(e.SetExpectedRanks(self.expected))
                # But they may have connected, and the connection of such a one would keep out the process that is started in its place.
                self._effects += [
                    e.ReportRankDeath(rank, text) for rank in failed if not self.ranks[rank].joined
                ]
                self._grow(now)
                # Those that were let go meanwhile have ended with them, and otherwise the others would wait for them for ever.
                ranks = tuple(rank for rank in ranks if rank not in failed)
        for rank in ranks:
            self._exited(rank, ExitStatus(1, text=text), now)

    def _put_aside(self, host: str, reason: str, *, hangs: bool = False) -> None:
        """Use a host no more until the table of hosts allows it."""
        # At once, not only when the table of hosts answers: the `_grow` of this very event would start ranks there again.
        usable = {name: slots for name, slots in self._hosts.usable.items() if name != host}
        self._hosts = e.Hosts(usable, self._hosts.aside | {host})
        self._effects.append(e.HostUnusable(host, reason, hangs))

    def _runs_on(self, host: str) -> bool:
        """Return whether a process of a rank is known to run on a host: otherwise a signal could reach none."""
        return any(self.ranks[rank].pid and self.ranks[rank].host == host for rank in self.living)

    @property
    def _is_over(self) -> bool:
        """Return whether the program has ended on a rank that neither left nor was given up."""
        return any(map(self._has_finished, self.ranks))

    def _go_on(self, rank: int, outcome: ExitStatus, now: float) -> bool:
        """Continue without a lost rank, and restart it where a host has room. Returns whether the job continues."""
        state = self.ranks[rank]
        spent = self._is_over or self._resets >= self.policy.reset_limit
        if spent:
            self._settled = True
            self._first = rank
            # With those that were released: the coordinator keeps as many of them as are needed.
            if self._has_too_few():
                return False
            self._effects.append(e.Notice(f"rank {rank}: {outcome}; going on without it"))
        else:
            self._resets += 1
            limit = self.policy.reset_limit
            self._effects.append(
                e.Notice(f"rank {rank}: {outcome}; starting it anew ({self._resets} of {limit})")
            )
            if not state.joined:
                self._failed_to_join(rank, state.host, outcome)
        self._effects.append(e.SetExpectedRanks(self.expected))
        self._grow(now)
        return True

    def _has_too_few(self) -> bool:
        """Return whether the job ends since the restarts are spent and too few ranks stay, and say so."""
        stay, least, limit = len(self.expected), self.policy.min_ranks or 1, self.policy.reset_limit
        if not self._settled or self._is_over or stay >= least:
            return False
        number = f"{stay} rank" + (" stays" if stay == 1 else "s stay")
        text = f"{number}, --min-np is {least}, and no rank is started anew any more (--reset-limit {limit})"
        self._effects.append(e.Notice(text))
        return True

    def _failed_to_join(self, rank: int, host: str, outcome: ExitStatus) -> None:
        """Count a rank that ended on this host before it had joined. Once that can be chance, as when its cable is pulled just then."""
        if (rank, host) in self._unjoined:
            self._put_aside(host, f"rank {rank} failed there twice before it had joined ({outcome})")
        self._unjoined.add((rank, host))

    def _grow(self, now: float) -> None:
        """Start ranks on hosts that have room, and release ranks of hosts that are gone or have fewer slots now."""
        growth = self.policy.growth
        if growth is None or self.phase is not JobPhase.RUNNING or self._settled or self._is_over:
            return
        least = self.policy.min_ranks or 1
        if not self._begun and not self._may_begin(growth, least, now):
            return
        placed = {rank: self.ranks[rank].host for rank in self.living}
        # Those that were given up keep their numbers and slots until their processes have ended, but count no more.
        leaving = [rank for rank in placed if self.ranks[rank].releasing or self.ranks[rank].abandoned]
        joined = [rank for rank in placed if self.ranks[rank].joined]
        plan = changes(self._hosts, placed, leaving, joined, least, growth.most)
        if plan.start:
            self._start_on(plan.start, now)
        # After the first start: a rank that `_start_on` starts later counts as restarted, and those of the beginning must not.
        self._begun = True
        if plan.release:
            for rank in plan.release:
                self.ranks[rank].releasing = True
                # One that has not joined has nothing to finish, but it may be let in at this very moment.
                self.ranks[rank].release_deadline = (
                    None if self.ranks[rank].joined else now + self.policy.grace
                )
            for host in dict.fromkeys(self.ranks[rank].host for rank in plan.release):
                its = [rank for rank in plan.release if self.ranks[rank].host == host]
                why = "has fewer slots now" if host in self._hosts.usable else "is not found any more"
                verb = "leaves" if len(its) == 1 else "leave"
                text = f"{host} {why}: {format_ranks(its)} {verb} at the next commit"
                self._effects.append(e.Notice(text))
            self._effects.append(e.ReleaseRanks(plan.release))
        self._count_on(least, growth, now)

    def _may_begin(self, growth: Growth, least: int, now: float) -> bool:
        room = sum(self._hosts.usable.values())
        late = self._start_by is not None and now >= self._start_by
        return room >= growth.start or (late and room >= least)

    def _start_on(self, hosts: dict[int, str], now: float) -> None:
        for rank, host in sorted(hosts.items()):
            # `releasing` keeps the good outcome of these records from counting as an end of the program (`_has_finished`).
            while len(self.ranks) <= rank:
                self.ranks.append(
                    SupervisedRank(outcome=ExitStatus(0), releasing=True)
                )  # a number without a rank
            self.ranks[rank] = SupervisedRank(
                host=host, restarted=self._begun, start_by=now + self.policy.start_timeout
            )
        if self._begun:
            where = ", ".join(dict.fromkeys(hosts.values()))
            self._effects.append(e.Notice(f"starting {format_ranks(sorted(hosts))} on {where}"))
        self._start_by = None
        self._effects += [e.SetExpectedRanks(self.expected), e.StartOn(hosts)]

    def _count_on(self, least: int, growth: Growth, now: float) -> None:
        """Wait for hosts while there are too few ranks."""
        if len(self.expected) >= least:
            self._enough_by = None
        elif self._enough_by is None:
            self._enough_by = now + growth.wait
            text = f"{self._count()} left, and --min-np is {least}: waiting up to {growth.wait:g} s for hosts"
            self._effects.append(e.Notice(text))

    def _give_up_unstarted(self, ranks: Sequence[int], now: float) -> None:
        """Give up ranks whose processes do not run in time."""
        hosts = ", ".join(dict.fromkeys(self.ranks[rank].host for rank in ranks))
        within = f"within {self.policy.start_timeout:g} s"
        self._give_up(ranks, f"{format_ranks(list(ranks))} could not be started on {hosts} {within}", now)

    def _give_up_starts(self, now: float) -> None:
        late = [r for r in self.expected if (by := self.ranks[r].start_by) is not None and now >= by]
        if self.policy.growth is None:
            if late:
                self._give_up_unstarted(late, now)
            return
        for host in dict.fromkeys(self.ranks[rank].host for rank in late):
            its = [rank for rank in late if self.ranks[rank].host == host]
            others = self._runs_on(host)
            text = f"{format_ranks(its)} did not start there within {self.policy.start_timeout:g} s"
            self._put_aside(host, text, hangs=not others)
            for rank in its:
                # To give the host up would end those that run there, so it is waited for; otherwise its end will be reported.
                self.ranks[rank].start_by = now + self.policy.start_timeout if others else None

    def _give_up_newcomers(self, now: float) -> None:
        """Give up newcomers that have started and do not come to ``hvd.init()``: others can have their numbers and slots."""
        due = [
            rank for rank in self.living if (by := self.ranks[rank].init_deadline) is not None and now >= by
        ]
        # Also for those that leave: `deadline` would otherwise stay in the past, and the launcher would tick without a pause.
        for rank in due:
            self.ranks[rank].init_deadline = None
        late = [rank for rank in due if not self.ranks[rank].releasing]  # those that leave are ended anyway
        if late and self.phase is JobPhase.RUNNING:
            within = f"within {self.policy.newcomer_timeout:g} s"
            self._give_up(late, f"{self._named(late)} did not come to hvd.init() {within}", now)

    def _end_released(self, now: float) -> None:
        """End ranks that were let go and have not joined by then, so that the coordinator could not reach them; kill those that do not end."""
        due = [
            rank
            for rank in self.living
            if (by := self.ranks[rank].release_deadline) is not None and now >= by
        ]
        signals: dict[int, list[int]] = {}
        for rank in due:
            state = self.ranks[rank]
            # Also if the rank has joined, since a time in the past would make each tick due at once.
            state.release_deadline = None
            if not state.joined:
                signals.setdefault(signal.SIGKILL if state.ended else signal.SIGTERM, []).append(rank)
                state.release_deadline = None if state.ended else now + self.policy.grace
                state.ended = True
        self._effects += [e.SendSignal(tuple(ranks), number) for number, ranks in signals.items()]

    def _is_late(self, rank: int) -> bool:
        """Return whether a rank was restarted and has not joined yet, or was cut off and has not joined since.

        One that has joined has not taken part, either, if all others had left by then: the program ends on them, and it
        would wait for them, or begin from the start, alone.
        """
        state = self.ranks[rank]
        if not (state.restarted and state.joined):
            return state.restarted or state.returned
        with_finished = self._with_finished()
        return bool(with_finished) and rank not in with_finished

    def _with_finished(self) -> set[int]:
        """Return the ranks that lived together with one on which the program has ended, or with one of those, and so on."""
        spans = {
            rank: (state.joined_at, self._events if state.left_at is None else state.left_at)
            for rank, state in enumerate(self.ranks)
            if state.joined
        }
        found = {rank for rank in spans if self._has_finished(self.ranks[rank])}
        todo = list(found)
        while todo:
            begin, end = spans[todo.pop()]
            met = [r for r, (first, last) in spans.items() if r not in found and first < end and begin < last]
            found.update(met)
            todo += met
        return found

    @staticmethod
    def _has_finished(state: SupervisedRank) -> bool:
        """Return whether the program has ended on a rank that neither left nor was given up."""
        ended = state.outcome is not None and state.outcome.ok
        return ended and not (state.abandoned or (state.releasing and not state.kept))

    def _end_late(self) -> None:
        """End the ranks that have still to come (back), once the program has ended on a rank: they could not take part any more."""
        if not self._is_over:
            return
        late = tuple(
            rank for rank in self.expected if self._is_late(rank) and not self.ranks[rank].terminated_late
        )
        if late and self.phase is JobPhase.RUNNING:
            for rank in late:
                self.ranks[rank].terminated_late = True
            self._effects += [
                e.Notice(f"{format_ranks(late)} came back too late to take part; ending"),
                e.SendSignal(late, signal.SIGTERM),
            ]

    def _stop(self, number: int, now: float) -> None:
        name = signal.Signals(number).name
        if self.phase is JobPhase.ENDING:
            if not self._ending.killed:
                self._effects.append(e.Notice(f"{name} again: killing {self._count()}"))
                self._kill(now)
            return
        what = "interrupted" if number == signal.SIGINT else f"got {name}"
        self._effects.append(e.Notice(f"{what}; ending {self._count()} (once more to kill)"))
        self._effects.append(e.SendSignal(self.living, number))
        wait = self.policy.interrupt_grace if number == signal.SIGINT else self.policy.grace
        self.phase, self._ending = JobPhase.ENDING, _Ending(128 + number, now + wait)

    def _tick(self, now: float) -> None:
        if self.phase is JobPhase.ENDING and now >= self._ending.until:
            if self._ending.killed:  # stuck in the operating system's kernel: the launcher can do no more
                self._effects.append(e.Notice(f"{format_ranks(self.expected)} can't be killed; leaving"))
                self._finish()
            else:
                self._effects.append(e.Notice(f"{format_ranks(self.expected)} did not end in time; killing"))
                self._kill(now)
        elif self.phase is JobPhase.RUNNING:
            self._check_times(now)

    def _check_times(self, now: float) -> None:
        self._give_up_starts(now)
        self._give_up_newcomers(now)
        if self.phase is not JobPhase.RUNNING:
            return
        self._end_released(now)
        if not self._begun and self._start_by is not None and now >= self._start_by:
            self._grow(now)
            # With a time in the past every tick would be due at once; meanwhile each answer of the source
            # is tried as well.
            self._start_by = None if self._begun else now + 1.0
        if self._enough_by is not None and now >= self._enough_by:
            least, growth = self.policy.min_ranks or 1, self.policy.growth
            waited = 0.0 if growth is None else growth.wait
            text = f"there were no hosts for {least} ranks (--min-np) within {waited:g} s (--elastic-timeout)"
            self._abandon(f"{text}; ending {self._count()}", 1, now)
        elif self._begun and self._start_by is not None and now >= self._start_by:
            self._start_by = None
            self._give_up_unstarted([rank for rank in self.expected if not self.ranks[rank].pid], now)
        elif self._join_by is not None and now >= self._join_by:
            missing = [rank for rank in self.expected if not self.ranks[rank].joined]
            self._join_by = None
            if missing:
                text = (
                    f"{self._named(missing)} did not come to hvd.init() within {self.policy.join_timeout:g} s"
                )
                self._give_up(missing, text, now)
        else:
            late = [r for r in self.living if self.ranks[r].deadline and now >= (self.ranks[r].deadline or 0)]
            if late and self.policy.min_ranks is None:
                self._fail(late[0], now)
            for rank in late if self.policy.min_ranks is not None else ():
                self._kill_failed(rank)

    def _kill_failed(self, rank: int) -> None:
        """Have the process of a rank end whose program has failed: an elastic job goes on without it."""
        state = self.ranks[rank]
        # The process lives until it is reaped: with its old time the next tick would be due at once, and report it again.
        state.deadline = None
        error = state.report.error if state.report is not None else ""
        text = f"rank {rank} has failed ({error}) and did not end within {self.policy.hang:g} s; killing it"
        self._effects += [e.Notice(text), e.SendSignal((rank,), signal.SIGKILL)]

    # -- the end --------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Find out which rank failed first, once every rank that the report blames has ended or is lost."""
        if self.phase is not JobPhase.SETTLING:
            return
        state = self.ranks[self._first]
        blamed = state.report.culprits if state.report is not None else ()
        heard = not state.connected
        if (heard and not any(self._is_living(rank) for rank in blamed)) or now >= self._settle_by:
            self._fail(self._first, now)

    def _is_living(self, rank: int) -> bool:
        return 0 <= rank < len(self.ranks) and self.ranks[rank].outcome is None and not self.ranks[rank].lost

    def _fail(self, rank: int, now: float) -> None:
        culprit = self._origin(rank)
        state = self.ranks[culprit]
        followers = [
            other
            for other, its in enumerate(self.ranks)
            if other != culprit and its.report is not None and self._origin(other) == culprit
        ]
        outcome = state.outcome
        error = state.report.error if state.report is not None else state.lost
        self.failed = culprit
        failure = e.FailureReport(culprit, outcome, error, tuple(followers), self._early(culprit))
        self._effects.append(failure)
        self._end(outcome.exit_code if outcome is not None else 1, now)

    def _origin(self, rank: int) -> int:
        """Return the rank that failed for a reason of its own and caused, over others perhaps, the failure of this one."""
        failed = {r: state.report for r, state in enumerate(self.ranks) if self._has_failed(r) or r == rank}
        return origin_of(
            rank, {r: report.culprits if report is not None else () for r, report in failed.items()}
        )

    def _has_failed(self, rank: int) -> bool:
        state = self.ranks[rank]
        if state.outcome is None:
            return state.report is not None or bool(state.lost)
        return not state.outcome.ok

    def _early(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that ended well (exit code 0) and so made this one fail."""
        report = self.ranks[rank].report
        if (
            report is None and self.ranks[rank].joined
        ):  # it may have waited for ranks that ended without joining
            ends = enumerate(self.ranks)
            return tuple(
                r for r, its in ends if its.outcome is not None and its.outcome.ok and not its.joined
            )
        blamed = report.culprits if report is not None else ()
        outcomes = [(r, self.ranks[r].outcome) for r in blamed if 0 <= r < len(self.ranks)]
        return tuple(r for r, outcome in outcomes if outcome is not None and outcome.ok)

    def _abandon(self, text: str, code: int, now: float) -> None:
        # A job that is ending already keeps its first reason and its exit code.
        if self.phase in (JobPhase.RUNNING, JobPhase.SETTLING):
            self._effects.append(e.Notice(text))
            self._end(code, now)

    def _end(self, code: int, now: float) -> None:
        self.phase, self._ending = JobPhase.ENDING, _Ending(code, now + self.policy.grace)
        if self.living:
            self._effects.append(e.SendSignal(self.living, signal.SIGTERM))

    def _kill(self, now: float) -> None:
        self._ending.killed, self._ending.until = True, now + self.policy.grace
        self._effects.append(e.SendSignal(self.living, signal.SIGKILL))

    def _maybe_finish(self) -> None:
        # A rank that was given up can lack a process to end; closing the starter ends the rest of it.
        if self.phase is JobPhase.DONE or self.expected or self.phase is JobPhase.SETTLING:
            return
        if any(isinstance(effect, e.RestartRank) for effect in self._effects):
            return
        if self.phase is JobPhase.RUNNING and self._enough_by is not None and not self._is_over:
            return  # the job waits for hosts
        self._finish()

    def _finish(self) -> None:
        code = self._ending.code if self.phase is JobPhase.ENDING else 0
        self.phase = JobPhase.DONE
        self._effects.append(e.Finish(code))

    def _count(self) -> str:
        number = len(self.expected)
        return f"{number} rank" + ("" if number == 1 else "s")


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes that the supervisor makes now.

    Attributes:
        start: Host of each rank that is started.
        release: Ranks that leave, since their host is not there any more, or has fewer slots.
    """

    start: dict[int, str]
    release: tuple[int, ...]


def changes(
    hosts: e.Hosts,
    placed: Mapping[int, str],
    leaving: Collection[int],
    joined: Collection[int],
    least: int,
    most: int,
) -> Changes:
    """Fill the hosts one after the other, and empty those that are gone.

    A rank that runs is never moved: it would lose its memory. New ranks get the lowest numbers that are free. Ranks of
    hosts that are gone stay as long as fewer than ``least`` would be left: the source of hosts may be wrong, and if it is
    not, the job survives their loss like any other. Ranks that have joined stay until as many others have: those that
    were only started may never come.

    Args:
        hosts: Slots of the hosts on which ranks may be started, and the hosts that are put aside, where none is released either.
        placed: Host of each rank that lives, or is being started.
        leaving: Those of them that were released already.
        joined: Those of them that take part in the job.
        least, most: How many ranks the job needs, and may have.
    """
    staying = {rank: host for rank, host in placed.items() if rank not in leaving}
    by_host: dict[str, list[int]] = {}
    for rank in sorted(staying):
        by_host.setdefault(staying[rank], []).append(rank)
    surplus = [
        rank
        for host, ranks in by_host.items()
        if host not in hosts.aside
        for rank in ranks[hosts.usable.get(host, 0) :]
    ]
    spare = max(0, len(staying) - least)
    spare_joined = max(0, sum(rank in joined for rank in staying) - least)
    highest_first = sorted(surplus, reverse=True)
    kept = [rank for rank in highest_first if rank in joined][spare_joined:]
    release = tuple(sorted([rank for rank in highest_first if rank not in kept][:spare]))
    # With the ranks that leave: until their processes have ended they occupy their slots, and their numbers are not free.
    taken, start = Counter(placed.values()), dict[int, str]()
    room = most - (len(staying) - len(release))
    number = 0
    for host, slots in hosts.usable.items():
        for _ in range(min(slots - taken[host], room - len(start))):
            while number in placed or number in start:
                number += 1
            start[number] = host
    return Changes(start, release)
