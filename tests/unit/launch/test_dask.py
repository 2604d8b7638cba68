"""The connection to an agent on a Dask worker, over an event loop of the test."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from hvdlab.launch.dask import ActorConnection
from support.patience import PATIENCE


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join()
    made.close()


def test_connection_killed_before_its_relay_closes_all_pipes(
    loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipes: list[int] = []
    pipe2 = os.pipe2

    def recorded(flags: int) -> tuple[int, int]:
        made = pipe2(flags)
        pipes.extend(made)
        return made

    go_on = threading.Event()
    loop.call_soon_threadsafe(go_on.wait, PATIENCE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pipe2", recorded)
        connection = ActorConnection(
            SimpleNamespace(loop=SimpleNamespace(asyncio_loop=loop)), "tcp://worker", "python"
        )
    connection.kill()
    go_on.set()
    connection.close(PATIENCE)
    assert connection._over.is_set()
    # The relay closes its pipes with transports, which need another round of the loop.
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(PATIENCE)
    assert [descriptor for descriptor in pipes if os.path.exists(f"/proc/self/fd/{descriptor}")] == []
