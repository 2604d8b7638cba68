"""The gradients of a backward pass are submitted and announced in turns, and the rest when the framework reports its
end."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest

from hvdlab.bindings import gradient_reducer
from hvdlab.bindings.gradient_reducer import ENOUGH_BYTES, SubmissionBatcher
from hvdlab.collectives import context
from support.fakes.framework import FakeGradients

TURN = ["submit", "flush"]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Owner:
    """Owner of gradients, in the place of a reducer, whose batcher decides when they are submitted."""

    def __init__(self, framework: FakeGradients, made: list[str]) -> None:
        self.batcher = SubmissionBatcher(framework, self)  # type: ignore[arg-type]  # stands in for a GradientReducer
        self.add, self.flush, self.discard = self.batcher.add, self.batcher.flush, self.batcher.discard
        self._made = made

    def start_held(self) -> None:
        self._made.append("submit")


@pytest.fixture
def flushes() -> Iterator[list[str]]:
    made: list[str] = []
    fake = SimpleNamespace(flush=lambda: made.append("flush"))
    with (
        mock.patch.object(context, "engine", return_value=fake),
        mock.patch.object(context, "is_initialized", return_value=True),
    ):
        yield made


@pytest.fixture
def clock() -> Iterator[Clock]:
    fake = Clock()
    with mock.patch.object(gradient_reducer, "time", fake):
        yield fake


def test_the_rest_is_announced_once_at_the_end_of_the_backward_pass(flushes: list[str], clock: Clock) -> None:
    framework = FakeGradients()
    batcher = Owner(framework, flushes)
    with framework.backward():
        batcher.add(1)
        batcher.add(1)
        assert flushes == []
    assert flushes == TURN
    batcher.flush()
    assert flushes == TURN


def test_enough_bytes_do_not_wait(flushes: list[str], clock: Clock) -> None:
    framework = FakeGradients()
    batcher = Owner(framework, flushes)
    with framework.backward():
        batcher.add(ENOUGH_BYTES // 2)
        assert flushes == []
        batcher.add(ENOUGH_BYTES // 2)
        assert flushes == TURN
        batcher.add(ENOUGH_BYTES)
        assert flushes == TURN * 2
    assert flushes == TURN * 2


def test_the_next_one_takes_along_what_has_waited(flushes: list[str], clock: Clock) -> None:
    framework = FakeGradients()
    batcher = Owner(framework, flushes)
    with framework.backward():
        batcher.add(1)
        clock.now += 2 * gradient_reducer.LONGEST_SECONDS
        batcher.add(1)
        assert flushes == TURN


def test_outside_of_a_backward_pass_it_waits_for_the_one_that_needs_it(
    flushes: list[str], clock: Clock
) -> None:
    batcher = Owner(FakeGradients(), flushes)
    batcher.add(1)
    assert flushes == []
    batcher.flush()
    assert flushes == TURN
    batcher.add(1)
    batcher.discard()
    batcher.flush()
    assert flushes == TURN


def test_the_end_of_a_backward_pass_does_not_keep_a_batcher_alive(flushes: list[str], clock: Clock) -> None:
    framework = FakeGradients()
    with framework.backward():
        batcher = Owner(framework, flushes)
        batcher.add(1)
        del batcher
    assert flushes == []


def test_all_that_share_a_backward_pass_have_submitted_before_anything_is_announced(
    flushes: list[str], clock: Clock
) -> None:
    framework = FakeGradients()
    one, other = Owner(framework, flushes), Owner(framework, flushes)
    with framework.backward():
        one.add(1)
        other.add(1)
    assert flushes[:3] == ["submit", "submit", "flush"]
