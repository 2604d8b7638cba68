"""Elastic training: it goes on when ranks are lost, and when ranks come back.

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

Example:
    >>> import torch
    >>> import hvdlab.torch as hvd
    >>> hvd.init()  # on every rank; a process that is no rank becomes a world of one
    >>> state = hvd.elastic.TorchState(model=torch.nn.Linear(2, 1), epoch=0)
    >>> state.epoch = 7
    >>> state.restore()  # as after a failure: back to the last commit
    >>> state.epoch
    0
    >>> hvd.shutdown()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from hvdlab.collectives.elastic import HostsUpdatedInterrupt, ObjectState, State, run_fn
from hvdlab.torch.elastic.sampler import ElasticSampler
from hvdlab.torch.elastic.state import TorchState
from hvdlab.torch.mpi_ops import init, is_initialized, shutdown

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

    The function that is returned synchronizes the state over the ranks and calls ``func``. When a rank is lost, the others go
    back to their last commit and call ``func`` again; when a rank comes back, they let it in at the next commit, give it their
    state and call ``func`` again. :func:`hvdlab.collectives.elastic.run_fn` has the details.

    All ranks call the returned function alike. The program may run no other collective before it, since a rank that comes back
    would run that collective alone.

    Args:
        func: Trains, from wherever the state is. It may be called any number of times.

    Returns:
        The elastic function. It returns the result of ``func``, and raises its exceptions; also ``HorovodInternalError`` if
        trying again makes no sense, ``StartError`` if too few ranks came together within ``HOROVOD_ELASTIC_TIMEOUT`` seconds,
        and ``SystemExit(0)`` on a rank whose host leaves the job.
    """
    return run_fn(func, _reset)


def _reset() -> Any:
    """Initialize again if the training function has called ``shutdown``; otherwise the engines rebuild the world by themselves."""
    if not is_initialized():
        init()
