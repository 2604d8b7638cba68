"""Program of the ranks of an elastic campaign: training whose every result can be calculated again
(:mod:`chaos.journal`)."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

import hvdlab.torch as hvd
from chaos.journal import COMMIT_EVERY, Journal, factor, with_step
from chaos.phases import Ambush
from chaos.victim import Training, digest
from hvdlab.collectives import context

PHASE_WITHIN = 2.0
"""Seconds in which a phase of a collective must come."""

SIZES = (60_000, 3_000)
"""Elements of the two parameters."""

SET_UP = """
import torch
import hvdlab.torch as hvd
from chaos.elastic_victim import ElasticTraining, Model

training = ElasticTraining({seed}, {mailbox!r}, {plane!r})
model = Model()
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0), named_parameters=model.named_parameters(), op=hvd.Sum
)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, groups=[])

@hvd.elastic.run
def train(state):
    training.begin(state)
    while not training.train_step(model, optimizer, state):
        pass
"""

TRAIN = """
state.restore()  # an interrupt may have come between the steps of the optimizer and of the state
train(state)
training.result(model, optimizer, state)
"""


class Model(torch.nn.Module):
    """Two parameters, that begin as zeros and whose elements stay alike."""

    def __init__(self) -> None:
        super().__init__()
        big, small = (torch.nn.Parameter(torch.zeros(count, dtype=torch.float64)) for count in SIZES)
        self.big, self.small = big, small


class ElasticTraining(Training):
    """A rank's part in the training, its memory of it, and orders to harm itself."""

    def __init__(self, seed: int, mailbox: str, plane: str) -> None:
        super().__init__(seed, mailbox)
        self._directory, self._plane = Path(mailbox).parent, plane
        self._become()

    def _become(self) -> None:
        """This object is in another process than before: another rank's memory was brought to it."""
        self.journal = Journal(self._mailbox)
        self.rank = self.journal.rank
        #: The order that waits for a phase, and when it is carried out anyway: a plane may not have that phase now.
        self._order: dict[str, Any] | None = None
        self._due = 0.0

    def begin(self, state: Any) -> None:
        """Begin training, or continue with other ranks."""
        if self.journal.pid != os.getpid():
            self._become()
        self.journal.begin(state.step)

    def train_step(self, model: Model, optimizer: torch.optim.Optimizer, state: Any) -> bool:
        """Run one step, and commit if it is due. Return whether the campaign asks the cell to end."""
        self._obey()
        ranks, number = context.engine().ranks(), state.step
        optimizer.zero_grad()
        ((model.big.sum() + model.small.sum()) * ((self.rank + 1) * factor(number))).backward()
        optimizer.step()
        state.step, state.groups = number + 1, with_step(state.groups, ranks)
        self.journal.done = state.step
        ends = float((self._directory / "stop").exists())
        over = float(hvd.allreduce(torch.tensor(ends), name="over", op=hvd.Sum)) > 0
        if over or state.step % COMMIT_EVERY == 0:
            self.journal.committed = state.step  # the state is saved before anything in a commit can fail
            state.commit()
            self.journal.tell(ranks, digest(self.kept["data0"]))
        return over

    def result(self, model: Model, optimizer: Any, state: Any) -> dict[str, Any]:
        """Return the results at the end."""
        weights = {float(value) for p in model.parameters() for value in p.detach().unique()}
        momenta = {float(v) for one in optimizer.state.values() for v in one["momentum_buffer"].unique()}
        return {
            "groups": state.groups,
            "step": state.step,
            "weights": sorted(weights),
            "momenta": sorted(momenta),
        }

    def _obey(self) -> None:
        """Look for an order to this rank: to die in a phase of a collective, or soon if there is no such phase."""
        path = self._directory / f"order-{self.rank}"
        if self._order is None and path.exists():
            order = self._order = json.loads(path.read_text())
            path.unlink()
            self.steps, self._due = self.journal.done, time.monotonic() + PHASE_WITHIN
            Ambush(self._plane, order["phase"], order["after"], lambda: self.strike(order))
        elif self._order is not None and time.monotonic() > self._due:
            self.strike({**self._order, "phase": ""})
