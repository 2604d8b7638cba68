"""Interrupts, in any state of the ranks."""

from __future__ import annotations

import os
import signal
import time

from chaos import census
from chaos.pieces import Pieces, names
from hvdlab.kernel_ext.notebook.cells.driver import CellHandle


class Interrupts(Pieces):
    """Trials of interrupts."""

    def interrupting(self) -> None:
        everybody = self.fault.deed == "compute"
        # In a phase of a collective no rank reacts to it, as in a library that is stuck: that part ends by itself.
        seconds = 2.0 if self.spot in self.fault.phases else 20.0
        run = self.begin(seconds=seconds, victim=-1 if everybody else None)
        self.await_fault(set(self.campaign.pool.ranks) if everybody else None)
        time.sleep(self.rng.uniform(0, 0.2))
        at = time.monotonic()
        run.interrupt()
        results = self.await_end(run)
        self.outcome.report = time.monotonic() - at
        if not results.interrupted or results.deaths:
            self.outcome.wrong.append(f"the cell ended with {results.root_cause}")

    def interrupting_any(self) -> None:
        run = self.begin()
        self.victim = self.outcome.victim = -1
        self.await_instant()
        at = time.monotonic()
        run.interrupt()
        results = self.await_end(run)
        self.outcome.report = time.monotonic() - at
        if not results.interrupted or results.deaths:
            self.outcome.wrong.append(f"the cell ended with {results.root_cause}")

    def interrupting_waiting(self) -> None:
        """The others wait for one rank, in a library's C++ that holds no lock of Python's."""
        run = self.begin(seconds=10 * self.campaign.hang_after)
        self.await_fault()

        def awaited(text: str) -> bool:
            return "waited" in text and names(text, self.victim)

        if self.sink.await_line(awaited, self.campaign.hang_after) is None:
            self.outcome.wrong.append("nobody said whom the others wait for")
        at = time.monotonic()
        run.interrupt()
        results = self.await_end(run)
        self.outcome.report = time.monotonic() - at
        if not results.interrupted or results.deaths:
            self.outcome.wrong.append(f"the cell ended with {results.root_cause}")

    def interrupting_deaf(self) -> None:
        run = self.begin(seconds=4.5)
        self.await_fault()
        time.sleep(self.rng.uniform(0, 0.2))
        at = time.monotonic()
        run.interrupt()
        self._await_answer(run, at, may_answer=True)
        self.await_end(run)

    def interrupting_stopped(self) -> None:
        run = self.begin()
        self.await_fault()
        pid = self._pids()[self.victim]
        time.sleep(self.rng.uniform(0, 0.2))
        at = time.monotonic()
        run.interrupt()
        self._await_answer(run, at)
        if self.rng.random() < 0.5:
            os.kill(pid, signal.SIGCONT)
            self.await_end(run)
            return
        for _ in range(2):  # the user insists, until no rank waits for that rank any more
            run.interrupt()
            if census.settled(lambda: not run.done, 2.0):
                break
        self.await_end(run)
        began = time.monotonic()
        self.campaign.pool.restart([self.victim], timeout=self.campaign.hang_after)
        self.outcome.repair = time.monotonic() - began
        self._new = self.victim

    def _await_answer(self, run: CellHandle, at: float, *, may_answer: bool = False) -> None:
        """Wait until the user is notified of the ranks that do not answer; of none if all can answer and do: the call
        need not be the user's thread's."""

        def found() -> tuple[float, str] | None:
            return self.sink.await_line(
                lambda text: names(text, self.victim) and not text.startswith("status:"), 0.05
            )

        census.settled(lambda: found() is None and not run.done, 20.0)
        line = found()
        if line is None and may_answer and run.results is not None:
            errors = run.results.errors
            if set(errors) == set(run.ranks) and all(error.interrupted for error in errors.values()):
                self.outcome.report = time.monotonic() - at
                return
        if line is None:
            self.outcome.wrong.append("nobody said which rank does not answer")
            return
        self.outcome.report = line[0] - at
