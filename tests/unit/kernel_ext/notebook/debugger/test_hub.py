"""The debugger before the kernel's own one: requests which that one doesn't answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from hvdlab.kernel_ext.notebook.debugger import hub as hub_module
from hvdlab.kernel_ext.notebook.debugger.hub import CONNECT_ATTEMPTS, DebugHub

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


def requests(lost: int, *commands: str) -> tuple[KernelsDebugger, list[Json]]:
    """Return the frontend's answers to these."""
    debugger = KernelsDebugger(lost)
    hub = DebugHub(SimpleNamespace(debugger=debugger), lambda: None, lambda code: False)

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
