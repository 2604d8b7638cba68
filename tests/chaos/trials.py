"""How each kind of fault is played, and judged."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from chaos import census
from chaos.campaign import Campaign, Hang, Sink
from chaos.faults import STALL, Fault
from chaos.figures import Outcome
from forked_ranks import allow_files
from hvdlab.collectives.errors import StartError
from hvdlab.kernel_ext.cells.drive import CellHandle
from hvdlab.kernel_ext.cells.results import CellResults
from hvdlab.kernel_ext.output.report import report
from hvdlab.kernel_ext.pool import Pool

FOREVER = 10**9
OWNER = Path(__file__).with_name("owner.py")
PARTS = {"coordinator": "collectives.coordinator", "warm": "hvd-warm", "controller": "hvd-controller"}


def names(text: str, rank: int) -> bool:
    """Whether a text names this rank."""
    for listed in re.findall(r"\branks? (\d[\d, -]*)", text):
        for part in re.findall(r"(\d+)(?:-(\d+))?", listed):
            if int(part[0]) <= rank <= int(part[1] or part[0]):
                return True
    return False


class Trial:
    """One fault, from the beginning of a cell to the next collective. Made by :meth:`Campaign.trial`."""

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
        """Note what happens, for who looks for the reason of a failure."""
        self.outcome.events.append(f"{time.monotonic() - self.began:8.3f} {text}")

    def play(self) -> Outcome:
        """Play it. Whatever goes wrong is in the outcome."""
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
            leaks, outcome.left_to_gloo = self.campaign.leaks()
            outcome.leaks += leaks
            whole = True
        except Hang as hang:
            outcome.hang = str(hang)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is what came of this fault)
            outcome.wrong.append(f"{type(error).__name__}: {error}")
        self._note_told()
        if not whole:  # nobody knows what state the pool is in
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
            "plane": campaign.plane,
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
            order["victim"] = -2  # nobody does it to himself
        self.event(f"order {order}")
        campaign.mailbox.clear()
        return campaign.pool.start_run(f"training.run({order!r})", out=self.sink, label="[7]")

    def await_fault(self, ranks: set[int] | None = None) -> float:
        """The time at which the last of the victims was hit."""
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
        """The user knows; ``text`` is what he was told."""
        self.outcome.report = at - fault_at
        if self.victim >= 0 and not names(text, self.victim):
            self.outcome.wrong.append(f"rank {self.victim} is not named: {text!r}")
        if self.fault.says not in text:
            self.outcome.wrong.append(f"`{self.fault.says}` is not said: {text!r}")

    def go_on(self) -> None:
        """What must work after every fault: memory, the next collective, and the lost rank's return."""
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

    _new: int | None = None
    """A rank that was started anew already."""

    def check(self, ranks: list[int]) -> None:
        """A collective of each kind works on exactly these ranks, with right results."""
        if self._new in ranks:
            self.campaign.set_up([self._new])
        for rank, found in self.campaign.values("training.check()", ranks).items():
            if found != ranks:
                self.outcome.wrong.append(f"rank {rank} took part with {found} instead of {ranks}")

    # -- ranks that fail or die -----------------------------------------------------------------------------------

    def failing(self) -> None:
        run = self.begin()
        at = self.await_fault()
        results = self.await_end(run)
        self.told(at, time.monotonic(), self.outcome.said)
        if results.ok or results.deaths:
            self.outcome.wrong.append(f"the cell ended with {results.root_cause}")

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
        for rank in (self.victim, other):
            os.kill(pids[rank], signal.SIGKILL)
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
        warm = self.campaign.pool._base._base.warm.pid
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

    def bothering(self) -> None:
        """Strangers connect to all that listens, send what is no message, and stay."""
        self.victim = self.outcome.victim = -1
        run = self.begin(steps=60)
        self.await_instant()
        at = time.monotonic()
        with contextlib.ExitStack() as strangers:
            path = self.campaign.pool._base._base.coordinator.address.removeprefix("unix:")
            unix = strangers.enter_context(socket.socket(socket.AF_UNIX))
            unix.settimeout(self.campaign.hang_after)
            unix.connect(path)
            unix.sendall(len(garbage := self.rng.randbytes(200)).to_bytes(4, "little") + garbage)
            with contextlib.suppress(ConnectionResetError):
                while unix.recv(4096):
                    pass
            self.outcome.report = time.monotonic() - at
            for port in self._ports():
                tcp = strangers.enter_context(socket.socket())
                tcp.settimeout(0.2)  # a port that lets no stranger in does not answer
                with contextlib.suppress(OSError):
                    tcp.connect(("127.0.0.1", port))
                    tcp.sendall(self.rng.randbytes(self.rng.choice((1, 64, 5000))))
            self._goes_on(run)

    def _ports(self) -> list[int]:
        """Where processes of the pool listen on the loopback interface."""
        found: set[int] = set()
        for pid in census.marked(self.campaign.mark):
            with contextlib.suppress(psutil.Error):
                listening = psutil.Process(pid).net_connections("tcp4")
                found |= {c.laddr.port for c in listening if c.status == psutil.CONN_LISTEN}
        return sorted(found)

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

    def _goes_on(self, run: CellHandle) -> None:
        results = self.await_end(run)
        if not results.ok:
            self.outcome.wrong.append(f"the cell did not go on: {self.outcome.said}")

    def _pids(self) -> dict[int, int]:
        """Processes by rank; those that can't answer as well."""
        pids: dict[int, int] = self.campaign.pool._base.group.pids()
        return pids

    # -- interrupts -----------------------------------------------------------------------------------------------

    def interrupting(self) -> None:
        everybody = self.fault.deed == "compute"
        # In a phase of a collective nobody hears it, as in a library that is stuck: that part ends by itself.
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
        for _ in range(2):  # the user insists, until nobody waits for that rank any more
            run.interrupt()
            if census.settled(lambda: not run.done, 2.0):
                break
        self.await_end(run)
        began = time.monotonic()
        self.campaign.pool.restart([self.victim], timeout=self.campaign.hang_after)
        self.outcome.repair = time.monotonic() - began
        self._new = self.victim

    def _await_answer(self, run: CellHandle, at: float, *, may_answer: bool = False) -> None:
        """The user is told who does not answer; nobody, if all may answer and do: the call need not be the user's thread's."""

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

    # -- processes other than ranks -------------------------------------------------------------------------------

    def losing_part(self) -> None:
        run = self.begin()
        self.victim = self.outcome.victim = -1
        self.await_instant()
        wanted = PARTS[self.fault.deed]
        pid = next(pid for pid, name in census.marked(self.campaign.mark).items() if wanted in name)
        at = time.monotonic()
        os.kill(pid, signal.SIGKILL)

        def line() -> tuple[float, str] | None:
            return next((told for told in list(self.sink.told) if not told[1].startswith("status:")), None)

        census.settled(lambda: line() is None and not run.done, 5.0)
        if (first := line()) is not None:
            self.told(at, first[0], first[1])
        if not run.done:
            time.sleep(self.rng.uniform(0, 0.5))
            run.interrupt()
        ended = run.done
        self.await_end(run)
        if first is None and ended:
            self.told(at, time.monotonic(), self.outcome.said)
        if self.outcome.report is None:
            self.outcome.wrong.append("nobody said that it is gone")

    def owner(self) -> None:
        """A process with a pool of its own, which is killed while it trains."""
        with self._owned() as (mark, temporary, process, _):
            at = time.monotonic()
            process.kill()
            process.wait()
            census.settled(lambda: bool(census.marked(mark) or census.files(temporary)), 10.0)
            self.outcome.report = time.monotonic() - at

    def keeping_owner(self) -> None:
        """As before, but the pool was to be kept: this process goes on with it."""
        name = f"kept-{self.outcome.number}"
        with self._owned(name) as (_, _, process, memory):
            at = time.monotonic()
            process.kill()
            process.wait()
            pool = Pool.attach(name, timeout=self.campaign.hang_after)
            try:
                self.outcome.report = time.monotonic() - at
                self.event("attached")
                pool.interrupt()  # they go on to train
                handle = pool.start_run("(training.check(), training.memory())")
                results = handle.wait(self.campaign.hang_after)
                self.outcome.next_collective = time.monotonic() - at - self.outcome.report
                if not results.ok:
                    self.outcome.wrong.append(f"the next cell failed: {results.root_cause}")
                    return
                for rank, (ranks, now) in ((rank, results[rank]) for rank in results.ranks):
                    if ranks != list(range(self.campaign.size)):
                        self.outcome.wrong.append(f"rank {rank} took part with {ranks}")
                    before = memory[str(rank)]
                    changed = [key for key in before if key != "steps" and now[key] != before[key]]
                    self.outcome.lost += [f"rank {rank}: {key} has changed" for key in changed]
            finally:
                pool.stop()

    @contextlib.contextmanager
    def _owned(self, *words: str) -> Iterator[tuple[str, Path, subprocess.Popen[bytes], dict[str, Any]]]:
        """An owner that trains; afterwards nothing of it may be left."""
        self.campaign.mailbox.clear()
        mark = f"{self.campaign.mark}-{self.outcome.number}"
        shm = census.shared_memory()
        temporary = self.campaign.directory / f"o{self.outcome.number}"
        temporary.mkdir()
        command = [sys.executable, str(OWNER), str(self.campaign.size), self.campaign.plane]
        process = subprocess.Popen(
            [*command, self.campaign.mailbox.path, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                census.MARK: mark,
                "TMPDIR": str(temporary),
                "PYTHONPATH": os.pathsep.join(
                    [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
                ),
            },
        )
        try:
            assert process.stdout is not None
            memory = json.loads(process.stdout.readline() or b"null")
            if memory is None:
                raise RuntimeError("the owner did not start")
            self.event("the owner's ranks train")
            time.sleep(self.rng.uniform(0, 0.5))
            yield mark, temporary, process, memory
        finally:
            process.kill()
            process.communicate()
        if not census.settled(lambda: bool(census.marked(mark) or census.files(temporary)), 5.0):
            self.outcome.leaks += [f"process {pid} {name}" for pid, name in census.marked(mark).items()]
            self.outcome.leaks += [f"file {name}" for name in sorted(census.files(temporary))]
        self.outcome.leaks += [f"/dev/shm/{name}" for name in sorted(census.shared_memory() - shm)]
