"""Ranks that fail, die, or let the others wait."""

from __future__ import annotations

import os
import resource
import signal
import time

from chaos.faults import STALL
from chaos.pieces import Pieces, names
from hvdlab.collectives.errors import StartError
from support.pool_probe import PoolProbe
from support.ranks.fork_server import allow_files


class Ranks(Pieces):
    """Trials of faults in ranks."""

    def failing(self) -> None:
        run = self.begin()
        at = self.await_fault()
        results = self.await_end(run)
        self.told(at, time.monotonic(), self.outcome.said)
        if results.ok or results.deaths:
            self.outcome.wrong.append(f"the cell ended with {results.root_cause}")

    def failing_together(self) -> None:
        """A failure that all ranks see, and of which none can know which rank it befell."""
        run = self.begin()
        at = self.await_fault()
        results = self.await_end(run)
        self.victim = -1
        self.told(at, time.monotonic(), self.outcome.said)
        if results.ok or results.deaths:
            self.outcome.wrong.append(f"the cell ended with {results.root_cause}")

    def losing_context(self) -> None:
        """The rank's memory on the device is gone while its process lives: only another process can take its place."""
        self.failing()
        began = time.monotonic()
        self.campaign.pool.restart([self.victim], timeout=self.campaign.hang_after)
        self.outcome.repair = time.monotonic() - began
        self._new = self.victim

    def dying(self) -> None:
        run = self.begin()
        if self.spot == "any":
            self.await_instant()
            pid = self._pids()[self.victim]
            at = time.monotonic()
            os.kill(pid, signal.SIGKILL)
        else:
            at = self.await_fault()
        results = self.await_end(run)
        self.told(at, time.monotonic(), self.outcome.said)
        if set(results.deaths) != {self.victim}:
            self.outcome.wrong.append(f"deaths are {results.deaths}")

    def dying_together(self) -> None:
        run = self.begin()
        self.await_instant()
        other = (self.victim + self.rng.randrange(1, self.campaign.size)) % self.campaign.size
        pids = self._pids()
        at = time.monotonic()
        # Stopped first: this process may have to wait between two signals, and the other rank would then learn of a death, end its
        # cell with that, and die later.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for rank in (self.victim, other):
                os.kill(pids[rank], number)
        results = self.await_end(run)
        self.told(at, time.monotonic(), self.outcome.said)
        if set(results.deaths) != {self.victim, other} or not names(self.outcome.said, other):
            self.outcome.wrong.append(
                f"ranks {self.victim} and {other} died, and told was: {self.outcome.said}"
            )

    def dying_unreplaced(self) -> None:
        """A rank dies, and for a while the process that ranks are forked from may open nothing."""
        run = self.begin()
        self.await_instant()
        os.kill(self._pids()[self.victim], signal.SIGKILL)
        results = self.await_end(run)
        if set(results.deaths) != {self.victim}:
            self.outcome.wrong.append(f"deaths are {results.deaths}")
        warm = PoolProbe(self.campaign.pool).fork_server.pid
        before = resource.prlimit(warm, resource.RLIMIT_NOFILE)
        allow_files(warm, 0)
        at = time.monotonic()
        try:
            self.campaign.pool.repair(timeout=self.campaign.hang_after)
            self.outcome.wrong.append("the repair did not fail")
        except StartError as error:
            self.told(at, time.monotonic(), str(error))
        finally:
            resource.prlimit(warm, resource.RLIMIT_NOFILE, before)

    def restarting(self) -> None:
        run = self.begin()
        self.await_instant()
        at = time.monotonic()
        self.campaign.pool.restart([self.victim], timeout=self.campaign.hang_after)
        self.outcome.repair = time.monotonic() - at
        self._new = self.victim
        results = self.await_end(run)
        ended = next((d for d in results.deaths.values() if d.rank == self.victim), None)
        if ended is None:
            self.outcome.wrong.append(f"rank {self.victim}'s end is not told: {results.root_cause}")
            return
        self.told(at, ended.when / 1e9, self.outcome.said)

    # -- ranks that let others wait -------------------------------------------------------------------------------

    def stalling(self) -> None:
        run = self.begin(seconds=STALL + 1.5, steps=30)
        at = self.await_fault()
        self._await_stall(at)
        self._goes_on(run)

    def pausing(self) -> None:
        run = self.begin(steps=30)
        at = self.await_fault()
        pid = self._pids()[self.victim]
        self._await_stall(at)
        os.kill(pid, signal.SIGCONT)
        self._goes_on(run)

    def _await_stall(self, at: float) -> None:
        line = self.sink.await_line(lambda text: names(text, self.victim), STALL + 10)
        if line is None:
            if not any(letter["what"] == "standstill" for letter in self.campaign.mailbox.letters):
                self.outcome.wrong.append("nobody said whom the others wait for")
            return
        self.outcome.report = line[0] - at
