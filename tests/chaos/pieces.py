"""Parts of all trials: the beginning, the end, the messages to the user, and the checks afterwards."""

from __future__ import annotations

import random
import re
import signal
import time
from typing import Any

from chaos.campaign import Campaign, Hang, Sink
from chaos.faults import Fault
from chaos.figures import Outcome
from hvdlab.kernel_ext.notebook.cells.driver import CellHandle
from hvdlab.kernel_ext.notebook.cells.results import CellResults
from hvdlab.kernel_ext.notebook.output.error_report import report
from support.pool_probe import PoolProbe

FOREVER = 10**9  # more steps than any trial lasts: only the fault ends the training


def names(text: str, rank: int) -> bool:
    """Whether a text names this rank."""
    for listed in re.findall(r"\branks? (\d[\d, -]*)", text):
        for part in re.findall(r"(\d+)(?:-(\d+))?", listed):
            if int(part[0]) <= rank <= int(part[1] or part[0]):
                return True
    return False


class Pieces:
    """One fault, from the beginning of a cell to the next collective."""

    def __init__(self, campaign: Campaign, fault: Fault, number: int, rng: random.Random) -> None:
        self.campaign, self.fault, self.rng = campaign, fault, rng
        self.began = time.monotonic()
        self.victim = rng.randrange(campaign.size)
        spots = [*fault.spots, *fault.phases, *fault.phases, *(["any"] if fault.outside else [])]
        self.spot = rng.choice(spots)
        self.outcome = Outcome(
            campaign.seed, number, campaign.plane, fault.name, self.spot, self.victim, fault.limit
        )
        self.sink = Sink()

    def event(self, text: str) -> None:
        """Record an event, for the search for a failure's reason."""
        self.outcome.events.append(f"{time.monotonic() - self.began:8.3f} {text}")

    def play(self) -> Outcome:
        """Play it. Every error is in the outcome."""
        outcome, whole = self.outcome, False
        try:
            if self.fault.play in ("owner", "keeping_owner"):
                whole = True  # the campaign's pool has no part in it
                getattr(self, self.fault.play)()
                self._note_told()
                return outcome
            assert self.campaign.pool.state == "idle"
            self.began = time.monotonic()
            getattr(self, self.fault.play)()
            self.go_on()
            outcome.wrong += self.campaign.wrong_views()
            leaks, outcome.left_to_gloo = self.campaign.leaks()
            outcome.leaks += leaks
            whole = True
        except Hang as hang:
            outcome.hang = str(hang)
            for line in self.campaign.stacks():
                self.event(line)
        except Exception as error:  # noqa: BLE001  (any error is this fault's outcome)
            outcome.wrong.append(f"{type(error).__name__}: {error}")
        self._note_told()
        if not whole:  # the state of the pool is unknown
            self.campaign.discard()
        return outcome

    def _note_told(self) -> None:
        for at, text in self.sink.told:
            self.outcome.events.append(f"{at - self.began:8.3f} told: {text}")
        for rank, at in self.sink.ends.items():
            self.outcome.events.append(f"{at - self.began:8.3f} rank {rank} has ended the cell")
        for letter in self.campaign.mailbox.letters:
            said = (
                f"the machine has stood still for {letter['seconds']:.1f} s"
                if letter["what"] == "standstill"
                else f"rank {letter['rank']}: {letter['what']} in step {letter['step']}"
            )
            self.outcome.events.append(f"{letter['at'] - self.began:8.3f} {said}")
        self.outcome.events.sort(key=lambda line: float(line.split()[0]))

    # -- pieces ---------------------------------------------------------------------------------------------------

    def begin(self, *, steps: int = FOREVER, victim: int | None = None, **more: Any) -> CellHandle:
        """Let the training begin, with the fault in it if the rank does it to itself."""
        campaign, rng = self.campaign, self.rng
        order = {
            "name": f"trial {self.outcome.number}",
            "victim": self.victim if victim is None else victim,
            "plane": campaign.struck_plane,
            "phase": self.spot if self.spot in self.fault.phases else "",
            "spot": self.spot,
            "deed": self.fault.deed,
            "after": rng.randint(1, 12),
            "at": rng.randint(1, 12),
            "signal": int(signal.SIGKILL),
            "code": 7,
            "seconds": 0.0,
            "steps": steps,
            **more,
        }
        if self.spot == "any":
            order["victim"] = -2  # no rank does it to itself
        self.event(f"order {order}")
        campaign.mailbox.clear()
        return campaign.pool.start_run(f"{self.fault.loop}.run({order!r})", out=self.sink, label="[7]")

    def await_fault(self, ranks: set[int] | None = None) -> float:
        """Return the time at which the last of the victims was hit."""
        letters = self.campaign.mailbox.wait("fault", ranks or {self.victim}, self.campaign.hang_after)
        return float(max(letter["at"] for letter in letters))

    def await_instant(self) -> None:
        """Wait until training is under way on all ranks, and a random time more."""
        self.campaign.mailbox.wait("on", set(self.campaign.pool.ranks), self.campaign.hang_after)
        time.sleep(self.rng.uniform(0, 0.3))

    def await_end(self, run: CellHandle) -> CellResults:
        """Wait for the run's end."""
        try:
            results = run.wait(self.campaign.hang_after)
        except TimeoutError:
            stuck = self._where()
            raise Hang(f"the cell has not ended after {self.campaign.hang_after:g} s; {stuck}") from None
        said = report(results, colours=False)
        self.outcome.said = "\n".join(said)
        self.event("the cell has ended: " + (said[0] if said else "ok"))
        return results

    def _where(self) -> str:
        try:
            return "; ".join(
                f"rank {s.rank}: {s.state} {s.pending or ''}".strip() for s in self.campaign.pool.status()
            )
        except Exception as error:  # noqa: BLE001  (the pool is not well, which is being reported)
            return f"no status: {error}"

    def told(self, fault_at: float, at: float, text: str) -> None:
        """Record that the user was notified, by ``text``."""
        self.outcome.report = at - fault_at
        if self.victim >= 0 and not names(text, self.victim):
            self.outcome.wrong.append(f"rank {self.victim} is not named: {text!r}")
        if self.fault.says not in text:
            self.outcome.wrong.append(f"`{self.fault.says}` is not said: {text!r}")

    def go_on(self) -> None:
        """Check memory, the next collective and the lost rank's return, which must work after every fault."""
        campaign, outcome = self.campaign, self.outcome
        pool = campaign.pool
        left = list(pool.ranks)
        began = time.monotonic()
        self.check(left)
        outcome.next_collective = time.monotonic() - began
        self.event(f"a collective of each kind has worked on ranks {left}")
        outcome.lost += campaign.lost_memory([rank for rank in left if rank != self._new])
        if pool.lost:
            began = time.monotonic()
            repaired = pool.repair(timeout=campaign.hang_after)
            outcome.repair = time.monotonic() - began
            self.event(f"repaired ranks {repaired}")
            campaign.set_up(repaired)
        elif self._new is not None:
            campaign.set_up([self._new])
        if len(left) < campaign.size or self._new is not None:
            self.check(list(range(campaign.size)))
        if self.fault.loop == "wrapped":
            outcome.lost += campaign.train_on()

    _new: int | None = None
    """A rank that was started anew already."""

    def check(self, ranks: list[int]) -> None:
        """Check that a collective of each kind works on exactly these ranks, with right results."""
        if self._new in ranks:
            self.campaign.set_up([self._new])
        for rank, found in self.campaign.values("training.check()", ranks).items():
            if found != ranks:
                self.outcome.wrong.append(f"rank {rank} took part with {found} instead of {ranks}")

    def _goes_on(self, run: CellHandle) -> None:
        results = self.await_end(run)
        if not results.ok:
            self.outcome.wrong.append(f"the cell did not go on: {self.outcome.said}")

    def _pids(self) -> dict[int, int]:
        """Return processes by rank; those that can't answer as well."""
        pids: dict[int, int] = PoolProbe(self.campaign.pool).group.pids()
        return pids
