"""The shell around :class:`~hvdlab.kernel_ext.notebook.rank_states.RankStates`: carries out its effects, and lets callers wait for states."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

import msgspec

from hvdlab.collectives.client import Client, CoordinatorLostError, Membership
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.settings import sizes
from hvdlab.collectives.system import host_key
from hvdlab.collectives.text import format_ranks
from hvdlab.collectives.time_limits import Deadline
from hvdlab.kernel_ext.notebook.output.stack_text import last_lines
from hvdlab.kernel_ext.notebook.rank_states import (
    AgentReady,
    AskReady,
    AwaitLeaving,
    Effect,
    Event,
    ExpectRanks,
    LeaveAtCommit,
    PoolSizeSet,
    RankPhase,
    RankStates,
    Reconnected,
    ReportRankLeft,
    ReportRankLost,
    Resized,
    SpawnRanks,
)
from hvdlab.kernel_ext.wire.channel import ENVIRONMENT, READY, WHO
from hvdlab.launch.hosts import Host, assign
from hvdlab.launch.starter import Ended, Starter

LEAVE_WITHIN = 3.0
"""Seconds that a rank has to leave after the pool's order; then it is killed."""

CUT_OFF_WITHIN = 1.0
"""Seconds that the process of a rank whose connection has ended, or that was killed, gets to end as well."""

_ERROR = re.compile(r"[\w.]+(Error|Exception)\b")

SHOWN_LINES = 20
"""Lines of a rank's standard error that the ``StartError`` shows if the rank could not be started."""


class LifecycleObserver(Protocol):
    """Observer of a pool's ranks. Any thread calls it; it must not block."""

    def rank_ready(self, rank: int) -> None:
        """Take note of a rank that takes cells from now on."""
        ...

    def rank_lost(self, rank: int, reason: str) -> None:
        """Take note of the loss of a rank that was ready."""
        ...

    def rank_left(self, rank: int, died: str) -> None:
        """Take note of a rank that has left by the pool's order; ``died`` is the reason if it died before it could, or empty."""
        ...


