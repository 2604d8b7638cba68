"""Program of the ranks of a campaign that wraps a model: ``DistributedDataParallel`` on hvdlab's group, and the faults
it meets.

Each step compares the gradients with those of one process that has the batches of all ranks, so that buckets that are mixed up after a
failure are seen. After a failure the training continues as a user's does: with the same wrapped model, by ``agree``.
"""

from __future__ import annotations

import hashlib
import os
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from chaos.victim import Training, Victim
from hvdlab.torch.c10d import WatchOptions, agree
from hvdlab.torch.c10d.work import futures_threads
from support.real_gpu import choose_gpu

BUCKET = 8 / 1024
"""DDP's limit of a bucket, in its unit, MiB: the model has three buckets from its second pass on."""
AFTER_SKIP = 3
"""Steps that ranks go on for after one of them has skipped a backward pass: their calls are alike, so that only its end shows it."""
LATE = 0.3
"""Seconds after which a launch of a watched group counts as late in a campaign."""
EVERY_RANK = -1
"""The victim of an order for all ranks."""
CHECKED = 3
"""Steps of a check. DDP has one bucket in the first pass of a reducer, makes its buckets anew in the second, and keeps them from then on."""


class Wrapped(Victim):
    """A rank's wrapped model, its optimizer and its place in the training.

    Args:
        seed: Seed of the model's first weights.
        mailbox: As in :class:`Victim`.
        inner: Torch's backend inside of a watched group; empty for an agreed group.

    Attributes:
        module, model: The model, and the same wrapped; ``None`` before the first group.
        optimizer: Its optimizer, which counts its steps.
    """

    def __init__(self, seed: int, mailbox: str, inner: str = "") -> None:
        super().__init__(mailbox)
        torch.manual_seed(seed)
        self.device = torch.device("cpu")
        if inner == "nccl":
            self.device = choose_gpu(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
        self.module = nn.Sequential(
            nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
        ).to(self.device)
        self._watch = WatchOptions("watched", inner, LATE) if inner else WatchOptions("agreed")
        self.optimizer = torch.optim.Adam(self.module.parameters(), 1e-3)
        self.model: Any = None
        self._group: Any = None
        _start_threads()

    # -- training -------------------------------------------------------------------------------------------------

    def run(self, order: dict[str, Any]) -> int:
        """Train until the fault, or for as many steps as the order asks for. Returns the steps completed."""
        self.resume()
        skips = order["deed"] == "skip"
        for number in range(order["at"] + AFTER_SKIP if skips else order["steps"]):
            hit = order["victim"] in (self.rank, EVERY_RANK) and number == order["at"]
            between = order["spot"] == "between"
            if hit and between and self.strike(order):
                break
            # From a skipped pass on that rank's gradients meet the others' of an earlier step.
            self.step(order if hit and not between else None, checked=not skips)
            if number == 0:
                self.tell("on")
        return self.steps

    def step(self, order: dict[str, Any] | None = None, *, checked: bool = True) -> None:
        """Run one step; the fault of ``order`` strikes in its backward pass, or instead of it."""
        ranks, parameters = range(dist.get_world_size()), list(self.module.parameters())
        whole = sum(self._loss(self.module, rank) for rank in ranks) / len(ranks)
        wanted = torch.autograd.grad(torch.as_tensor(whole), parameters)
        self.optimizer.zero_grad()
        loss = self._loss(self.model, self.rank)
        if order is not None and order["spot"] == "instead":
            self.strike(order)
        else:
            self._backward(loss, order)
            for found, right in zip(parameters, wanted, strict=True) if checked else ():
                if found.grad is None or not torch.allclose(found.grad, right, rtol=1e-3, atol=1e-5):
                    raise AssertionError(f"step {self.steps}: gradient {found.grad} instead of {right}")
        self.optimizer.step()
        self.steps = self._taken()

    def _backward(self, loss: torch.Tensor, order: dict[str, Any] | None) -> None:
        """Run the backward pass. The fault comes when the first bucket has been given to the group, and others have
        not."""

        def strike(gradient: torch.Tensor) -> None:
            if order is not None:
                self.strike(order)

        middle: Any = self.module[2].weight
        hook = middle.register_hook(strike)
        try:
            loss.backward()
        finally:
            hook.remove()

    def _loss(self, model: Any, rank: int) -> torch.Tensor:
        """Return the loss of a rank's batch of this step."""
        generator = torch.Generator().manual_seed(1000 * self.steps + rank)
        batch = torch.randn(8, 32, generator=generator).to(self.device)
        loss: torch.Tensor = (model(batch) - batch[:, :4]).square().mean()
        return loss

    def _taken(self) -> int:
        """Return steps of the optimizer, by its own count."""
        return max((int(state["step"]) for state in self.optimizer.state.values()), default=0)

    # -- after a failure ------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Continue as a user does: with a group of the ranks that there are, and with the state of the rank that is
        ahead."""
        there: Any = dist.group.WORLD if dist.is_initialized() else None
        if there is None or not there.has_its_ranks():
            dist.init_process_group("hvdlab", pg_options=self._watch)
        if self._group is not dist.group.WORLD:
            self._group = dist.group.WORLD
            self.model = nn.parallel.DistributedDataParallel(self.module, bucket_cap_mb=BUCKET)
        agree(self.model, self.optimizer)
        self.steps = self._taken()

    def check(self) -> tuple[int, str]:
        """Train on for a few steps. Returns the steps completed before them, and the hash of model and optimizer after them."""
        self.resume()
        before = self.steps
        for _ in range(CHECKED):
            self.step()
        found = hashlib.sha256()
        for parameter in self.module.parameters():
            state = self.optimizer.state[parameter]
            for tensor in (parameter, state["exp_avg"], state["exp_avg_sq"]):
                found.update(tensor.detach().cpu().numpy().tobytes())
        return before, found.hexdigest()[:16]

    def end_generation(self) -> None:
        """Give up all operations in flight, of which there are none. Called by one rank when all others are done."""
        self._group.abort()

    def drop_aborted(self) -> None:
        """Close the connections that a watched group keeps of the inner group that was aborted last, which are more or fewer each time.

        How many of them Gloo has closed before the abort finds them depends on the moment. Called once no rank can send in it any more.
        """
        self._group._aborted = None


def _start_threads() -> None:
    """Start all threads that futures may ever end on: one that is started later would be taken for a leak."""
    pool = futures_threads(os.getpid())
    together = threading.Barrier(pool._max_workers)
    for waiting in [pool.submit(together.wait) for _ in range(pool._max_workers)]:
        waiting.result()


def _skip(victim: Victim, order: dict[str, Any]) -> None:
    """Leave the backward pass out, alone."""


def _other(victim: Victim, order: dict[str, Any]) -> None:
    # On the device of the model: a watched group with NCCL inside agrees on operations of the host.
    dist.broadcast(torch.zeros(3, device=_device_of(victim)), victim.rank)


def _mismatch(victim: Victim, order: dict[str, Any]) -> None:
    dist.all_reduce(torch.zeros(7, device=_device_of(victim)))


def _device_of(victim: Victim) -> torch.device:
    assert isinstance(victim, Wrapped)
    return victim.device


def _break(victim: Victim, order: dict[str, Any]) -> None:
    """End the inner group of a watched group on this rank alone, as a network that fails does."""
    group: Any = dist.group.WORLD
    group._generation.inner.abort()


Wrapped.deeds = {
    **Training.deeds,
    "skip": _skip,
    "other": _other,
    "mismatch": _mismatch,
    "break": _break,
}
