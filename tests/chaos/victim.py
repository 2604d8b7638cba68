"""Program of the ranks of a campaign: a training loop that checks each of its results, and the faults it meets.

A rank reports to the campaign by datagrams when it is under way and when a fault begins, with the time of the clock
that all processes of a host share.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from IPython.core.getipython import get_ipython

import hvdlab.numpy as hvd
from chaos.phases import Ambush
from hvdlab.collectives import context
from hvdlab.collectives.planes import gloo

BIG, SMALL = 60_000, 3_000
"""Elements of two gradients: one that is cut and reduced in slices, one that everybody reduces himself."""


APART = 0.05
"""Seconds that all ranks sleep between two steps: nothing is pending then, on any of them."""


class Boom(Exception):
    """Error that a rank is made to raise."""


def _left_to_gloo() -> list[int]:
    """Count from now on how many groups are left to Gloo, which can't cancel an operation."""
    count = [0]
    give_up = gloo.GlooPlane._give_up

    def counted(self: gloo.GlooPlane) -> None:
        count[0] += 1
        give_up(self)

    gloo.GlooPlane._give_up = counted  # type: ignore[method-assign]
    return count


LEFT = _left_to_gloo()


Deed = Callable[[Any, dict[str, Any]], bool | None]
"""What a rank does to itself, by the order of the campaign. True ends its cell."""


