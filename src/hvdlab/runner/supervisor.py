"""Who failed first, who is ended when, and what the exit code is: the launcher's decisions, without any I/O.

::

    RUNNING ── a rank fails ──▶ SETTLING ── who began it is known ──▶ ENDING ── all have ended ──▶ DONE
       └────── Ctrl-C, SIGTERM, a host is lost, a timeout ────────────▶ ENDING

A rank often fails only because another one did: its collective is aborted. What it reports names that other rank, so
the launcher waits a moment for the end of the culprit before it says who was first.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from hvdlab.collectives.errors import format_ranks
from hvdlab.launch.exits import Outcome
from hvdlab.runner import events as e
from hvdlab.runner.policy import Phase, Policy, RankState


@dataclass(slots=True)
class _Ending:
    code: int
    until: float
    killed: bool = False


class Supervisor:
    """Feed it with :meth:`handle`; do what it returns; call again with ``Tick`` at :attr:`deadline`."""

    def __init__(self, policy: Policy, now: float) -> None:
        self.policy = policy
        self.phase = Phase.RUNNING
        self.ranks = [RankState() for _ in policy.hosts]
        self.failed: int | None = None
        """The rank that the job's failure is put down to, once known."""
        self._start_by: float | None = now + policy.start_timeout
        self._join_by: float | None = None
        self._first = -1
        self._settle_by = 0.0
        self._ending = _Ending(0, 0.0)
        self._resets = 0
        self._effects: list[e.Effect] = []

    @property
    def living(self) -> tuple[int, ...]:
        """Ranks that have not ended."""
        return tuple(rank for rank, state in enumerate(self.ranks) if state.outcome is None)

    @property
    def deadline(self) -> float | None:
        """When :class:`~hvdlab.runner.events.Tick` is due, or ``None``."""
        if self.phase is Phase.DONE:
            return None
        if self.phase is Phase.ENDING:
            return self._ending.until
        if self.phase is Phase.SETTLING:
            return self._settle_by
        hanging = [state.deadline for state in self.ranks if state.deadline and state.outcome is None]
        times = [when for when in (self._start_by, self._join_by, *hanging) if when is not None]
        return min(times, default=None)

    def handle(self, event: e.Event, now: float) -> list[e.Effect]:
        """Take one event. Nothing comes after :class:`~hvdlab.runner.events.Finish`."""
        self._effects = []
        if self.phase is Phase.DONE:
            return []
        match event:
            case e.Spawned(rank, pid):
                self.ranks[rank].pid = pid
                if all(state.pid for state in self.ranks):
                    self._start_by = None
            case e.Exited(rank, outcome):
                self._exited(rank, outcome, now)
            case e.Unstartable(ranks, text):
                for rank in ranks:
                    self._exited(rank, Outcome(1, text=text), now)
            case e.Connected(rank):
                self._connected(rank, now)
            case e.Disconnected(rank, reason):
                self.ranks[rank].connected, self.ranks[rank].lost = False, reason
            case e.Reported(rank):
                self._reported(rank, event, now)
            case e.Stopped(number):
                self._stop(number, now)
            case e.CoordinatorLost(text):
                self._abandon(f"{text}; ending {self._count()}", 1, now)
            case e.Tick():
                self._tick(now)
        self._settle(now)
        self._maybe_finish()
        return self._effects

    # -- single events --------------------------------------------------------------------------------------------

    def _connected(self, rank: int, now: float) -> None:
        self.ranks[rank].connected = self.ranks[rank].joined = True
        self.ranks[rank].lost = ""
        if self.policy.join_timeout is None or self.phase is not Phase.RUNNING:
            return
        if all(state.joined or state.outcome for state in self.ranks):
            self._join_by = None
        elif self._join_by is None:
            self._join_by = now + self.policy.join_timeout

    def _reported(self, rank: int, report: e.Reported, now: float) -> None:
        state = self.ranks[rank]
        if state.report is None:
            state.report = report
            state.deadline = now + self.policy.hang

    def _exited(self, rank: int, outcome: Outcome, now: float) -> None:
        state = self.ranks[rank]
        if state.outcome is not None:
            return
        state.outcome = outcome
        if self.phase is Phase.ENDING:
            return
        if self._start_by is not None and all(state.pid or state.outcome for state in self.ranks):
            self._start_by = None
        self._effects.append(e.Tell(rank, str(outcome) if not outcome.ok else "its program has ended"))
        if outcome.ok or self.phase is not Phase.RUNNING:
            self._end_late()
            return
        if self.policy.min_ranks is not None and self._replace(rank, outcome):
            return
        self.phase = Phase.SETTLING
        self._first = rank
        self._settle_by = now + self.policy.settle

    def _replace(self, rank: int, outcome: Outcome) -> bool:
        """Start a lost rank of an elastic job anew, or go on without it. Whether the job goes on."""
        assert self.policy.min_ranks is not None
        done = any(state.outcome is not None and state.outcome.ok for state in self.ranks)
        known = self.ranks[rank].joined or self.ranks[rank].anew
        if known and not done and self._resets < self.policy.reset_limit:
            self._resets += 1
            self.ranks[rank] = RankState(anew=True)
            every = self.living  # without those that were given up
            text = f"rank {rank}: {outcome}; starting it anew ({self._resets} of {self.policy.reset_limit})"
            self._effects += [e.Say(text), e.Expect(every), e.Respawn(rank)]
            return True
        well = [state for state in self.ranks if state.outcome is None or state.outcome.ok]
        if len(well) < self.policy.min_ranks and not (done and self._is_late(rank)):
            return False
        self._effects += [e.Say(f"rank {rank}: {outcome}; going on without it"), e.Expect(self.living)]
        return True

    def _is_late(self, rank: int) -> bool:
        """Whether a rank was started anew and has not taken part yet."""
        return self.ranks[rank].anew and not self.ranks[rank].joined

    def _end_late(self) -> None:
        """The program has ended on a rank: those that would begin it now have nobody to do it with."""
        late = tuple(rank for rank in self.living if self._is_late(rank) and not self.ranks[rank].dismissed)
        if late and self.phase is Phase.RUNNING:
            for rank in late:
                self.ranks[rank].dismissed = True
            self._effects += [
                e.Say(f"{format_ranks(late)} came back too late to take part; ending"),
                e.Signal(late, signal.SIGTERM),
            ]

    def _stop(self, number: int, now: float) -> None:
        name = signal.Signals(number).name
        if self.phase is Phase.ENDING:
            if not self._ending.killed:
                self._effects.append(e.Say(f"{name} again: killing {self._count()}"))
                self._kill(now)
            return
        what = "interrupted" if number == signal.SIGINT else f"got {name}"
        self._effects.append(e.Say(f"{what}; ending {self._count()} (once more to kill)"))
        self._effects.append(e.Signal(self.living, number))
        wait = self.policy.interrupt_grace if number == signal.SIGINT else self.policy.grace
        self.phase, self._ending = Phase.ENDING, _Ending(128 + number, now + wait)

    def _tick(self, now: float) -> None:
        if self.phase is Phase.ENDING and now >= self._ending.until:
            if self._ending.killed:  # stuck in the kernel: nobody can do more
                self._effects.append(e.Say(f"{format_ranks(self.living)} can't be killed; leaving"))
                self._finish()
            else:
                self._effects.append(e.Say(f"{format_ranks(self.living)} did not end in time; killing"))
                self._kill(now)
        elif self.phase is Phase.RUNNING:
            self._check_times(now)

    def _check_times(self, now: float) -> None:
        if self._start_by is not None and now >= self._start_by:
            missing = [rank for rank in self.living if not self.ranks[rank].pid]
            hosts = ", ".join(dict.fromkeys(self.policy.hosts[rank] for rank in missing))
            text = f"{format_ranks(missing)} could not be started on {hosts} within {self.policy.start_timeout:g} s"
            self._abandon(text, 1, now)
        elif self._join_by is not None and now >= self._join_by:
            missing = [rank for rank in self.living if not self.ranks[rank].joined]
            self._join_by = None
            if missing:
                text = f"{format_ranks(missing)} did not come to hvd.init() within {self.policy.join_timeout:g} s"
                self._abandon(text, 1, now)
        else:
            late = [r for r in self.living if self.ranks[r].deadline and now >= (self.ranks[r].deadline or 0)]
            if late:
                self._fail(late[0], now)

    # -- the end --------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Find out who was first, once everybody who was blamed has ended."""
        if self.phase is not Phase.SETTLING:
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
        failure = e.Failure(culprit, outcome, error, tuple(followers), self._early(culprit))
        self._effects.append(failure)
        self._end(outcome.exit_code if outcome is not None else 1, now)

    def _origin(self, rank: int) -> int:
        """Follow who blames whom to the rank that has failed for a reason of its own."""
        seen = {rank}
        while (report := self.ranks[rank].report) is not None:
            blamed = [r for r in report.culprits if 0 <= r < len(self.ranks) and r not in seen]
            guilty = [r for r in blamed if self._has_failed(r)]
            if not guilty:
                break
            rank = guilty[0]
            seen.add(rank)
        return rank

    def _has_failed(self, rank: int) -> bool:
        state = self.ranks[rank]
        if state.outcome is None:
            return state.report is not None or bool(state.lost)
        return not state.outcome.ok

    def _early(self, rank: int) -> tuple[int, ...]:
        """Ranks whose good end made this one fail."""
        report = self.ranks[rank].report
        if report is None and self.ranks[rank].joined:  # it may have waited for those that never came
            ends = enumerate(self.ranks)
            return tuple(
                r for r, its in ends if its.outcome is not None and its.outcome.ok and not its.joined
            )
        blamed = report.culprits if report is not None else ()
        outcomes = [(r, self.ranks[r].outcome) for r in blamed if 0 <= r < len(self.ranks)]
        return tuple(r for r, outcome in outcomes if outcome is not None and outcome.ok)

    def _abandon(self, text: str, code: int, now: float) -> None:
        if self.phase in (Phase.RUNNING, Phase.SETTLING):
            self._effects.append(e.Say(text))
            self._end(code, now)

    def _end(self, code: int, now: float) -> None:
        self.phase, self._ending = Phase.ENDING, _Ending(code, now + self.policy.grace)
        if self.living:
            self._effects.append(e.Signal(self.living, signal.SIGTERM))

    def _kill(self, now: float) -> None:
        self._ending.killed, self._ending.until = True, now + self.policy.grace
        self._effects.append(e.Signal(self.living, signal.SIGKILL))

    def _maybe_finish(self) -> None:
        if self.phase is Phase.DONE or self.living or self.phase is Phase.SETTLING:
            return
        if any(isinstance(effect, e.Respawn) for effect in self._effects):
            return
        self._finish()

    def _finish(self) -> None:
        code = self._ending.code if self.phase is Phase.ENDING else 0
        self.phase = Phase.DONE
        self._effects.append(e.Finish(code))

    def _count(self) -> str:
        number = len(self.living)
        return f"{number} rank" + ("" if number == 1 else "s")
