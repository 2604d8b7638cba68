"""The debugger before the kernel's own one: requests which that one doesn't answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hvdlab.collectives.client import Client, CoordinatorLostError
from hvdlab.kernel_ext.notebook.debugger import hub as hub_module
from hvdlab.kernel_ext.notebook.debugger.hub import CONNECT_ATTEMPTS, DebugConnections, DebugHub
from hvdlab.kernel_ext.wire.debug import FromServer

Json = dict[str, Any]


class KernelsDebugger:
    """Debugger like ipykernel's. Its first connections lose their messages."""

    def __init__(self, lost: int) -> None:
        self.lost, self.is_started, self.just_my_code = lost, False, True
        self.stopped_threads: set[int] = set()
        self.breakpoint_list: Json = {}
        self.tcp_client = SimpleNamespace(message_queue=SimpleNamespace(tcp_buffer=""))
        self.connections = 0

    async def process_request(self, request: Json) -> Json:
        if request["command"] == "initialize" and not self.is_started:
            self.is_started = True
            self.connections += 1
        if self.connections <= self.lost:
            self.tcp_client.message_queue.tcp_buffer = "Content-Len"
            await asyncio.get_running_loop().create_future()
        assert not self.tcp_client.message_queue.tcp_buffer
        return {"type": "response", "success": True, "command": request["command"], "body": {}}

    def stop(self) -> None:
        assert self.is_started


class NotebookWithoutRanks:
    """Notebook that has no pool."""

    pool = None

    def runs_on_ranks(self, code: str) -> bool:
        return False


class EndedRanks:
    """Owner of a session that keeps the ranks which have ended."""

    def __init__(self) -> None:
        self.ranks: list[int] = []

    def heard(self, rank: int, mail: FromServer) -> None:
        pass

    def gone(self, rank: int, reason: str) -> None:
        self.ranks.append(rank)


def requests(lost: int, *commands: str) -> tuple[KernelsDebugger, list[Json]]:
    """Return the frontend's answers to these."""
    debugger = KernelsDebugger(lost)
    hub = DebugHub(SimpleNamespace(debugger=debugger), NotebookWithoutRanks())

    async def ask() -> list[Json]:
        return [await hub.process({"type": "request", "seq": 1, "command": one}) for one in commands]

    return debugger, asyncio.run(ask())


def test_a_connection_to_debugpy_over_which_nothing_comes_is_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub_module, "CONNECT_WITHIN", 0.05)
    debugger, (initialized, asked) = requests(CONNECT_ATTEMPTS - 1, "initialize", "debugInfo")
    assert initialized["success"]
    assert asked["success"]
    assert debugger.connections == CONNECT_ATTEMPTS


def test_a_debugpy_that_never_answers_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "CONNECT_WITHIN", 0.05)
    _, (initialized,) = requests(CONNECT_ATTEMPTS, "initialize")
    assert not initialized["success"]
    assert "did not answer within" in initialized["message"]
    assert "restart the kernel" in initialized["message"]


class DebuggedClient:
    """Connection to two debugged ranks, whose coordinator a test takes away and gives back."""

    def __init__(self) -> None:
        self.lost = False
        self.posted: list[tuple[bytes, tuple[int, ...]]] = []
        self.members: Callable[[Any], None] = lambda membership: None
        self.reconnected: Callable[[object], None] = lambda membership: None

    def on_mail(self, topic: str, callback: Callable[[int, bytes], None]) -> None:
        pass

    def on_membership(self, callback: Callable[[Any], None]) -> None:
        self.members = callback

    def on_reconnected(self, callback: Callable[[object], None]) -> None:
        self.reconnected = callback

    def post(self, topic: str, body: bytes, to: Sequence[int]) -> None:
        if self.lost:
            raise CoordinatorLostError("the coordinator is lost")
        self.posted.append((body, tuple(to)))

    def pids(self, *pids: int) -> None:
        """Report the ranks' processes."""
        members = [SimpleNamespace(rank=rank, pid=pid) for rank, pid in enumerate(pids)]
        self.members(SimpleNamespace(members=members))


def test_stopped_rank_without_coordinator_gets_requests_later() -> None:
    client, ended = DebuggedClient(), EndedRanks()
    connections = DebugConnections(cast("Client", client))
    session = connections.session(ended)
    client.pids(10, 11)
    client.lost = True
    session.send(0, b"stackTrace")
    session.send(1, b"for a process that ends")
    session.send(0, b"continue")
    assert ended.ranks == []
    client.pids(10, 12)
    assert ended.ranks == [1]
    client.lost = False
    client.reconnected(None)
    assert [to for _, to in client.posted] == [(0,), (0,)]
    assert [
        text in body for (body, _), text in zip(client.posted, (b"stackTrace", b"continue"), strict=True)
    ] == [True, True]
    session.send(1, b"initialize")
    assert len(client.posted) == 3
