"""Elastic training: it goes on when ranks are lost, and when they come back.

::

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    @hvd.elastic.run
    def train(state):
        while state.epoch < epochs:
            for number, batch in enumerate(loader):
                ...
                state.sampler.record_batch(number, batch_size)
                state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from hvdlab.collectives.elastic import HostsUpdatedInterrupt, ObjectState, State, run_fn
from hvdlab.torch.basics import init, is_initialized, shutdown
from hvdlab.torch.elastic.sampler import ElasticSampler
from hvdlab.torch.elastic.state import TorchState

__all__ = [
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "init",
    "run",
    "run_fn",
    "shutdown",
]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a training function elastic; its first argument is a :class:`TorchState`.

    All ranks call it alike. No other collective may come before it in the program, since a rank that comes back would
    run it alone. See :func:`hvdlab.collectives.elastic.run_fn` for what is called again when, and what is raised.
    """
    return run_fn(func, _reset)


def _reset() -> Any:
    """The ranks find each other again by themselves; only a world that the training itself has left is made anew."""
    if not is_initialized():
        init()
