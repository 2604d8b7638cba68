"""The life of one cell on several ranks, as a state machine without I/O.

A rank's part ends with its CellDone or with its death. The run ends when every rank's part has ended, or when the
user interrupts a second time and no longer wishes to wait for those that don't answer.

The first interrupt goes to all ranks. A line names each that has not answered after :data:`PATIENCE` seconds, and where it is.
The next interrupt is the last: it goes to the ranks that are left, and soon the run ends without them.

When one rank fails, the others get :data:`GRACE` seconds to end by themselves (their collectives are aborted by the
coordinator) and are interrupted then, so that the cell ends everywhere within a second. A death alone interrupts
no rank: a survivor that needs the dead rank gets an error from its collective, and elastic code goes on without it.

An elastic cell also goes on with ranks that join it while it runs, and without those that are let go. Deaths that it has
survived are no failure of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hvdlab.collectives.text import format_ranks
from hvdlab.kernel_ext.notebook.cells.cell_events import (
    AtPrompts,
    CollectiveStalled,
    DeadlineReached,
    Deliver,
    DoneArrived,
    Effect,
    Event,
    Finished,
    InterruptCell,
    InterruptRequested,
    Note,
    OutputArrived,
    PoolNews,
    PoolReleased,
    ProcessSeen,
    PromptAsked,
    PromptCancelled,
    RankBegan,
    RankDied,
    RankEnded,
    RanksJoined,
    RanksReleased,
    SendAcknowledge,
    StackArrived,
    TakenOver,
)
from hvdlab.kernel_ext.notebook.cells.results import CellResults, RankDeath, one_line
from hvdlab.kernel_ext.notebook.cells.stall_report import ANSWER_WITHIN, SEEN_WITHIN, ProbeRound, StallReport
from hvdlab.kernel_ext.notebook.elastic import Bounds, Participants, UnsyncedRank
from hvdlab.kernel_ext.notebook.output.stack_text import grouped
from hvdlab.kernel_ext.wire.cells import ACK_BYTES, CellDone, Chunk, Display
from hvdlab.kernel_ext.wire.channel import HandlerTable

PATIENCE = 1.7
"""Seconds after an interrupt until a line names the ranks that have not answered: we promise users that within two."""

ASK_BEFORE = ANSWER_WITHIN + SEEN_WITHIN
"""Seconds before that moment at which they are asked where they are."""

LAST_CHANCE = 1.0
"""Seconds between the last interrupt and giving up; enough to find out where the ranks are."""

AFTER_TIMEOUT = 10.0
"""Seconds after a time limit until ranks that do not answer its interrupt are given up: no user may be there to do it."""


class CellInterrupts:
    """The interrupts of one cell.

    Attributes:
        requests: How often the user interrupted.
        stopped: Ranks that were interrupted.
        gave_up: Whether the run no longer waits for the ranks that are left.
    """

    def __init__(self, places: ProbeRound) -> None:
        self._places = places
        self.requests = 0
        self.stopped: set[int] = set()
        self.gave_up = False
        #: When silent ranks are asked where they are, so that their answers are there at `_name_at`.
        self._ask_at: float | None = None
        #: When a line names the ranks that have not answered; None once it was shown, or after the last interrupt.
        self._name_at: float | None = None
        #: When the run ends without the ranks that are left: set by the last interrupt, or by the cell's time limit.
        self._give_up_at: float | None = None
        #: Reason of the last interrupt; empty if it was the user's.
        self._because = ""
        #: Whether that line was shown: then the user's next interrupt is the last one, even if it is the user's first.
        self._named = False

    @property
    def deadline(self) -> float | None:
        """When to call :meth:`time`."""
        limits = [t for t in (self._ask_at, self._name_at, self._give_up_at) if t is not None]
        return min(limits, default=None)

    def stop(self, running: Collection[int], now: float, because: str = "") -> list[Effect]:
        """Interrupt the ranks that have not ended the cell; ``because`` has the reason, unless the user asked for it."""
        self._because = because
        self.stopped |= set(running)
        # Times of an interrupt that is under way stay: the promise of `PATIENCE` counts from the first one.
        if self._name_at is None and self._give_up_at is None:
            self._ask_at, self._name_at = now + PATIENCE - ASK_BEFORE, now + PATIENCE
        return [InterruptCell(tuple(sorted(running)))]

    def time_is_up(self, running: Collection[int], now: float) -> list[Effect]:
        """Interrupt at the cell's time limit, and in the end give up without another interrupt by the user."""
        self._give_up_at = now + AFTER_TIMEOUT
        effects = self.stop(running, now)
        # From this interrupt on, also if an earlier one is under way, whose times `stop` leaves as they are.
        self._ask_at, self._name_at = now + PATIENCE - ASK_BEFORE, now + PATIENCE
        return effects

    def requested(self, running: Collection[int], now: float) -> list[Effect]:
        """Handle the user's interrupt of the cell."""
        self.requests += 1
        if self.requests == 1 and not self._named:
            return self.stop(running, now)
        if self.requests > 2:
            self.gave_up = True
            return []
        # A user that clicks twice in a hurry has not seen yet that the first interrupt works: that gets its full time.
        earliest = self._name_at if self._name_at is not None else now
        self._give_up_at = max(now + LAST_CHANCE, earliest)
        self._ask_at = self._name_at = None
        return [*self.stop(running, now), *self._places.ask(running, now)]

    def time(self, running: Collection[int], now: float) -> list[Effect]:
        """Handle the deadline."""
        effects: list[Effect] = []
        if self._ask_at is not None and now >= self._ask_at:
            self._ask_at = None
            effects += self._places.ask(running, now)
        if self._name_at is not None and now >= self._name_at:
            self._name_at = None
            effects.append(Note(self._unanswered(running), warning=True))
        if self._give_up_at is not None and now >= self._give_up_at:
            self._give_up_at = None
            self.gave_up = True
        return effects

    def _unanswered(self, running: Collection[int]) -> str:
        """Name the ranks that have not answered; from then on the next interrupt gives them up."""
        self._named = True
        late = tuple(sorted(running))
        said = f"{format_ranks(late)} {'has' if len(late) == 1 else 'have'} not answered the interrupt"
        if self._because:
            said = f"{self._because}, and {said}"
        remedy = f"interrupt{' again' if self.requests else ''} to stop waiting"
        places = grouped({rank: self._places.text(rank) for rank in late})
        return "\n".join([f"{said}; {remedy}", *(f"  {place}" for place in places)])


