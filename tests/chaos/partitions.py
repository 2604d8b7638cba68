"""Hosts that are cut off: which ranks are declared lost, when, and the fate of the others. Needs the right to make
hosts.

Three hosts with two ranks each, joined over TLS. No process is notified of a cut: connections are half-open, until the
heartbeat finds out or the network is back.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Self

import numpy as np

import hvdlab.numpy as hvd
from chaos.figures import Outcome
from chaos.victim import digest
from hvdlab.collectives import context
from hvdlab.collectives.errors import AbortedError, CauseKind
from support.network.namespaces import Network
from support.ranks.on_hosts import RanksOnHosts

HOSTS, PER_HOST = 3, 2
PING_AFTER, DEAD_AFTER = 0.5, 3.0
ENV = {
    "HVDLAB_PING_AFTER": str(PING_AFTER),
    "HVDLAB_DEAD_AFTER": str(DEAD_AFTER),
    "HVDLAB_REATTACH": "2",
}
HANG = 60.0  # seconds after which an unfinished step counts as hanging
LIMIT = DEAD_AFTER + 1.5
"""Seconds after which all that are left must know who is lost."""
SOONEST = DEAD_AFTER - PING_AFTER - 0.5
"""The last sign of life may have come as long before the cut as there is nothing to be said."""
KINDS = ("a host is cut off", "a host is cut off for a moment", "a host is gone, and nobody is told")

# -- on the ranks -------------------------------------------------------------------------------------------------

KEPT: dict[str, Any] = {}


def fill(seed: int) -> str:
    """Define variables that must be there afterwards; return their hash."""
    KEPT["data"] = np.random.default_rng([seed, context.engine().rank]).standard_normal(50_000)
    return remember()


def remember() -> str:
    return digest(KEPT["data"])


def total(count: int = 20_000) -> float:
    return float(hvd.allreduce(np.full(count, context.engine().rank + 1.0), "total", op=hvd.Sum)[0])


def train(steps: int) -> tuple[int, str, tuple[int, ...], float]:
    """Reduce until it fails: steps, the cause's kind and ranks, and when that was known."""
    wanted = sum(rank + 1 for rank in context.engine().ranks())
    for step in range(steps):
        try:
            found = total()
        except AbortedError as error:
            return step, error.cause.kind.value, tuple(error.cause.ranks), time.monotonic()
        if found != wanted:
            raise AssertionError(f"step {step}: {found} instead of {wanted}")
    return steps, "", (), time.monotonic()


def total_of_survivors() -> float:
    """The ranks of a host need not be declared dead in the same moment."""
    while True:
        try:
            return total()
        except AbortedError as error:
            if error.cause.kind is not CauseKind.RANK_DIED:
                raise


def attempts() -> int:
    """Return how many of three collectives are done here."""
    done = 0
    for _ in range(3):
        try:
            total()
        except AbortedError:
            continue
        done += 1
    return done


def rejoin() -> None:
    context.shutdown()
    context.init()


# -- the campaign -------------------------------------------------------------------------------------------------


