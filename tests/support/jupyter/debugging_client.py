"""Debugs a real kernel, as JupyterLab does: requests on the control channel, events on the one for output."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from support.jupyter.live_kernel import LiveKernel

Json = dict[str, Any]


class Debugging:
    """Debugger of one kernel."""

    def __init__(self, kernel: LiveKernel) -> None:
        self.kernel = kernel
        self._seq = 0
        self._read = len(kernel.others)

    def ask(self, command: str, **arguments: Any) -> Json:
        """Send a request and return its answer."""
        return self.answer(self.begin(command, **arguments))

    def begin(self, command: str, **arguments: Any) -> str:
        """A request, whose answer is taken later."""
        self._seq += 1
        client = self.kernel.client
        content = {"type": "request", "seq": self._seq, "command": command, "arguments": arguments}
        message = client.session.msg("debug_request", content)
        client.control_channel.send(message)
        return str(message["header"]["msg_id"])

    def answer(self, request: str) -> Json:
        while True:
            reply = self.kernel.client.get_control_msg(timeout=60)
            if reply["parent_header"]["msg_id"] == request:
                return dict(reply["content"])

    def switch_on(self) -> None:
        """Do as a click on the bug does."""
        self.ask("debugInfo")
        assert self.ask("initialize", clientID="test", adapterID="", pathFormat="path")["success"]
        assert self.ask("attach")["success"]

    def switch_off(self) -> None:
        assert self.ask("disconnect", restart=False, terminateDebuggee=False)["success"]

    def set_breakpoints(self, code: str, *lines: int) -> str:
        """Do as clicks into the gutter of a cell do; return the cell's file."""
        path = str(self.ask("dumpCell", code=code)["body"]["sourcePath"])
        points = [{"line": line} for line in lines]
        reply = self.ask("setBreakpoints", breakpoints=points, source={"path": path}, sourceModified=False)
        assert [one["line"] for one in reply["body"]["breakpoints"]] == list(lines), reply
        assert all(one["verified"] for one in reply["body"]["breakpoints"]), reply
        self.ask("configurationDone")
        return path

    def wait(self, wanted: Callable[[Json], bool], timeout: float = 60) -> Json:
        """Return the next matching event. Each is examined once."""
        deadline = time.monotonic() + timeout
        while True:
            while self._read < len(self.kernel.others):
                _, kind, content = self.kernel.others[self._read]
                self._read += 1
                if kind == "debug_event" and wanted(content):
                    return dict(content)
            known = len(self.kernel.others)
            self.kernel.until(lambda: len(self.kernel.others) > known, deadline - time.monotonic())  # noqa: B023

    def stopped(self, ranks: int) -> list[int]:
        """Wait until this many ranks have stopped; returns their threads, in the order of ranks."""
        found: dict[str, int] = {}
        while len(found) < ranks:
            event = self.wait(lambda one: one["event"] == "stopped" and one["body"]["reason"] != "pause")
            rank, _, _ = event["body"]["description"].partition(":")
            found[rank] = event["body"]["threadId"]
        return [found[rank] for rank in sorted(found)]

    def frames(self, thread: int = 1) -> list[Json]:
        return list(self.ask("stackTrace", threadId=thread)["body"]["stackFrames"])

    def variables(self, frame: int) -> dict[str, str]:
        """Return local variables of a frame, as shown."""
        scope = self.ask("scopes", frameId=frame)["body"]["scopes"][0]
        found = self.ask("variables", variablesReference=scope["variablesReference"])["body"]["variables"]
        return {one["name"]: one["value"] for one in found}