GRACE = 0.5
"""Seconds between a failure and the interrupt of the ranks that still run."""

ANNOUNCE = 0.5
"""Seconds after a death until a line reports it while the others go on; if the run ends before, its report has it."""


class CellState:
    """State of one run.

    Attributes:
        cell: Id of the run.
        running: Ranks whose part has not ended.
        deadline: When to send the next DeadlineReached, in the clock of ``now``; None if no time limit is running.
        finished: True once :class:`Finished` was returned; later events have no effect.
    """

    _events = HandlerTable()

    def __init__(
        self,
        cell: str,
        ranks: Sequence[int],
        *,
        label: str = "",
        now: float,
        timeout: float | None = None,
        stall_time: float | None = None,
        replaceable: bool = True,
        newcomers: Mapping[int, UnsyncedRank] | None = None,
        elastic: Bounds | None = None,
        ack_bytes: int = ACK_BYTES,
    ) -> None:
        if not ranks:
            raise ValueError("a cell needs at least one rank")
        self.cell, self.label, self.ranks = cell, label, tuple(sorted(set(ranks)))
        self.running = set(self.ranks)
        self.finished = False
        self._ack_bytes = ack_bytes
        #: Rank to its bytes at the last acknowledgement: a rank waits only while more than
        #: `ACK_BYTES` are not acknowledged.
        self._acked = dict.fromkeys(self.ranks, 0)
        self._timeout = timeout
        #: When the time limit passes; None without one, or once it has. The user's time at a prompt is added.
        self._timeout_at = None if timeout is None else now + timeout
        #: When the failure of one rank interrupts the others; None before one, and once any interrupt was sent.
        self._grace_at: float | None = None
        #: That failure, for the line about ranks that do not answer.
        self._failure = ""
        self._replaceable = replaceable
        self._newcomers = dict(newcomers or {})
        self._participants = None if elastic is None else Participants(elastic)
        self._places = ProbeRound()
        self._interrupts = CellInterrupts(self._places)
        self._stalls = StallReport(cell, self.ranks, self._places, stall_time, now)
        #: When a delayed interrupt goes to the ranks, unless `PoolReleased` comes before.
        self._interrupt_at: float | None = None
        #: Whether this process detaches: an interrupt that comes now is Jupyter's, before a shutdown, not the user's.
        self._released = False
        #: Since when a rank is at a prompt, where the cell's clocks stand; None while none is.
        self._asking_since: float | None = None
        #: When the deaths in `_unannounced` get a line each; None while there are none.
        self._announce_at: float | None = None
        self._unannounced: list[RankDeath] = []
        self._done: dict[int, CellDone] = {}
        self._deaths: dict[int, RankDeath] = {}
        #: Rank of another host to that host, and to the time here at which its report came.
        self._arrivals: dict[int, tuple[str, int]] = {}
        #: Rank to the display of its last expression: equal ones are shown once, when all ranks have ended.
        self._shown: dict[int, Display] = {}
        #: Ranks that still ran at the time limit.
        self._timed_out: tuple[int, ...] = ()
        #: Rank that was given up to the place where it was then.
        self._unanswered: dict[int, str] = {}

    @property
    def deadline(self) -> float | None:
        limits = [
            t
            for t in (
                *(
                    (self._timeout_at, self._grace_at, self._stalls.deadline)
                    if self._asking_since is None
                    else ()
                ),
                self._announce_at,
                self._interrupt_at,
                self._interrupts.deadline,
                self._places.deadline,
            )
            if t is not None
        ]
        return None if self.finished or not limits else min(limits)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; returns the effects to carry out, in order. Events of ranks whose part has ended are ignored."""
        if self.finished:
            return []
        effects: list[Effect] = self._events.call(self, event, now)
        if self._interrupts.gave_up:
            effects += self._give_up()
        if not self.running:
            self.finished = True
            if (
                self._participants is not None and self._participants.ended
            ):  # the report leaves these deaths out
                effects += self._announce()
            results = self._results()
            # The line about waiting ranks stands before the end of the output.
            effects = [*self._stalls.close(results.ok, now), *effects, Finished(results)]
        return effects

    # -- events -------------------------------------------------------------------------------------------------------

    @_events.handles(OutputArrived)
    def _output(self, event: OutputArrived, now: float) -> list[Effect]:
        if event.rank not in self.running:
            return []
        effects: list[Effect] = []
        if chunks := self._keep_result(event.rank, event.chunks):
            effects.append(Deliver(event.rank, chunks))
        if event.total - self._acked[event.rank] >= self._ack_bytes:
            self._acked[event.rank] = event.total
            effects.append(SendAcknowledge(event.rank, event.total))
        return effects

    @_events.handles(DoneArrived)
    def _rank_done(self, event: DoneArrived, now: float) -> list[Effect]:
        if event.rank not in self.running:
            return []
        self.running.discard(event.rank)
        if self._participants is not None and self._participants.left(event.rank, event.done):
            return self._left(event.rank)
        self._done[event.rank] = event.done
        if event.host:
            self._arrivals[event.rank] = event.host, event.when
        self._stalls.rank_ended(event.rank, now)
        error = event.done.error
        # Ranks that were interrupted fail because of that, which is no reason to interrupt the others once more.
        if error is not None and self._grace_at is None and not self._interrupts.stopped:
            self._grace_at = now + GRACE
            self._failure = f"rank {event.rank} failed with {one_line(error)}"
        return [RankEnded(event.rank, event.done)]

    @_events.handles(RankDied)
    def _rank_died(self, event: RankDied, now: float) -> list[Effect]:
        if event.rank not in self.running:
            return []
        self.running.discard(event.rank)
        if self._participants is not None and event.left and self._participants.left(event.rank, None):
            return self._left(event.rank)
        death = self._deaths[event.rank] = RankDeath(
            event.rank, event.reason, event.when, event.tail, event.detail
        )
        self._places.gone(event.rank)
        self._unannounced.append(death)
        if self._announce_at is None:
            self._announce_at = now + ANNOUNCE
        return [RankEnded(event.rank, None)]

    def _left(self, rank: int) -> list[Effect]:
        """Handle the end of a rank that was let go."""
        self._places.gone(rank)
        self.ranks = tuple(other for other in self.ranks if other != rank)
        return [RankEnded(rank, None), Note(f"rank {rank} has left; nothing is lost by that")]

    @_events.handles(RanksJoined)
    def _ranks_joined(self, event: RanksJoined, now: float) -> list[Effect]:
        participants, ranks = self._participants, [r for r in event.ranks if r not in self.running]
        if participants is None or not ranks:
            return []
        # First: one of these may take the number of a rank that has died, whose death is reported before the record is dropped.
        said = self._announce()
        self.running.update(ranks)
        self.ranks = tuple(sorted({*self.ranks, *ranks}))
        for rank in ranks:
            # It is a new process, whose bytes count from zero.
            self._acked[rank] = 0
            self._done.pop(rank, None)
            self._deaths.pop(rank, None)
            self._shown.pop(rank, None)
            self._newcomers.pop(rank, None)
        self._stalls.joined(ranks)
        return [*said, *map(RankBegan, ranks), Note(participants.joined(ranks, self.running))]

    @_events.handles(RanksReleased)
    def _ranks_released(self, event: RanksReleased, now: float) -> list[Effect]:
        ranks = [rank for rank in event.ranks if rank in self.running]
        if self._participants is None or not ranks:
            return []
        return [Note(self._participants.leaving(ranks))]

    @_events.handles(TakenOver)
    def _taken_over(self, event: TakenOver, now: float) -> list[Effect]:
        participants, leaving = self._participants, [rank for rank in event.leaving if rank in self.running]
        if participants is None:
            return []
        effects: list[Effect] = [Note(participants.leaving(leaving))] if leaving else []
        if said := participants.lost(self.running):
            effects.append(Note(said, warning=True))
        return effects

    def _announce(self) -> list[Effect]:
        """Report the ranks that have died, and that too few are left."""
        self._announce_at = None
        effects: list[Effect] = [Note(death.line, warning=True) for death in self._unannounced]
        self._unannounced.clear()
        if effects and self._participants is not None and (said := self._participants.lost(self.running)):
            effects.append(Note(said, warning=True))
        return effects

    @_events.handles(InterruptRequested)
    def _interrupt(self, event: InterruptRequested, now: float) -> list[Effect]:
        if not event.delay:
            return self._interrupt_ranks(now)
        if self._interrupt_at is None and not self._released:
            self._interrupt_at = now + event.delay
        return []

    @_events.handles(PoolReleased)
    def _pool_released(self, event: PoolReleased, now: float) -> list[Effect]:
        # A signal may be handled after the request that it precedes: interrupts that come later are dropped as well.
        self._released, self._interrupt_at = True, None
        return []

    def _interrupt_ranks(self, now: float) -> list[Effect]:
        self._interrupt_at = self._grace_at = None
        self._stalls.hush()
        return self._interrupts.requested(self.running, now)

    @_events.handles(DeadlineReached)
    def _time(self, event: DeadlineReached, now: float) -> list[Effect]:
        effects: list[Effect] = []
        # Before the limits: it ends the grace period, which would interrupt the same ranks a second time in this tick.
        if self._interrupt_at is not None and now >= self._interrupt_at:
            effects += self._interrupt_ranks(now)
        if self._asking_since is None:
            effects += self._limits(now)
        if self._announce_at is not None and now >= self._announce_at:
            effects += self._announce()
        return effects + self._look(now)

    def _limits(self, now: float) -> list[Effect]:
        """Interrupt ranks whose time is up."""
        effects: list[Effect] = []
        if self._timeout_at is not None and now >= self._timeout_at:
            self._timeout_at = self._grace_at = None
            self._timed_out = tuple(sorted(self.running))
            effects.append(
                Note(
                    f"timeout of {self._timeout:g} s reached; interrupting {format_ranks(self._timed_out)}",
                    warning=True,
                )
            )
            self._stalls.hush()
            effects += self._interrupts.time_is_up(self.running, now)
        if self._grace_at is not None and now >= self._grace_at:
            self._grace_at = None
            self._stalls.hush()
            effects += self._interrupts.stop(self.running, now, self._failure)
        return effects

    def _look(self, now: float) -> list[Effect]:
        """Pass the time on to the three that ask where ranks are: the probe round, the stalls and the interrupts."""
        effects: list[Effect] = []
        if self._places.deadline is not None and now >= self._places.deadline:
            over, effects = self._places.time()
            if over:
                effects += self._stalls.placed(self.running, now)
        late = self._stalls.deadline is not None and now >= self._stalls.deadline
        if late and self._asking_since is None:
            effects += self._stalls.time(self.running, now)
        if self._interrupts.deadline is not None and now >= self._interrupts.deadline:
            effects += self._interrupts.time(self.running, now)
        return effects

    @_events.handles(CollectiveStalled)
    def _stalled(self, event: CollectiveStalled, now: float) -> list[Effect]:
        return self._stalls.reported(event.stall, now)

    @_events.handles(StackArrived)
    def _stack(self, event: StackArrived, now: float) -> list[Effect]:
        over = self._places.answered(event.rank, event.stack)
        return self._stalls.placed(self.running, now) if over else []

    @_events.handles(ProcessSeen)
    def _process(self, event: ProcessSeen, now: float) -> list[Effect]:
        over = self._places.seen(event.rank, event.text)
        return self._stalls.placed(self.running, now) if over else []

    @_events.handles(PromptAsked)
    def _asked(self, event: PromptAsked, now: float) -> list[Effect]:
        return []  # CellHandle gives it to its desk

    @_events.handles(PromptCancelled)
    def _unasked(self, event: PromptCancelled, now: float) -> list[Effect]:
        return []  # CellHandle gives it to its desk

    @_events.handles(AtPrompts)
    def _at_prompts(self, event: AtPrompts, now: float) -> list[Effect]:
        """Stop the clocks of the cell, apart from those of an interrupt, while a user answers."""
        if event.ranks and self._asking_since is None:
            self._asking_since = now
        elif not event.ranks and self._asking_since is not None:
            since, self._asking_since = self._asking_since, None
            if self._timeout_at is not None:
                self._timeout_at += now - since
            if self._grace_at is not None:
                self._grace_at = now + GRACE
            self._stalls.put_off(now - since, now)
        return []

    @_events.handles(PoolNews)
    def _pool_news(self, event: PoolNews, now: float) -> list[Effect]:
        # A pool sends news only when something was lost, was replaced or failed.
        return [Note(event.text, warning=True)]

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _keep_result(self, rank: int, chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
        """Put the last expression's value aside: it is shown once, with those of the other ranks, at the end."""
        if not any(isinstance(chunk, Display) and chunk.result for chunk in chunks):
            return chunks
        rest = []
        for chunk in chunks:
            if isinstance(chunk, Display) and chunk.result:
                self._shown[rank] = chunk
            else:
                rest.append(chunk)
        return tuple(rest)

    def _give_up(self) -> list[Effect]:
        """End without the ranks that are left."""
        self._unanswered = {rank: self._places.text(rank) for rank in sorted(self.running)}
        self.running.clear()
        return [RankEnded(rank, None) for rank in self._unanswered]

    def _results(self) -> CellResults:
        if self._participants is not None and self._participants.ended:
            # Training has gone on without these and has come to its end: their deaths must not make the results fail.
            self.ranks = tuple(rank for rank in self.ranks if rank not in self._deaths)
            self._deaths.clear()
        return CellResults(
            self.ranks,
            self._done,
            shown=self._shown,
            deaths=self._deaths,
            arrivals=self._arrivals,
            stopped=self._interrupts.stopped,
            unanswered=self._unanswered,
            timed_out=self._timed_out,
            timeout=self._timeout,
            replaceable=self._replaceable,
            newcomers=self._newcomers,
            interrupted=self._interrupts.requests > 0,
            label=self.label,
        )