class Partitions:
    """Campaign of trials on one job over several hosts, which is replaced only if it can't be used any more.

    Args:
        seed: Seed of all draws.

    Attributes:
        started: How many jobs there were.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.started = seed, 0
        self._stack = ExitStack()
        self._ranks: RanksOnHosts | None = None
        self._memory: dict[int, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._discard()

    def play(self, count: int, first: int = 0) -> Iterator[Outcome]:
        """Play ``count`` trials, beginning with the one that has this number."""
        for number in range(first, first + count):
            yield self._trial(number)

    def _trial(self, number: int) -> Outcome:
        rng = random.Random(f"{self.seed}/{number}/partition")
        kind = KINDS[2] if number % 6 == 5 else KINDS[number % 2]
        host = rng.randrange(1, HOSTS)  # the coordinator is on the first
        limit = LIMIT if kind != KINDS[1] else HANG
        outcome = Outcome(self.seed, number, "tls", kind, "any", host * PER_HOST, limit)
        try:
            ranks = self._job()
            if kind == KINDS[1]:
                self._for_a_moment(ranks, outcome, host, rng)
            else:
                self._for_good(ranks, outcome, host, rng, killed=kind == KINDS[2])
        except TimeoutError as error:
            outcome.hang = str(error)
        except Exception as error:  # noqa: BLE001  (any error is this fault's outcome)
            outcome.wrong.append(f"{type(error).__name__}: {error}")
        if not outcome.ok:
            self._discard()
        return outcome

    def _job(self) -> RanksOnHosts:
        if self._ranks is None:
            self.started += 1
            network = self._stack.enter_context(Network(HOSTS))
            self._ranks = self._stack.enter_context(RanksOnHosts(network, PER_HOST, env=ENV))
            seeded = self._ranks.run(fill, self.seed)
            self._memory = dict(enumerate(seeded))
            self._ranks.run(total, timeout=HANG)
        return self._ranks

    def _discard(self) -> None:
        ranks, self._ranks = self._ranks, None
        for process in ranks.processes if ranks is not None else ():
            process.kill()  # otherwise they wait for those that are gone
        self._stack.close()

    def _for_a_moment(self, ranks: RanksOnHosts, outcome: Outcome, host: int, rng: random.Random) -> None:
        """Cut for less than the heartbeat: no rank is lost, and training continues."""
        seconds = rng.uniform(0.2, DEAD_AFTER / 3)
        running = ranks.start(train, 300)
        time.sleep(rng.uniform(0, 0.3))
        cut = time.monotonic()
        ranks.network.hosts[host].cut()
        time.sleep(seconds)
        ranks.network.hosts[host].mend()
        for rank, (steps, why, _, _) in enumerate(running.results(HANG)):
            if why:
                outcome.wrong.append(
                    f"rank {rank} failed ({why}) in step {steps} for a cut of {seconds:.1f} s"
                )
        outcome.report = time.monotonic() - cut
        self._check_all(ranks, outcome)

    def _for_good(
        self, ranks: RanksOnHosts, outcome: Outcome, host: int, rng: random.Random, *, killed: bool
    ) -> None:
        """Cut for longer than the heartbeat: they are lost, the others continue, and living ones can return with the
        network."""
        gone = range(host * PER_HOST, (host + 1) * PER_HOST)
        left = [rank for rank in range(ranks.size) if rank not in gone]
        running = {rank: ranks.start(train, 10**9, ranks=[rank]) for rank in range(ranks.size)}
        time.sleep(rng.uniform(0, 0.3))
        cut = time.monotonic()
        ranks.network.hosts[host].cut()
        try:
            if killed:
                for rank in gone:
                    ranks.kill(rank)
            for rank in left:
                self._judge(outcome, rank, running[rank].results(HANG)[0], cut, gone)
            wanted = float(sum(rank + 1 for rank in left))
            began = time.monotonic()
            found = ranks.run(total_of_survivors, ranks=left, timeout=HANG)
            outcome.next_collective = time.monotonic() - began
            if found != [wanted] * len(left):
                outcome.wrong.append(f"those that are left have {found} instead of {wanted}")
            if not killed:
                self._cut_off(ranks, outcome, running, gone)
        finally:
            ranks.network.hosts[host].mend()
        if killed:  # where the processes of a job are started by hand nothing restarts them
            self._check_memory(ranks, outcome, left)
            self._discard()
            return
        began = time.monotonic()
        ranks.run(rejoin, ranks=gone, timeout=HANG)
        self._check_all(ranks, outcome)
        outcome.repair = time.monotonic() - began

    def _judge(
        self,
        outcome: Outcome,
        rank: int,
        ended: tuple[int, str, tuple[int, ...], float],
        cut: float,
        gone: range,
    ) -> None:
        """Check the error that a remaining rank received, and its time."""
        _, why, culprits, at = ended
        if why != CauseKind.RANK_DIED.value or not set(culprits) <= set(gone):
            outcome.wrong.append(f"rank {rank} was told of {why} and ranks {culprits}")
        if at - cut < SOONEST:
            outcome.wrong.append(f"rank {rank} was told after {at - cut:.2f} s already")
        outcome.report = max(outcome.report or 0.0, at - cut)

    def _cut_off(self, ranks: RanksOnHosts, outcome: Outcome, running: dict[int, Any], gone: range) -> None:
        """Those that are cut off have failed, too, and make no group of their own."""
        for rank in gone:
            _, why, _, _ = running[rank].results(HANG)[0]
            if not why:
                outcome.wrong.append(f"rank {rank}, which was cut off, went on")
        done = ranks.run(attempts, ranks=gone, timeout=HANG)
        if any(done):
            outcome.wrong.append(f"ranks {list(gone)}, which were cut off, did {done} collectives")

    def _check_all(self, ranks: RanksOnHosts, outcome: Outcome) -> None:
        """Check that all ranks are there, with their memory."""
        wanted = float(sum(range(1, ranks.size + 1)))
        found = ranks.run(total, timeout=HANG)
        if found != [wanted] * ranks.size:
            outcome.wrong.append(f"all ranks have {found} instead of {wanted}")
        self._check_memory(ranks, outcome, range(ranks.size))

    def _check_memory(self, ranks: RanksOnHosts, outcome: Outcome, numbers: Sequence[int]) -> None:
        for rank, memory in zip(numbers, ranks.run(remember, ranks=numbers), strict=True):
            if memory != self._memory[rank]:
                outcome.lost.append(f"rank {rank} has {memory} instead of {self._memory[rank]}")
