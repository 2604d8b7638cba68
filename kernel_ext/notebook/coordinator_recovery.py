"""Recovery from the death of a coordinator: another one takes over, with the world and the cells as they were.

A coordinator that lives, and to which only the connection was lost, stays. A rank that was cut off and has come back gets the
messages that it has missed.

One thread does all of that; it sleeps until a process has died. (The parts of the pool that have the fork server and
ipyparallel's controller replace them themselves: that takes no waiting.)
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from hvdlab.collectives.client import Client, CoordinatorLostError, Membership
from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.failover.client_reconnect import ClientRecovery, Recovered, RespawningCoordinator
from hvdlab.collectives.time_limits import RESTARTS, RestartLimit
from hvdlab.kernel_ext.notebook.cells.dispatch import CellDispatcher
from hvdlab.kernel_ext.notebook.rank_lifecycle import CUT_OFF_WITHIN, RankLifecycle
from hvdlab.launch.processes import open_process, readable, start_time
from hvdlab.launch.starter import Ended

RESPAWN_WITHIN = 20.0
"""Seconds that a successor has to start."""
RECONNECT_WITHIN = 40.0
"""Seconds that it has to restore its world."""
KILLED_WITHIN = 5.0
"""Seconds that a killed process has to end."""
OFTEN = RESTARTS
"""Once this many coordinators have died within a minute, the next ones are started after a pause: they may die for a reason
that another one does not cure. The rebuilder never gives up for that, since ranks would lose their memory with the pool."""
LONGEST_PAUSE = 8.0
"""Seconds; ranks wait longer than that for a successor."""

logger = logging.getLogger(__name__)


class RecoveryObserver(Protocol):
    """Observer of a recovery. The recovery's thread calls it."""

    def coordinator_restored(self) -> None:
        """Take note of another connection to a coordinator: messages over the last one can be lost."""
        ...

    def recovery_failed(self, reason: str) -> None:
        """Take note that the pool can't be restored."""
        ...


