"""What is submitted during a backward pass is announced in turns, and the rest when the framework says that it ends."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest

from fake_framework import FakeGradients
from hvdlab.bindings import announcing
from hvdlab.bindings.announcing import ENOUGH_BYTES, Announcer
from hvdlab.collectives import context


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


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
    with mock.patch.object(announcing, "time", fake):
        yield fake


def test_the_rest_is_announced_once_at_the_end_of_the_backward_pass(flushes: list[str], clock: Clock) -> None:
    framework = FakeGradients()
    announcer = Announcer(framework)
    with framework.backward():
        announcer.hold(1)
        announcer.hold(1)
        assert flushes == []
    assert flushes == ["flush"]
    announcer.announce()
    assert flushes == ["flush"]


def test_enough_bytes_do_not_wait(flushes: list[str], clock: Clock) -> None:
    framework = FakeGradients()
    announcer = Announcer(framework)
    with framework.backward():
        announcer.hold(ENOUGH_BYTES // 2)
        assert flushes == []
        announcer.hold(ENOUGH_BYTES // 2)
        assert flushes == ["flush"]
        announcer.hold(ENOUGH_BYTES)
        assert flushes == ["flush"] * 2
    assert flushes == ["flush"] * 2


def test_the_next_one_takes_along_what_has_waited(flushes: list[str], clock: Clock) -> None:
    framework = FakeGradients()
    announcer = Announcer(framework)
    with framework.backward():
        announcer.hold(1)
        clock.now += 2 * announcing.LONGEST_SECONDS
        announcer.hold(1)
        assert flushes == ["flush"]


def test_outside_of_a_backward_pass_it_waits_for_the_one_that_needs_it(
    flushes: list[str], clock: Clock
) -> None:
    announcer = Announcer(FakeGradients())
    announcer.hold(1)
    assert flushes == []
    announcer.announce()
    assert flushes == ["flush"]
    announcer.hold(1)
    announcer.forget()
    announcer.announce()
    assert flushes == ["flush"]


def test_the_end_of_a_backward_pass_does_not_keep_an_announcer_alive(
    flushes: list[str], clock: Clock
) -> None:
    framework = FakeGradients()
    with framework.backward():
        announcer = Announcer(framework)
        announcer.hold(1)
        del announcer
    assert flushes == []
