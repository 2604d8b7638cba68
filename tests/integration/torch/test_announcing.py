"""Ranks announce several gradients together: few messages, and no gradient unannounced when the backward pass ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast
from unittest import mock

import pytest
import torch

import hvdlab.torch as hvd
from hvdlab.bindings import gradient_reducer
from hvdlab.collectives import context
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.protocol import messages as m
from support.engine_probe import EngineProbe
from support.patience import PATIENCE
from support.ranks.resident import Ranks, resident_ranks

PARAMETERS = 40


one = resident_ranks(1, imports=["hvdlab.torch"], scope="function")


def announcements(elements: int, seconds: float, *, fails: bool = False) -> tuple[list[int], int, int]:
    """Return collectives in each announcement of a backward pass, how many are not announced after it, and the step's
    sum.

    The engine's control thread waits meanwhile: whatever wakes it would make it announce all that waits.
    """
    with (
        mock.patch.object(gradient_reducer, "LONGEST_SECONDS", seconds),
        mock.patch.object(gradient_reducer, "ENOUGH_BYTES", 4 * 1000),
    ):
        parameters: list[torch.Tensor] = [
            torch.nn.Parameter(torch.zeros(elements)) for _ in range(PARAMETERS)
        ]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(parameters, lr=1.0),
            named_parameters=[(f"p{i}", parameter) for i, parameter in enumerate(parameters)],
        )
        engine = context.engine()
        sent: list[m.Message] = []
        send_all: Callable[[Sequence[m.Message]], bool] = EngineProbe(engine).endpoint.send_all

        def counted(messages: Sequence[m.Message]) -> bool:
            sent.extend(messages)
            return send_all(messages)

        with (
            mock.patch.object(EngineProbe(engine).endpoint, "send_all", counted),
            control_thread_held(engine),
        ):
            if fails:
                first = torch.cat(parameters).sum()
                first.register_hook(_fail)
                with pytest.raises(ZeroDivisionError):
                    first.backward()
            cast(torch.Tensor, sum(parameter.sum() for parameter in parameters)).backward()
            counts = [len(message.locals) for message in sent if isinstance(message, m.Announce)]
            left = EngineProbe(engine).locked.state.queued
        optimizer.step()
        return counts, left, int(sum(parameter.sum().item() for parameter in parameters))


@contextmanager
def control_thread_held(engine: Engine) -> Iterator[None]:
    """Keep the control thread in a call within this context."""
    begun, over = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        over.wait()

    EngineProbe(engine).control.call(hold)
    assert begun.wait(PATIENCE)
    try:
        yield
    finally:
        over.set()


def _fail(gradient: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError


def test_small_gradients_are_announced_together_at_the_end_of_the_backward_pass(one: Ranks) -> None:
    ((counts, left, total),) = one.run(announcements, 1, 1000.0)
    assert (counts, left, total) == ([PARAMETERS], 0, -PARAMETERS)


def test_enough_of_them_do_not_wait_for_the_end(one: Ranks) -> None:
    ((counts, left, total),) = one.run(announcements, 100, 1000.0)
    assert (counts, left, total) == ([10] * (PARAMETERS // 10), 0, -100 * PARAMETERS)


def test_none_waits_for_long(one: Ranks) -> None:
    ((counts, left, total),) = one.run(announcements, 1, 0.0)
    assert (counts, left, total) == ([1] * PARAMETERS, 0, -PARAMETERS)


def test_a_backward_pass_after_one_that_failed_is_announced(one: Ranks) -> None:
    outcomes = one.run(after_a_failure, 1)
    assert outcomes == [(0, -PARAMETERS)]


def after_a_failure(elements: int) -> tuple[int, int]:
    _, left, total = announcements(elements, 1000.0, fails=True)
    return left, total