def digest(array: npt.NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


class Victim:
    """Rank that trains, and to which faults happen.

    Args:
        mailbox: Socket of the campaign's mailbox.

    Attributes:
        deeds: Faults that the rank can cause in itself, by name.
        rank: This rank.
        steps: Steps completed.
    """

    deeds: ClassVar[dict[str, Deed]]

    def __init__(self, mailbox: str) -> None:
        context.init()
        self.rank = context.engine().rank
        self.steps = 0
        self._mailbox = mailbox

    def tell(self, what: str) -> None:
        """Send a message to the campaign."""
        message = {"rank": self.rank, "what": what, "at": time.monotonic_ns() / 1e9, "step": self.steps}
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(json.dumps(message).encode(), self._mailbox)

    def strike(self, order: dict[str, Any]) -> bool:
        """Let the fault happen to this rank. Returns true if the cell is to end here."""
        self.tell("fault")
        ends = bool(self.deeds[order["deed"]](self, order))
        self.tell("over")
        return ends


class Training(Victim):
    """A rank's model, data and place in the training, in arrays of numpy.

    Attributes:
        ops: The module with the collectives of these arrays.
        kept: Arrays that nothing changes.
        weights, digest: The model, and its hash as of the last step that was completed.
    """

    ops: Any = hvd

    def __init__(self, seed: int, mailbox: str) -> None:
        super().__init__(mailbox)
        rng = np.random.default_rng([seed, self.rank])
        kept: dict[str, npt.NDArray[Any]] = {f"data{i}": rng.standard_normal(20_000) for i in range(4)}
        kept["labels"] = rng.integers(0, 10, 5_000)
        self.kept: dict[str, Any] = {name: self.tensor(values) for name, values in kept.items()}
        self.weights: Any = self.tensor(np.zeros(BIG, np.float32))
        self.digest = self.hash_of(self.weights)

    def tensor(self, values: npt.NDArray[Any]) -> Any:
        """Return the collectives' argument for these values."""
        return values

    def values(self, tensor: Any) -> npt.NDArray[Any]:
        """Return the values of a collective's result."""
        return np.asarray(tensor)

    def hash_of(self, tensor: Any) -> str:
        return digest(self.values(tensor))

    # -- training -------------------------------------------------------------------------------------------------

    def run(self, order: dict[str, Any]) -> int:
        """Train until the fault, or for as many steps as the order asks for. Returns the steps completed."""
        self.resume()
        mine = order["victim"] == self.rank or order["victim"] < 0
        ambush = None
        first = self.steps
        if mine and order["phase"]:
            ambush = Ambush(order["plane"], order["phase"], order["after"], lambda: self.strike(order))
        try:
            while self.steps - first < order["steps"]:
                hit = mine and not order["phase"] and self.steps - first == order["at"]
                if not mine and order["phase"] == "negotiate":
                    time.sleep(0.02)  # lets the others announce first and wait
                if hit and order["spot"] in ("between", "apart") and self.strike(order):
                    return self.steps
                if order["spot"] == "apart":
                    time.sleep(APART)
                self.step(order if hit else None)
                if self.steps - first == 1:
                    self.tell("on")
        finally:
            if ambush is not None:
                ambush.lift()
        return self.steps

    def step(self, order: dict[str, Any] | None = None) -> None:
        """Run one step; the fault of ``order`` strikes in the middle of it."""
        # A rank that is lost meanwhile makes one of the collectives below fail, on each of the others.
        ranks, number = self.ranks, self.steps
        factor = 1 + number % 7
        total = sum(r + 1 for r in ranks) * factor
        mine = np.float32((self.rank + 1) * factor)
        big = self._begin_sum(BIG, mine, "grad.big")
        if order is not None and order["spot"] == "amid":
            self.strike(order)
        small = self._begin_sum(SMALL, mine, "grad.small")
        loss = self._begin_sum(1, mine, "loss")
        gradient = self.ops.synchronize(big)
        for found in (gradient, self.ops.synchronize(small), self.ops.synchronize(loss)):
            if not ((result := self.values(found)) == total).all():
                raise AssertionError(f"step {number}: {result} instead of {total} from ranks {ranks}")
        self._check_one(number, ranks)
        weights = self.weights - 1e-3 * gradient
        # Nothing of the old step is lost if an interrupt comes in between: the hash is of either.
        self.weights, self.digest, self.steps = weights, self.hash_of(weights), number + 1

    def _begin_sum(self, count: int, value: np.float32, name: str) -> Any:
        tensor = self.tensor(np.full(count, value, np.float32))
        return self.ops.allreduce_async(tensor, name=name, op=hvd.Sum)

    def resume(self) -> None:
        """Agree with the others on the furthest rank's model, as a user does after a repair."""
        ranks = self.ranks = context.engine().ranks()
        steps = np.asarray(hvd.allgather(np.array([self.steps]), "resume.steps"))
        root = ranks[int(np.argmax(steps))]
        weights = self.ops.broadcast(self.weights, root, name="resume.weights")
        self.weights, self.digest, self.steps = weights, self.hash_of(weights), int(steps.max())

    def check(self) -> list[int]:
        """Run every kind of collective once, with a known result. Return the ranks that took part."""
        ranks = context.engine().ranks()
        for count in (1, SMALL, BIG):
            mine = self.tensor(np.full(count, self.rank + 1.0))
            result = self.values(self.ops.allreduce(mine, name=f"check.{count}", op=hvd.Sum))
            if not (result == sum(r + 1 for r in ranks)).all():
                raise AssertionError(f"allreduce of {count} elements gave {result}")
        for kind in range(4):
            self._check_one(kind, ranks)
        hvd.barrier()
        return list(ranks)

    def forget(self) -> int:
        """Let go of the last traceback, whose frames keep their operands alive. Returns how many groups Gloo keeps."""
        for name in ("last_exc", "last_value", "last_traceback"):
            if hasattr(sys, name):
                delattr(sys, name)
        shell = get_ipython()
        if shell is not None:
            shell.InteractiveTB.tb = None
        gc.collect()
        return LEFT[0]

    def memory(self) -> dict[str, Any]:
        """Return hashes of all that a fault elsewhere must leave alone."""
        return {
            "pid": os.getpid(),
            "steps": self.steps,
            "intact": self.hash_of(self.weights) == self.digest,
            **{name: self.hash_of(tensor) for name, tensor in self.kept.items()},
        }

    def _check_one(self, number: int, ranks: tuple[int, ...]) -> None:
        """One of the collectives other than allreduce, on enough elements to take several steps of a plane."""
        ops, index, size, count = self.ops, ranks.index(self.rank), len(ranks), 8_000
        kind = ("allgather", "broadcast", "reducescatter", "alltoall")[number % 4]
        values = np.full(count, self.rank, np.int64)
        if kind == "allgather":
            found = ops.allgather(self.tensor(values[: count - index]), name="check.gather")
            wanted = np.concatenate([np.full(count - i, r) for i, r in enumerate(ranks)])
        elif kind == "broadcast":
            found = ops.broadcast(self.tensor(values), ranks[-1], name="check.broadcast")
            wanted = np.full(count, ranks[-1])
        elif kind == "reducescatter":
            found = ops.reducescatter(self.tensor(values), name="check.scatter", op=hvd.Sum)
            wanted = np.full(len(found), sum(ranks))
        else:
            found = ops.alltoall(self.tensor(values[: count // size * size]), name="check.alltoall")
            found = found[0] if isinstance(found, tuple) else found
            wanted = np.repeat(np.array(ranks), count // size)
        if not np.array_equal(result := self.values(found), wanted):
            raise AssertionError(f"{kind} gave {result} instead of {wanted}")


def _raise(victim: Victim, order: dict[str, Any]) -> None:
    raise Boom(order["name"])


def _end(victim: Victim, order: dict[str, Any]) -> bool:
    return True


def _kill(victim: Victim, order: dict[str, Any]) -> None:
    os.kill(os.getpid(), order["signal"])
    time.sleep(60)  # one that stops is continued here


def _stop(victim: Victim, order: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _crash(victim: Victim, order: dict[str, Any]) -> None:
    ctypes.string_at(0)


def _exit(victim: Victim, order: dict[str, Any]) -> None:
    os._exit(order["code"])


def _other(victim: Victim, order: dict[str, Any]) -> None:
    hvd.broadcast(np.zeros(10), victim.rank, "other.tensor")


def _mismatch(victim: Victim, order: dict[str, Any]) -> None:
    hvd.allreduce(np.zeros(BIG + 1, np.float32), "grad.big", op=hvd.Sum)


def _compute(victim: Victim, order: dict[str, Any]) -> None:
    """Compute in Python."""
    until = time.monotonic() + order["seconds"]
    while time.monotonic() < until:
        sum(range(1000))


def _call_c(victim: Victim, order: dict[str, Any]) -> None:
    """Busy in a C function that no signal ends; it lets other threads run. Longer than it should on a busy machine."""
    rounds, began = 20_000, time.thread_time()  # not the time while others run: it would be too short then
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", rounds)
    speed = rounds / (time.thread_time() - began)
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", int(speed * order["seconds"]))


def _linger(victim: Victim, order: dict[str, Any]) -> None:
    """Stay in this place until the interrupt has come."""
    time.sleep(order["seconds"])


def _exhaust(victim: Victim, order: dict[str, Any]) -> None:
    """Allocate more memory than the limit allows."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (256 << 20), before[1]))
    try:
        np.ones(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _exhaust_descriptors(victim: Victim, order: dict[str, Any]) -> None:
    """Open one more than there may be."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        os.open(os.devnull, os.O_RDONLY)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _break(victim: Victim, order: dict[str, Any]) -> None:
    raise OSError(5, "the transport failed, as the campaign wants it")


def _flood(victim: Victim, order: dict[str, Any]) -> None:
    """Write this many bytes, in lines of 80."""
    line, left = "x" * 79 + "\n", order["bytes"]
    while left > 0:
        sys.stdout.write((line * 12_500)[:left])
        left -= 1_000_000


Training.deeds = {
    "raise": _raise,
    "end": _end,
    "kill": _kill,
    "stop": _stop,
    "crash": _crash,
    "exit": _exit,
    "other": _other,
    "mismatch": _mismatch,
    "compute": _compute,
    "call_c": _call_c,
    "linger": _linger,
    "exhaust": _exhaust,
    "exhaust_descriptors": _exhaust_descriptors,
    "break": _break,
    "flood": _flood,
}
