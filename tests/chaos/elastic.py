"""Elastic training over changes of its ranks: announcements, deaths and interrupts while ranks come and go.

A cell trains in the background while changes are drawn and made, some of them in the midst of another; it ends now and
then, and its results are calculated again from the ranks of each step.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from chaos import census
from chaos.campaign import HANG, Campaign, Hang, Sink
from chaos.elastic_victim import SET_UP, TRAIN
from chaos.figures import Outcome
from chaos.membership import Change, MembershipCampaign, Teller, wrong_results
from chaos.parts import PARTS
from chaos.phases import PHASES
from hvdlab.collectives.errors import StartError
from hvdlab.kernel_ext.notebook.cells.driver import CellHandle
from hvdlab.kernel_ext.notebook.elastic import Bounds
from hvdlab.kernel_ext.notebook.output.error_report import report
from support.pool_probe import PoolProbe

LEAST, MOST = 2, 5
"""Ranks that the training must have, and may have."""

APART = 1.0
"""Seconds after the beginning of one change in which another one comes that meets it."""


CHANGES = (
    Change("ranks are added", "grow", announced=True, weight=4),
    Change("ranks are let go", "shrink", announced=True, weight=3),
    Change("ranks are let go and others added at once", "shrink_and_grow", announced=True),
    Change("SIGKILL of a rank at any instant", "kill", weight=4),
    Change("SIGKILL of a rank in a phase of a collective", "kill_in_phase", weight=4),
    Change("SIGKILL of two ranks at once", "kill_two"),
    Change("SIGKILL until too few are left", "kill_to_too_few"),
    Change("SIGKILL of a rank while one joins", "kill_while_joining", weight=4),
    Change("SIGKILL of a rank while one leaves", "kill_while_leaving"),
    Change("a rank is restarted", "restart"),
    Change("a rank is stopped (SIGSTOP) for a while", "pause", announced=True, weight=1),
    Change("the coordinator is killed", "kill_coordinator", weight=1),
    Change("the coordinator is killed while a rank joins", "kill_coordinator_while_joining", weight=1),
    Change("the fork server is killed while a rank joins", "kill_fork_server_while_joining"),
    Change("interrupt at any instant", "interrupt"),
    Change("interrupt while a rank joins", "interrupt_while_joining"),
)


@dataclass(frozen=True, slots=True)
class RanksOfAPool:
    """Ranks that are to train together."""

    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"ranks {list(self.ranks)}"

    def together(self, letters: Sequence[dict[str, Any]], since: float) -> bool:
        told = Counter(
            letter["rank"]
            for letter in letters
            if letter["what"] == "step" and letter["at"] > since and letter["group"] == list(self.ranks)
        )
        return all(told[rank] >= 2 for rank in self.ranks)


class ElasticCampaign(MembershipCampaign, Campaign):
    """Campaign of changes on a pool that trains. Context manager.

    Args:
        changes: The changes to draw from.
    """

    within = 5.0
    longest_wait = 0.3
    round = 8

    def __init__(
        self,
        seed: int,
        plane: str,
        *,
        changes: Sequence[Change] = CHANGES,
        hang_after: float = HANG,
        views: bool = False,
    ) -> None:
        Campaign.__init__(self, seed, plane, size=3, hang_after=hang_after, views=views)
        MembershipCampaign.__init__(self, changes)
        #: The cell that trains.
        self._run: CellHandle | None = None
        self._sink = Sink()

    # -- the pool ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        with super()._surroundings():
            os.environ["HVDLAB_PRELOAD"] = "torch,torch._dynamo"
            yield

    def set_up(self, ranks: Sequence[int]) -> None:
        """Give ranks the model and its training."""
        source = SET_UP.format(seed=self.seed, mailbox=self.mailbox.path, plane=self.plane)
        self.values(source, list(ranks))
        self._forget_tellers()

    @property
    def trains(self) -> bool:
        return self._run is not None

    def start_training(self) -> None:
        """Begin a cell that trains, on ranks that all have its definitions."""
        pool = self.pool
        if pool.lost:
            pool.repair(timeout=self.hang_after)
        if pool.newcomers:
            pool.sync(timeout=self.hang_after)
        (self.directory / "stop").unlink(missing_ok=True)
        self.mailbox.clear()
        self._sink = Sink()
        self._run = pool.start_run(TRAIN, out=self._sink, label="[7]", elastic=Bounds(LEAST, MOST))
        self._await_steps()

    def end_training(self) -> list[str]:
        """End the cell. Returns the errors of its results and of the views, and the leftovers."""
        if self._run is None:
            return []
        if self.pool.size != self.size:
            self.pool.resize(self.size, timeout=self.hang_after)
            self._await_steps()
        (self.directory / "stop").touch()
        run, self._run = self._run, None
        results = self._await_end(run)
        if not results.ok:
            return ["the cell failed: " + " ".join(report(results, colours=False))]
        wrong = wrong_results([results[rank] for rank in results.ranks])
        wrong += self.wrong_views()
        leaks, _ = self.leaks()
        return wrong + [f"left over: {leak}" for leak in leaks]

    def discard(self) -> None:
        self._run = None
        Campaign.discard(self)

    def _dice(self, number: int) -> random.Random:
        return random.Random(f"{self.seed}/{number}/{self.plane}")

    def _complete(self, outcome: Outcome) -> None:
        for at, text in self._sink.told:
            if at >= self._began:
                outcome.events.append(f"{at - self._began:8.3f} told: {text}")
        outcome.events.sort(key=lambda line: float(line.split()[0]))

    # -- checks after each change -------------------------------------------------------------------------------------

    def _await_steps(self) -> float:
        """Wait until all ranks of the pool have completed two commits together. Returns seconds since the change.

        Raises :class:`Hang`.
        """
        return self._await_together(lambda: RanksOfAPool(tuple(self.pool.ranks)))

    def _raise_if_ended(self) -> None:
        if self._run is not None and self._run.done:
            results = self._run.wait(self.hang_after)
            raise RuntimeError("the cell has ended: " + " ".join(report(results, colours=False)))

    def _goes_on(self) -> None:
        """All ranks that there are train together, the first time after the change and once the lost ranks are back."""
        self._outcome.report = self._await_steps()
        if self.pool.lost:
            self._changes("repair")
            repaired = self.pool.repair(timeout=self.hang_after)
            self._event(f"repaired ranks {repaired}")
            self._outcome.repair = self._await_steps()

    def _tellers(self, letters: Sequence[dict[str, Any]]) -> Iterator[tuple[Teller, dict[str, Any]]]:
        pids = self._pids_of_ranks()
        for letter in letters:
            if letter["pid"] == pids.get(letter["rank"]):
                yield Teller(f"rank {letter['rank']}", letter["pid"]), letter

    def _where(self) -> str:
        try:
            states = "; ".join(
                f"rank {s.rank}: {s.state} {s.pending or ''}".strip() for s in self.pool.status()
            )
        except Exception as error:  # noqa: BLE001  (the pool is not well, which is being reported)
            states = f"no status: {error}"
        return f"{states}; {self.pool.elastic().members}; last letters {self.mailbox.letters[-4:]}"

    def _await_end(self, run: CellHandle) -> Any:
        try:
            return run.wait(self.hang_after)
        except TimeoutError:
            raise Hang(f"the cell has not ended after {self.hang_after:g} s; {self._where()}") from None

    # -- pieces of changes ----------------------------------------------------------------------------------------------

    def _pids_of_ranks(self) -> dict[int, int]:
        pids: dict[int, int] = PoolProbe(self.pool).group.pids()
        return pids

    def _kill(self, *ranks: int) -> None:
        pids = self._pids_of_ranks()
        self._changes(f"SIGKILL of ranks {ranks}")
        for rank in ranks:
            with contextlib.suppress(KeyError, ProcessLookupError):  # it has left, or is not forked yet
                os.kill(pids[rank], signal.SIGKILL)

    def _kill_part(self, part: str) -> None:
        wanted = PARTS[part]
        pid = next(pid for pid, name in census.marked(self.mark).items() if wanted in name)
        self._changes(f"SIGKILL of {part} {pid}")
        os.kill(pid, signal.SIGKILL)

    def _someone(self) -> int:
        return self._rng.choice(tuple(self.pool.ranks))

    def _resize(self, size: int) -> None:
        self._changes(f"resize from {self.pool.size} to {size}")
        self.pool.resize(size, timeout=self.hang_after)

    def _make_room(self) -> None:
        if self.pool.size == MOST:
            self._resize(self._rng.randint(LEAST, MOST - 1))
            self._await_steps()

    def _make_spare(self) -> None:
        """Have more ranks than are needed."""
        if self.pool.size <= LEAST + 1:
            self._resize(LEAST + 2)
            self._await_steps()

    def _meanwhile(self, size: int, deed: Callable[[], None]) -> None:
        """Resize, and do this at some instant of it, or soon after."""
        failed: list[BaseException] = []

        def resize() -> None:
            try:
                self.pool.resize(size, timeout=self.hang_after)
            except BaseException as error:  # noqa: BLE001  (reported below)
                failed.append(error)

        thread = threading.Thread(target=resize, name="chaos-resize")
        self._changes(f"resize from {self.pool.size} to {size}")
        thread.start()
        self._wait_a_little(APART)
        try:
            deed()
        finally:
            thread.join(2 * self.hang_after)
        if thread.is_alive():
            raise Hang("resize does not end")
        for error in failed:
            # The killed process can be the newcomer itself, while it started.
            if not isinstance(error, StartError):
                raise error
            self._event(f"resize: {error}")

    def _ended_by(self, run: CellHandle) -> None:
        """Check that the interrupted cell ends on all ranks, and that their state continues in the next one."""
        results = self._await_end(run)
        self._run = None
        self._event("the cell has ended")
        if not results.interrupted:
            self._outcome.wrong.append(f"the cell ended with {results.root_cause}")
        if bad := [
            f"rank {rank}: {error.ename}: {error.evalue}"
            for rank, error in results.errors.items()
            if not (error.interrupted or error.aborted)
        ]:
            self._outcome.wrong.append(f"not all were interrupted: {bad}")
        self.start_training()
        self._outcome.report = time.monotonic() - self._at

    # -- changes --------------------------------------------------------------------------------------------------------

    def grow(self) -> None:
        self._make_room()
        self._resize(self._rng.randint(self.pool.size + 1, MOST))
        self._goes_on()

    def shrink(self) -> None:
        self._make_spare()
        self._resize(self._rng.randint(LEAST, self.pool.size - 1))
        self._goes_on()

    def shrink_and_grow(self) -> None:
        self._make_spare()
        size = self.pool.size
        self._resize(self._rng.randint(LEAST, size - 1))
        self._wait_a_little()
        self._resize(self._rng.randint(size, MOST))
        self._goes_on()

    def kill(self) -> None:
        self._make_spare()
        self._wait_a_little()
        self._kill(self._someone())
        self._goes_on()

    def kill_in_phase(self) -> None:
        self._make_spare()
        rank, phase = self._someone(), self._rng.choice(PHASES)
        order = {"phase": phase, "after": self._rng.randint(1, 12), "deed": "kill", "signal": 9}
        self._outcome.phase, self._outcome.victim = phase, rank
        text = self.directory / f"order-{rank}.new"
        text.write_text(json.dumps(order))
        self._changes(f"rank {rank} will kill itself in {phase}")
        text.rename(self.directory / f"order-{rank}")
        if not census.settled(lambda: rank not in self.pool.lost, self.hang_after):
            raise Hang(f"rank {rank} did not come to {phase}")
        self._at = time.monotonic()
        self._goes_on()

    def kill_two(self) -> None:
        if self.pool.size < LEAST + 2:
            self._resize(LEAST + 2)
            self._await_steps()
        self._kill(*self._rng.sample(tuple(self.pool.ranks), 2))
        self._goes_on()

    def kill_to_too_few(self) -> None:
        self._resize(LEAST)
        self._await_steps()
        self._kill(self._someone())
        told = self._sink.await_line(
            # Of this loss: the cell can have reported another one before.
            lambda text: f"of at least {LEAST} ranks" in text and "left" in text,
            self.hang_after,
            self._at,
        )
        if told is None:
            self._outcome.wrong.append("it was not said that too few ranks are left")
        self._wait_a_little(1.0)
        self._changes("repair")
        self.pool.repair(timeout=self.hang_after)
        self._goes_on()

    def kill_while_joining(self) -> None:
        self._make_room()
        self._make_spare()
        self._make_room()
        size = self.pool.size + 1
        victim = self._rng.randrange(size)  # the newcomer as well
        self._meanwhile(size, lambda: self._kill(victim))
        self._goes_on()

    def kill_while_leaving(self) -> None:
        self._resize(MOST)
        self._await_steps()
        victim = self._rng.randrange(MOST)
        self._meanwhile(MOST - 1, lambda: self._kill(victim))
        self._goes_on()

    def restart(self) -> None:
        self._make_spare()
        rank = self._someone()
        self._changes(f"restart of rank {rank}")
        self.pool.restart([rank], timeout=self.hang_after)
        self._goes_on()

    def pause(self) -> None:
        pid = self._pids_of_ranks()[self._someone()]
        os.kill(pid, signal.SIGSTOP)
        self._wait_a_little(2.0)
        self._changes("SIGCONT")
        os.kill(pid, signal.SIGCONT)
        self._goes_on()

    def kill_coordinator(self) -> None:
        self._wait_a_little()
        self._kill_part("coordinator")
        self._goes_on()

    def kill_coordinator_while_joining(self) -> None:
        self._make_room()
        self._meanwhile(self.pool.size + 1, lambda: self._kill_part("coordinator"))
        self._goes_on()

    def kill_fork_server_while_joining(self) -> None:
        self._make_room()
        self._meanwhile(self.pool.size + 1, lambda: self._kill_part("warm"))
        self._goes_on()

    def interrupt(self) -> None:
        self._wait_a_little()
        run = self._run
        assert run is not None
        self._changes("interrupt")
        run.interrupt()
        self._ended_by(run)

    def interrupt_while_joining(self) -> None:
        self._make_room()
        run = self._run
        assert run is not None

        def interrupt() -> None:
            self._changes("interrupt")
            run.interrupt()

        self._meanwhile(self.pool.size + 1, interrupt)
        self._ended_by(run)