class CoordinatorRecovery:
    """Watch over the coordinator, and over ranks that it takes for dead.

    Args:
        coordinator: The coordinator's process.
        client: The connection to it.
        group: The ranks.
        runs: The cells.
        observer: Gets the outcome.
        near: Whether the ranks are processes of this host: then only a fault keeps one that lives from coming back at once.
    """

    def __init__(
        self,
        coordinator: RespawningCoordinator,
        client: Client,
        group: RankLifecycle,
        runs: CellDispatcher,
        observer: RecoveryObserver,
        *,
        near: bool = True,
    ) -> None:
        self._near = near
        self._client, self._group, self._runs = client, group, runs
        self._recovery = ClientRecovery(
            coordinator,
            client,
            runs=runs,
            respawn_within=RESPAWN_WITHIN,
            reconnect_within=RECONNECT_WITHIN,
        )
        self._observer = observer
        self._closing = threading.Event()
        # Jobs for the thread; None only wakes it.
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A heap of jobs for later: when (time.monotonic()), a number, the job. Only the thread uses it.
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._deaths = RestartLimit(OFTEN + 8)  # counted up to the longest pause
        # Ranks with their processes that the last membership had as dead, and that lived.
        self._cut_off: set[tuple[int, int]] = set()
        self._thread = threading.Thread(target=self._run, name="hvdlab-rebuild", daemon=True)
        self._thread.start()
        client.on_lost(self._lost)
        client.on_membership(self._look)
        client.on_returned(self._came_back)
        if client.closed:  # it was lost before on_lost() was called
            self._lost("it was lost before the pool used it")

    def close(self) -> None:
        """End the thread. Call it before the coordinator is closed."""
        # Before the wake-up: the thread looks at the flag after each job.
        self._closing.set()
        self._jobs.put(None)

    def await_recovered(self, timeout: float | None) -> bool:
        """Wait until all known deaths are handled. Returns False if that takes longer than ``timeout`` seconds; None: no limit."""
        done = threading.Event()
        # Jobs run one after the other, so this one runs once the deaths before it are handled.
        self._jobs.put(done.set)
        return done.wait(timeout)

    def join(self) -> None:
        """Wait for the end of the thread; call it once the coordinator is closed, so that the thread waits for nothing."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- the client's thread --------------------------------------------------------------------------------------

    def _lost(self, reason: str) -> None:
        # At once, on this thread: a cell that is sent from now on waits for the next connection.
        self._runs.connection_lost()
        self._jobs.put(lambda: self._rebuild(reason))

    def _look(self, membership: Membership) -> None:
        """Look for ranks that the coordinator has given up and that still have a process here."""
        if not self._near:
            return
        found = {(rank, self._group.pids().get(rank, 0)) for rank in self._group.cut_off(membership)}
        # Each process counts once: the membership comes with every change of any rank.
        new, self._cut_off = found - self._cut_off, found
        if new:
            self._jobs.put(lambda: self._schedule(CUT_OFF_WITHIN, lambda: self._end_cut_off(new)))

    def _came_back(self, rank: int, pid: int, seconds: float) -> None:
        """Resend lost messages to a rank that the coordinator had given up, and that is connected again."""
        # Not on this thread: `rank_reconnected` waits until no cell is being sent, and mail must not wait for that.
        self._jobs.put(partial(self._take_back, rank, pid, seconds))

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            if self._later and self._later[0][0] <= time.monotonic():
                self._do(heapq.heappop(self._later)[2])
                continue
            try:
                job = self._jobs.get(timeout=self._later[0][0] - time.monotonic() if self._later else None)
            except queue.Empty:
                continue
            if job is not None:
                self._do(job)

    def _do(self, job: Callable[[], None]) -> None:
        """Run a job. Its failure must not end the thread: the next coordinator's death would never be repaired."""
        try:
            job()
        except Exception as error:
            logger.exception("a step of a recovery failed")
            # Without a connection and a further job cells would wait for ever.
            if self._client.closed:
                self._fail(f"it could not be restored: {error!r}")

    def _schedule(self, seconds: float, job: Callable[[], None]) -> None:
        # The number decides between equal times: jobs can't be compared.
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), job))

    def _end_cut_off(self, ranks: set[tuple[int, int]]) -> None:
        """Kill these ranks, which have not come back: cells that wait for them must learn of their end."""
        deaths = {(death.rank, death.pid): death.reason for death in self._client.membership().deaths}
        for rank, pid in ranks:
            reason = deaths.get((rank, pid))
            # Not one that has ended already: the starter is about to report how.
            if reason is not None and self._group.pids().get(rank) == pid and _lives(pid):
                # Before the kill: the starter would report a SIGKILL, and not why the coordinator gave the rank up.
                self._group.set_exit_reason(rank, pid, reason)
                self._group.kill([rank])
                self._schedule(KILLED_WITHIN, partial(self._give_rank_up, rank, pid, reason))

    def _take_back(self, rank: int, pid: int, seconds: float) -> None:
        if self._group.pids().get(rank) != pid:  # it has ended since
            return
        with contextlib.suppress(CoordinatorLostError):  # _rebuild() follows, which makes up for it
            self._runs.rank_reconnected(rank)
        self._runs.notice(f"rank {rank} was cut off for {seconds:.0f} s, and is back with its memory")

    def _give_rank_up(self, rank: int, pid: int, reason: str) -> None:
        """Count the rank as ended if not even SIGKILL has ended it: it hangs in the system."""
        if self._group.pids().get(rank) == pid and _lives(pid):
            self._group.handle(Ended(rank, pid, reason))

    def _rebuild(self, reason: str) -> None:
        began, how = time.monotonic(), reason
        while self._client.closed and not self._closing.is_set():
            if self._closed_in_pause(how):
                return
            # Before it is known whether one has died: `_go_on` subtracts it again if only the connection was lost.
            self._deaths.add()
            try:
                recovered = self._recovery.run()
                how = self._recovery.ending or how
                self._go_on(recovered)
            except CoordinatorLostError:
                # The successor has ended as well: the loop starts another one.
                how = self._recovery.ending or how
            except (StartError, TimeoutError, InvalidRequestError, OSError) as error:
                how = self._recovery.ending or how
                self._fail(f"its coordinator ended ({how}), and no other one could take over: {error}")
                return
            else:
                self._observer.coordinator_restored()
                self._say(recovered, how, time.monotonic() - began)

    def _closed_in_pause(self, how: str) -> bool:
        """Wait a while if coordinators die often. Returns whether this was closed meanwhile."""
        lately = self._deaths.recent
        seconds = pause(lately)
        if seconds:
            self._runs.notice(
                f"{lately + 1} coordinators have ended within a minute, the last one: {how}; the next one is started in "
                f"{seconds:g} s, the ranks wait for it with their variables"
            )
        return self._closing.wait(seconds)

    def _go_on(self, recovered: Recovered) -> None:
        if not recovered.replaced:
            self._deaths.forget_last()  # only the connection was lost
        # The world first, then the cells that run in it.
        self._group.reconnected()
        self._runs.resync(recovered.membership.ranks, recovered.cells)

    def _say(self, recovered: Recovered, how: str, seconds: float) -> None:
        what = (
            f"the coordinator ended ({how}) and was replaced within {seconds:.1f} s"
            if recovered.replaced
            else f"the connection to the coordinator was lost ({how}) and made again within {seconds:.1f} s"
        )
        self._runs.notice(f"{what}; the ranks and their variables are intact")

    def _fail(self, reason: str) -> None:
        if not self._closing.is_set():
            self._observer.recovery_failed(reason)


def pause(deaths: int) -> float:
    """Return the seconds until the next coordinator is started if so many others have died within the last minute."""
    return min(LONGEST_PAUSE, 2.0 ** (deaths - OFTEN)) if deaths >= OFTEN else 0.0


def _lives(pid: int) -> bool:
    process = open_process(pid, start_time(pid))
    if process < 0:
        return False
    try:
        return not readable(process, 0)
    finally:
        os.close(process)
