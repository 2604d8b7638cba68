"""The life of one cell on several ranks, as a state machine without I/O.

A rank's part ends with its CellDone or with its death. The run ends when every rank's part has ended, or when the
user interrupts a second time and no longer wants to wait for those that don't answer.

When one rank fails, the others get :data:`GRACE` seconds to end by themselves (their collectives are aborted by the
coordinator) and are interrupted then, so that the cell ends everywhere within a second. A death alone interrupts
no rank: a survivor that needs the dead rank gets an error from its collective, and elastic code goes on without it.

An elastic cell also goes on with ranks that join it while it runs, and without those that are let go. Deaths that it has
survived are no failure of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import singledispatchmethod

from hvdlab.collectives.errors import format_ranks
from hvdlab.kernel_ext.cells.elastic import Bounds, Participants
from hvdlab.kernel_ext.cells.events import (
    Asked,
    AtPrompts,
    Deliver,
    DoneArrived,
    Effect,
    Event,
    Finished,
    InterruptRequested,
    Note,
    OutputArrived,
    PoolNews,
    PoolReleased,
    ProcessSeen,
    RankBegan,
    RankDied,
    RankEnded,
    RanksJoined,
    RanksReleased,
    SendCredit,
    StackArrived,
    Stalled,
    TakenOver,
    TimePassed,
    Unasked,
)
from hvdlab.kernel_ext.cells.interrupts import Interrupts
from hvdlab.kernel_ext.cells.places import Places
from hvdlab.kernel_ext.cells.results import CellResults, Death, one_line
from hvdlab.kernel_ext.cells.stalls import Stalls
from hvdlab.kernel_ext.newcomers import Newcomer
from hvdlab.kernel_ext.wire.cells import CellDone, Chunk, Display

GRACE = 0.5
"""Seconds between a failure and the interrupt of the ranks that still run."""

ANNOUNCE = 0.5
"""Seconds after a death until a line says so while the others go on; if the run ends before, its report says it."""

ACK_BYTES = 1 << 20
"""Output taken from a rank between two credits."""


class CellRun:
    """State of one run.

    Attributes:
        cell: Id of the run.
        running: Ranks whose part has not ended.
        deadline: When to send the next TimePassed, in the clock of ``now``; None if no time limit is running.
        finished: True once :class:`Finished` was returned; later events have no effect.
    """

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
        newcomers: Mapping[int, Newcomer] | None = None,
        elastic: Bounds | None = None,
        ack_bytes: int = ACK_BYTES,
    ) -> None:
        if not ranks:
            raise ValueError("a cell needs at least one rank")
        self.cell, self.label, self.ranks = cell, label, tuple(sorted(set(ranks)))
        self.running = set(self.ranks)
        self.finished = False
        self._ack_bytes = ack_bytes
        self._acked = dict.fromkeys(self.ranks, 0)
        self._timeout = timeout
        self._timeout_at = None if timeout is None else now + timeout
        self._grace_at: float | None = None
        self._failure = ""
        self._replaceable = replaceable
        self._newcomers = dict(newcomers or {})
        self._participants = None if elastic is None else Participants(elastic)
        self._places = Places()
        self._interrupts = Interrupts(self._places)
        self._stalls = Stalls(cell, self.ranks, self._places, stall_time, now)
        self._interrupt_at: float | None = None
        self._released = False
        self._asking_since: float | None = None
        self._announce_at: float | None = None
        self._unannounced: list[Death] = []
        self._done: dict[int, CellDone] = {}
        self._deaths: dict[int, Death] = {}
        self._shown: dict[int, Display] = {}
        self._timed_out: tuple[int, ...] = ()
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
        effects = self._on(event, now)
        if self._interrupts.gave_up:
            effects += self._give_up()
        if not self.running:
            self.finished = True
            if (
                self._participants is not None and self._participants.ended
            ):  # the report leaves these deaths out
                effects += self._announce()
            results = self._results()
            # What the cell waited for stands before the end of the output.
            effects = [*self._stalls.close(results.ok, now), *effects, Finished(results)]
        return effects

    # -- events -------------------------------------------------------------------------------------------------------

    @singledispatchmethod
    def _on(self, event: Event, now: float) -> list[Effect]:
        raise TypeError(f"not an event of a cell: {event!r}")

    @_on.register
    def _output(self, event: OutputArrived, now: float) -> list[Effect]:
        if event.rank not in self.running:
            return []
        effects: list[Effect] = []
        if chunks := self._keep_result(event.rank, event.chunks):
            effects.append(Deliver(event.rank, chunks))
        if event.total - self._acked[event.rank] >= self._ack_bytes:
            self._acked[event.rank] = event.total
            effects.append(SendCredit(event.rank, event.total))
        return effects

    @_on.register
    def _rank_done(self, event: DoneArrived, now: float) -> list[Effect]:
        if event.rank not in self.running:
            return []
        self.running.discard(event.rank)
        if self._participants is not None and self._participants.left(event.rank, event.done):
            return self._left(event.rank)
        self._done[event.rank] = event.done
        self._stalls.rank_ended(event.rank, now)
        error = event.done.error
        if error is not None and self._grace_at is None and not self._interrupts.stopped:
            self._grace_at = now + GRACE
            self._failure = f"rank {event.rank} failed with {one_line(error)}"
        return [RankEnded(event.rank, event.done)]

    @_on.register
    def _rank_died(self, event: RankDied, now: float) -> list[Effect]:
        if event.rank not in self.running:
            return []
        self.running.discard(event.rank)
        if self._participants is not None and event.left and self._participants.left(event.rank, None):
            return self._left(event.rank)
        death = self._deaths[event.rank] = Death(
            event.rank, event.reason, event.when, event.tail, event.detail
        )
        self._places.gone(event.rank)
        self._unannounced.append(death)
        if self._announce_at is None:
            self._announce_at = now + ANNOUNCE
        return [RankEnded(event.rank, None)]

    def _left(self, rank: int) -> list[Effect]:
        """A rank that was let go has gone."""
        self._places.gone(rank)
        self.ranks = tuple(other for other in self.ranks if other != rank)
        return [RankEnded(rank, None), Note(f"rank {rank} has left; nothing is lost by that")]

    @_on.register
    def _ranks_joined(self, event: RanksJoined, now: float) -> list[Effect]:
        participants, ranks = self._participants, [r for r in event.ranks if r not in self.running]
        if participants is None or not ranks:
            return []
        said = self._announce()
        self.running.update(ranks)
        self.ranks = tuple(sorted({*self.ranks, *ranks}))
        for rank in ranks:
            self._acked[rank] = 0
            self._done.pop(rank, None)
            self._deaths.pop(rank, None)
            self._shown.pop(rank, None)
            self._newcomers.pop(rank, None)
        self._stalls.joined(ranks)
        return [*said, *map(RankBegan, ranks), Note(participants.joined(ranks, self.running))]

    @_on.register
    def _ranks_released(self, event: RanksReleased, now: float) -> list[Effect]:
        ranks = [rank for rank in event.ranks if rank in self.running]
        if self._participants is None or not ranks:
            return []
        return [Note(self._participants.leaving(ranks))]

    @_on.register
    def _taken_over(self, event: TakenOver, now: float) -> list[Effect]:
        participants, leaving = self._participants, [rank for rank in event.leaving if rank in self.running]
        if participants is None:
            return []
        effects: list[Effect] = [Note(participants.leaving(leaving))] if leaving else []
        if said := participants.lost(self.running):
            effects.append(Note(said, warning=True))
        return effects

    def _announce(self) -> list[Effect]:
        """Say which ranks have died, and that too few are left."""
        self._announce_at = None
        effects: list[Effect] = [Note(death.line, warning=True) for death in self._unannounced]
        self._unannounced.clear()
        if effects and self._participants is not None and (said := self._participants.lost(self.running)):
            effects.append(Note(said, warning=True))
        return effects

    @_on.register
    def _interrupt(self, event: InterruptRequested, now: float) -> list[Effect]:
        if not event.delay:
            return self._interrupt_ranks(now)
        if self._interrupt_at is None and not self._released:
            self._interrupt_at = now + event.delay
        return []

    @_on.register
    def _pool_released(self, event: PoolReleased, now: float) -> list[Effect]:
        # A signal may be handled after the request that it precedes: interrupts that come later are dropped as well.
        self._released, self._interrupt_at = True, None
        return []

    def _interrupt_ranks(self, now: float) -> list[Effect]:
        self._interrupt_at = self._grace_at = None
        self._stalls.hush()
        return self._interrupts.requested(self.running, now)

    @_on.register
    def _time(self, event: TimePassed, now: float) -> list[Effect]:
        effects: list[Effect] = []
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
        """Do what is due about where ranks are: for the round of questions, the stalls and the interrupts."""
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

    @_on.register
    def _stalled(self, event: Stalled, now: float) -> list[Effect]:
        return self._stalls.reported(event.stall, now)

    @_on.register
    def _stack(self, event: StackArrived, now: float) -> list[Effect]:
        over = self._places.answered(event.rank, event.stack)
        return self._stalls.placed(self.running, now) if over else []

    @_on.register
    def _process(self, event: ProcessSeen, now: float) -> list[Effect]:
        over = self._places.seen(event.rank, event.text)
        return self._stalls.placed(self.running, now) if over else []

    @_on.register
    def _asked(self, event: Asked, now: float) -> list[Effect]:
        return []  # CellHandle gives it to its desk

    @_on.register
    def _unasked(self, event: Unasked, now: float) -> list[Effect]:
        return []  # CellHandle gives it to its desk

    @_on.register
    def _at_prompts(self, event: AtPrompts, now: float) -> list[Effect]:
        """While a user answers, no clock of the cell runs but those of an interrupt."""
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

    @_on.register
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
            self.ranks = tuple(rank for rank in self.ranks if rank not in self._deaths)
            self._deaths.clear()
        return CellResults(
            self.ranks,
            self._done,
            shown=self._shown,
            deaths=self._deaths,
            stopped=self._interrupts.stopped,
            unanswered=self._unanswered,
            timed_out=self._timed_out,
            timeout=self._timeout,
            replaceable=self._replaceable,
            newcomers=self._newcomers,
            interrupted=self._interrupts.requests > 0,
            label=self.label,
        )
