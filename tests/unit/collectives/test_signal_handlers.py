"""Handlers of signals are those that Python's own functions return."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from hvdlab.collectives.system import set_signal_handler, signal_handler


@pytest.fixture(autouse=True)
def former() -> Iterator[None]:
    """Put the handler back that the process had."""
    before = signal.getsignal(signal.SIGUSR2)
    yield
    signal.signal(signal.SIGUSR2, before)


def test_a_handler_is_set_and_found() -> None:
    called: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        called.append(number)

    before = signal.getsignal(signal.SIGUSR2)
    assert set_signal_handler(signal.SIGUSR2, handler) == before
    assert signal_handler(signal.SIGUSR2) is signal.getsignal(signal.SIGUSR2) is handler
    signal.raise_signal(signal.SIGUSR2)
    assert called == [signal.SIGUSR2]
    assert set_signal_handler(signal.SIGUSR2, signal.SIG_IGN) is handler
    assert signal_handler(signal.SIGUSR2) == signal.SIG_IGN