class RankLifecycle:
    """Life of a pool's ranks: carries out the effects of :class:`RankStates`, and waits for their results.

    Args:
        client: The connection to the coordinator.
        observer: Gets each change of a rank.
        hosts: The hosts that ranks are given to, in this order; empty if only the launcher knows, or all are here.
    """

    def __init__(
        self,
        client: Client,
        observer: LifecycleObserver,
        *,
        hosts: Sequence[Host] = (),
    ) -> None:
        self._client, self._observer, self._hosts = client, observer, hosts
        self._starter: Starter | None = None
        self._members = RankStates()
        # Guards the states, and wakes threads that wait for a change. Reentrant: `broken` handles events while it has it.
        self._changed = threading.Condition(threading.RLock())
        # The reason why the pool can't go on; empty while it can.
        self._broken = ""
        #: The event that the starter waits for before it can start ranks at all; while it is not empty, no time limit runs.
        self._waits_for = ""
        # Rank and process id to the reason of its end, from `set_exit_reason`.
        self._reasons: dict[tuple[int, int], str] = {}
        self._ending: set[int] = set()  # ranks that the user has restarted, until their processes have ended
        client.on_mail(READY, lambda rank, body: self.handle(AgentReady(rank)))

    def set_starter(self, starter: Starter) -> None:
        """Let ``starter`` start the ranks. Call it once, before the first :class:`PoolSizeSet`."""
        self._starter = starter

    # -- queries --------------------------------------------------------------------------------------------------

    @property
    def members(self) -> RankStates:
        """Return the state machine, read without the lock: two reads can see two states, as other threads change it meanwhile."""
        return self._members

    def ready(self) -> tuple[int, ...]:
        """Return the ranks that take cells."""
        with self._changed:
            return self._members.ready

    def pids(self) -> dict[int, int]:
        """Return rank to process id of the ranks that live."""
        with self._changed:
            return self._members.living()

    def loss_reason(self, rank: int) -> str:
        """Return the reason why a rank takes no cells any more; empty if it lives."""
        return self.losses((rank,)).get(rank, "")

    def losses(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return those of these ranks that take no cells any more, with the reasons."""
        return self._members.losses(ranks)

    def local_pid(self, rank: int) -> int | None:
        """Return the process of a rank on this host; None if it runs elsewhere."""
        members = self._client.membership().members
        return next((m.pid for m in members if m.rank == rank and m.host == host_key()), None)

    def ranks_on_this_host(self) -> set[int]:
        """Return the ranks that share memory with this process."""
        return {m.rank for m in self._client.membership().members if m.host == host_key()}

    # -- events ---------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Handle an event of a rank, and carry out its effects. Any thread."""
        with self._changed:
            if isinstance(event, Ended) and (reason := self._reasons.pop((event.rank, event.pid), "")):
                event = replace(event, reason=reason)
            ready = self._members.ready
            # The starter reports a SIGKILL: a cell that the rank ran shows that the user restarted it.
            if isinstance(event, Ended) and event.rank in self._ending:
                self._ending.discard(event.rank)
                event = Ended(event.rank, event.pid, "ended by a restart")
            for effect in self._members.handle(event):
                self._perform(effect)
            self._changed.notify_all()
            for rank in self._members.ready:
                if rank not in ready:
                    self._observer.rank_ready(rank)

    def set_launch_wait(self, text: str) -> None:
        """Set the event that must come before ranks can be started; :meth:`set_ranks` waits for it without a limit. Any thread.

        Args:
            text: The event, in words for the user; empty once it has come.
        """
        with self._changed:
            self._waits_for = text
            self._changed.notify_all()

    def set_exit_reason(self, rank: int, pid: int, reason: str) -> None:
        """Set the reason why this rank's process is about to end, which its exit status does not show. Any thread."""
        with self._changed:
            self._reasons[rank, pid] = reason

    def broken(self, reason: str) -> None:
        """Count all ranks as ended, with this reason: a process that they depend on is gone. Any thread."""
        with self._changed:
            self._broken = self._broken or reason
            for rank, pid in self._members.living().items():
                self.handle(Ended(rank, pid, reason))
            self._changed.notify_all()

    def reconnected(self) -> None:
        """Send another coordinator the messages that can have been lost on the way to the old one. Any thread."""
        self.handle(Reconnected())

    def cut_off(self, membership: Membership) -> list[int]:
        """Return the ranks that the coordinator takes for dead although their processes live."""
        deaths = {(death.rank, death.pid) for death in membership.deaths}
        with self._changed:
            return [rank for rank, pid in self._members.living().items() if (rank, pid) in deaths]

    def _perform(self, effect: Effect) -> None:
        assert self._starter is not None
        # Messages that are sent while there is no coordinator are lost; reconnected() sends them to the next one.
        with contextlib.suppress(CoordinatorLostError):
            match effect:
                case ExpectRanks(ranks):
                    self._client.expect(ranks)
                case LeaveAtCommit(ranks):
                    self._client.release(ranks)
                case SpawnRanks(ranks, size):
                    self._spawn(ranks, size)
                case Resized(ranks, size):
                    for rank in ranks:
                        variables = sizes(rank, size, self._starter.place(rank, size))
                        self._client.post(ENVIRONMENT, msgspec.msgpack.encode(variables), [rank])
                case AskReady(ranks):
                    self._client.post(WHO, b"", ranks)
                case ReportRankLost(rank, pid, reason):
                    # The cells first: their report of this death then comes before the aborts that the coordinator sends.
                    self._observer.rank_lost(rank, reason)
                    self._client.rank_lost(rank, pid, reason)
                case ReportRankLeft(rank, pid, died):
                    self._observer.rank_left(rank, died)
                    if died:
                        self._client.rank_lost(rank, pid, died)
                case AwaitLeaving():
                    pass  # the coordinator sends the rank the order; _wait_left() kills it if it does not leave

    def _spawn(self, ranks: Sequence[int], size: int) -> None:
        assert self._starter is not None
        try:
            self._starter.start(ranks, size)
        except CoordinatorLostError:
            raise  # reconnected() makes up for it
        except BaseException as error:
            # Also after Ctrl-C: nothing else would report the end of a rank without a process, which would be starting for ever.
            for rank in ranks:
                self.handle(Ended(rank, 0, f"its start failed: {str(error) or type(error).__name__}"))
            raise

    def _starts(self, rank: int, replace_lost: bool) -> bool:
        """Return whether a rank is starting, or would be after a :class:`PoolSizeSet` with it."""
        member = self._members.get(rank)
        return (
            member is None
            or member.state is RankPhase.STARTING
            or (replace_lost and member.state is RankPhase.LOST)
        )

    # -- changes --------------------------------------------------------------------------------------------------

    def shrink_at_commit(self, ranks: Sequence[int], deadline: Deadline) -> None:
        """Shrink the pool to these ranks: the others leave at the next commit of the elastic training. Waits until they have.

        It waits for ranks that an earlier call has let go, too.

        Raises:
            StartError: Some have not left in time; they leave at their next commit.
        """

        def leaving() -> tuple[int, ...]:
            return self._members.let_go

        with self._changed:
            self.handle(PoolSizeSet(tuple(ranks), at_commit=True))
            if not deadline.wait_for(self._changed, lambda: not leaving() or self._broken):
                expected = self._client.membership().expected
                hung = {rank for rank in leaving() if rank not in expected}  # past their commit
                for rank, pid in self._members.living().items():
                    if rank in hung:
                        self.set_exit_reason(rank, pid, "killed, since it had left and did not end")
                self.kill(sorted(hung))
                self._changed.wait_for(
                    lambda: not hung.intersection(leaving()) or self._broken, CUT_OFF_WITHIN
                )
            if late := leaving():
                raise StartError(
                    f"{format_ranks(late)} did not come to a commit within {deadline.seconds:g} s; they leave when they do"
                )

    def set_ranks(
        self,
        ranks: Sequence[int],
        deadline: Deadline,
        *,
        replace_lost: bool = False,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Make the pool consist of these ranks: start those that are missing, end those that are too many, and wait for both.

        If ranks can't be started yet, as in a batch system's queue, the time limit begins once they can; until then ``progress``
        is called with the event that the starter waits for.

        Raises:
            StartError: A rank could not be started, or not in time. Those that were started by this call are ended
                again, the others are as before.
        """
        with self._changed:
            before = self._members.wanted
            # Known before the order: a start that raises an error may have begun some of them.
            new = [rank for rank in sorted(set(ranks)) if self._starts(rank, replace_lost)]
        try:
            self.handle(PoolSizeSet(tuple(ranks), replace_lost))
            deadline = self._wait_for_room(deadline, progress)
            self._wait_ready(new, deadline)
        except BaseException:
            # Also after KeyboardInterrupt: an interrupted start must leave no process that the pool does not count.
            ready = self.ready()
            try:
                self.kill([rank for rank in new if rank not in before or rank not in ready])
            finally:  # also if the kill fails, as where the starter is broken
                self.handle(PoolSizeSet(before))
            raise
        self._wait_left(deadline)

    def await_disconnected(self, deadline: Deadline) -> None:
        """Wait until the processes of ranks that the coordinator takes for dead have ended; kill those that stay.

        One that is cut off might come back, but the caller is about to replace it.
        """

        def cut_off() -> list[int]:
            return self.cut_off(self._client.membership())

        with self._changed:
            if not self._changed.wait_for(lambda: not cut_off() or self._broken, CUT_OFF_WITHIN):
                self.kill(cut_off())
                deadline.wait_for(self._changed, lambda: not cut_off() or self._broken)

    def wait_answered(self, deadline: Deadline) -> tuple[int, ...]:
        """Wait until every rank that was found has answered or ended. Returns those that have not."""

        def silent() -> tuple[int, ...]:
            return self._members.in_state(RankPhase.STARTING)

        with self._changed:
            deadline.wait_for(self._changed, lambda: not silent() or self._broken)
            return silent()

    def end(self, ranks: Sequence[int], deadline: Deadline) -> None:
        """Kill these ranks' processes and wait for their end; the ranks count as lost, and stay members of the pool.

        Raises:
            StartError: Some have not ended in time: they hang in the system, or their host is out of reach.
        """
        with self._changed:
            # Before the signal: the end of a process may be reported at once, on another thread.
            self._ending |= set(ranks) & set(self._members.living())
        self.kill(ranks)
        with self._changed:
            deadline.wait_for(
                self._changed, lambda: not set(ranks) & set(self._members.living()) or self._broken
            )
            # Not left to `set_ranks`: it starts nothing in the place of a rank that is still ready.
            if stuck := sorted(set(ranks) & set(self._members.living())):
                raise StartError(
                    f"{format_ranks(stuck)} did not end within {deadline.seconds:g} s although SIGKILL was sent: the process "
                    "hangs in the system, or its host is out of reach; `%hvd_pool repair` starts those that have ended"
                )

    def kill(self, ranks: Sequence[int]) -> None:
        """Send SIGKILL to these ranks."""
        assert self._starter is not None
        for rank in ranks:
            self._starter.signal(rank, signal.SIGKILL)

    def _wait_for_room(self, deadline: Deadline, progress: Callable[[str], None]) -> Deadline:
        """Wait as long as ranks can't be started at all. Returns the time limit; after a wait, one that begins now."""
        with self._changed:
            said = self._waits_for
        if not said:
            return deadline
        while said and not self._broken:
            # Without the lock: it writes to a frontend, and the starter's thread needs the lock for its reports.
            progress(said)
            said = self._launch_wait_after(said)
        return Deadline(deadline.seconds)

    def _launch_wait_after(self, said: str) -> str:
        """Wait until the starter waits for another event than this one, and return that; empty if for none."""
        with self._changed:
            Deadline(None).wait_for(self._changed, lambda: self._waits_for != said or self._broken)
            return self._waits_for

    def _wait_ready(self, ranks: Sequence[int], deadline: Deadline) -> None:
        def settled() -> bool:
            waiting = self._members.in_state(RankPhase.STARTING)
            return bool(self._broken or not set(ranks) & set(waiting) or set(ranks) & set(self._members.lost))

        with self._changed:
            deadline.wait_for(self._changed, settled)
            lost = [rank for rank in ranks if rank in self._members.lost]
            late = [rank for rank in ranks if rank in self._members.in_state(RankPhase.STARTING)]
            if lost:
                member = self._members.get(lost[0])
                assert member is not None
                lines = last_lines(member.tail, SHOWN_LINES)
                error = next((f": {line}" for line in reversed(lines) if _ERROR.match(line)), "")
                said = "; its last words were:\n" + "\n".join(lines) if lines else ""
                raise StartError(f"{format_ranks(lost)} could not be started: {member.reason}{error}{said}")
            if self._broken:
                raise StartError(f"the ranks could not be started: {self._broken}")
            if late:
                raise StartError(self._why_late(late, deadline))

    def _why_late(self, late: Sequence[int], deadline: Deadline) -> str:
        """Return the known reasons why these ranks take no cells: first those that the launcher has not reported to run."""
        running = self._members.living()
        unstarted = [rank for rank in late if not running.get(rank)]
        ranks = unstarted or late
        named = format_ranks(ranks)
        if self._hosts:
            slots = assign(self._hosts, len(self._members.wanted))
            named += " on " + ", ".join(dict.fromkeys(self._hosts[slots[rank].host].name for rank in ranks))
        what = "could not be started" if unstarted else "did not answer"
        return f"{named} {what} within {deadline.seconds:g} s; give a longer timeout"

    def _wait_left(self, deadline: Deadline) -> None:
        """Wait until ranks that must leave are gone; kill those that take too long.

        Ranks that leave at a commit have no time limit.
        """

        def leaving() -> list[int]:
            staying = {*self._members.wanted, *self._members.let_go}
            return [rank for rank in self._members.living() if rank not in staying]

        with self._changed:
            if not self._changed.wait_for(lambda: not leaving() or self._broken, LEAVE_WITHIN):
                self.kill(leaving())
                deadline.wait_for(self._changed, lambda: not leaving() or self._broken)
