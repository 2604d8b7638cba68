"""A rank's debug server."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from hvdlab.kernel_ext.rank.cell_source import CellCompiler
from hvdlab.kernel_ext.rank.debugger import DebugServer, load

PARTS = """\
import sys
sys.path.insert(0, {parts!r})
attempts = getattr(sys, "attempts_of_test", 0) + 1
sys.attempts_of_test = attempts
if attempts < {good}:
    sys.path[:] = {path!r}  # another thread puts it back
sys.path.remove({parts!r})
"""


def test_importing_it_survives_that_the_path_is_put_back_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "attempts_of_test", 0, raising=False)
    path = list(sys.path)
    for name, good in (("once", 2), ("always", 9)):
        (tmp_path / f"{name}_torn.py").write_text(PARTS.format(parts="/no/where", good=good, path=path))
    load("once_torn")
    assert sys.path == path
    with pytest.raises(ValueError, match="not in list"):
        load("always_torn")


def event(kind: str, thread: int) -> bytes:
    return json.dumps({"type": "event", "seq": 0, "event": kind, "body": {"threadId": thread}}).encode()


class MeanwhileLock:
    """Lock in front of which another thread is faster once."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._meanwhile = [meanwhile]

    def __enter__(self) -> None:
        if self._meanwhile:
            self._meanwhile.pop()()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class StoppedEngine:
    """Engine that keeps whether each change of it was a pause."""

    def __init__(self, pauses: list[bool]) -> None:
        self._pauses = pauses

    def pause(self, reason: str = "") -> None:
        self._pauses.append(True)

    def resume(self, reason: str = "") -> None:
        self._pauses.append(False)

    def post(self, topic: str, body: bytes) -> None: ...


@pytest.fixture
def pauses() -> list[bool]:
    return []


@pytest.fixture
def server(pauses: list[bool]) -> DebugServer:
    """Return the server of a rank in a session, one of whose threads has stopped."""
    # Without debugpy there is nothing to call on the main thread.
    server = DebugServer(StoppedEngine(pauses), cast(asyncio.AbstractEventLoop, None), CellCompiler(None))
    server._session = 1
    server.handle_message(event("stopped", 1))
    return server


def test_thread_that_goes_on_while_another_stops_is_not_stopped(server: DebugServer) -> None:
    server._lock = cast(Any, MeanwhileLock(lambda: server.handle_message(event("continued", 1))))
    server.handle_message(event("stopped", 2))
    server.handle_message(event("continued", 2))
    assert not server.stopped


def test_stop_reported_as_its_session_ends_pauses_nothing(server: DebugServer, pauses: list[bool]) -> None:
    server._lock = cast(Any, MeanwhileLock(server._end))
    server.handle_message(event("stopped", 2))
    assert not server.stopped
    assert pauses == [True, False]
