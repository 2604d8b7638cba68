"""ipyparallel's controller that an earlier process left with a kept pool, and its files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from concurrent.futures import Future
from pathlib import Path
from typing import Self

from hvdlab.launch.forkserver.client import ForkServer
from hvdlab.launch.forkserver.messages import CONTROLLER, Signal


class Predecessor:
    """An earlier cluster, whose place a new one takes: with its name, and with its keys, which the ranks know.

    Args:
        identity: Its ``cluster_id`` and ``profile_dir``.
    """

    def __init__(self, identity: dict[str, str]) -> None:
        self.identity = identity
        self._gone: Future[None] = Future()

    @classmethod
    def of(cls, fork_server: ForkServer) -> Self | None:
        """The predecessor that this fork server has or had a controller of; None if there is none."""
        for path in map(Path, fork_server.guarded()):
            if path.name.startswith("cluster-"):
                with contextlib.suppress(OSError, ValueError, KeyError):  # it is gone, or half written
                    cluster = json.loads(path.read_text())["cluster"]
                    return cls({name: cluster[name] for name in ("cluster_id", "profile_dir")})
        return None

    def has_ended(self) -> None:
        """The fork server has reaped the predecessor's controller. Any thread."""
        if not self._gone.done():
            self._gone.set_result(None)

    async def end(self, fork_server: ForkServer) -> None:
        """End the controller, if it lives."""
        if CONTROLLER in fork_server.children():
            fork_server.send(Signal(CONTROLLER, signal.SIGKILL))
            await asyncio.wrap_future(self._gone)
