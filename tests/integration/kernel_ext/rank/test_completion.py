"""A call that never returns is stopped, also where its code swallows that."""

from __future__ import annotations

import threading
from typing import NoReturn

import pytest

from hvdlab.kernel_ext.rank import completion
from hvdlab.kernel_ext.rank.completion import TookTooLong, bounded
from support.patience import PATIENCE


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that a call sets where it may be stopped; no call is stopped before, however late its thread begins."""
    begun, stop = threading.Event(), completion._stop

    def stop_begun(thread: threading.Thread, ended: threading.Event) -> None:
        assert begun.wait(PATIENCE)
        stop(thread, ended)

    monkeypatch.setattr(completion, "_stop", stop_begun)
    return begun


def test_a_call_that_swallows_its_stop_is_stopped_again(begun: threading.Event) -> None:
    swallowed, ended = threading.Event(), threading.Event()

    def work() -> NoReturn:
        try:
            try:
                begun.set()
                while True:
                    pass
            except BaseException:  # noqa: BLE001  # as a finalizer does, or code of the user
                swallowed.set()
            while True:
                pass
        finally:
            ended.set()

    with pytest.raises(TookTooLong):
        bounded(work, 0.01)
    assert swallowed.wait(PATIENCE)
    assert ended.wait(PATIENCE)


def test_a_call_within_a_call_is_stopped_with_it(begun: threading.Event) -> None:
    ended = threading.Event()

    def inner() -> NoReturn:
        try:
            begun.set()
            while True:
                pass
        finally:
            ended.set()

    with pytest.raises(TookTooLong):
        bounded(lambda: bounded(inner, 1.0), 0.3)
    assert ended.wait(PATIENCE)
