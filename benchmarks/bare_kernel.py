"""A kernel without a browser, and a small client that receives the views' messages as a page would: for measurements
that are long, or in which the drawing must not use the processors of the measured processes."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from jupyter_client import BlockingKernelClient, KernelManager

ANSWER = 120.0
"""Seconds for a cell."""


@dataclass
class View:
    """Messages of one widget.

    Attributes:
        kind: ``timeline`` or ``metrics``.
        rows, points: How many came, each once.
        missed: Rows that existed in the kernel and were in no message: the kernel's own count of those that made room before
            they could be sent, and those of messages that were lost.
        megabytes: Of all messages' buffers.
    """

    kind: str
    comm: str
    rows: int = 0
    points: int = 0
    missed: int = 0
    lost: int = 0
    megabytes: float = 0.0
    next: int = 0
    next_point: int = 0

    def take(self, message: dict[str, Any], buffers: list[Any]) -> None:
        """Take a message of rows in, as ``ui/src/model/stream.ts`` does."""
        self.megabytes += sum(len(one) for one in buffers) / 1e6
        self.lost = message["lost"]
        if self.kind == "timeline":
            first, end = message["from"], message["from"] + message["count"]
            self.missed += max(0, first - self.next)
            self.rows += max(0, end - max(first, self.next))
            self.next = max(self.next, end)
        self.points += message["points"] if message["pointsTo"] > self.next_point else 0
        self.next_point = max(self.next_point, message["pointsTo"])


@dataclass
class BareKernel:
    """Running kernel.

    Attributes:
        process: The kernel.
        views: Those of its widgets that show a recording.
    """

    client: BlockingKernelClient
    process: psutil.Process
    directory: Path
    views: list[View] = field(default_factory=list)
    _idle: dict[str, threading.Event] = field(default_factory=dict)
    _ending: threading.Event = field(default_factory=threading.Event)
    _said: list[str] = field(default_factory=list)

    def start(self, cell: str) -> str:
        """Begin to run a cell; returns the id for :meth:`finish`."""
        request: str = self.client.execute(cell)
        return request

    def finish(self, cell: str, seconds: float = ANSWER) -> None:
        """Run a cell to its end. Raises ``TimeoutError``, or ``RuntimeError`` with its output."""
        self.wait(self.start(cell), seconds)

    def wait(self, request: str, seconds: float = ANSWER) -> None:
        """Wait until a cell has ended."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                reply = self.client.get_shell_msg(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"a cell did not end in {seconds:g} s: {self._said[-5:]}") from None
            if reply["parent_header"].get("msg_id") == request:
                break
        if reply["content"]["status"] != "ok":
            raise RuntimeError("\n".join(reply["content"].get("traceback", self._said[-20:])))

    def say(self, view: View, content: dict[str, Any]) -> None:
        """Send a message to a widget, as its view does."""
        body = {"comm_id": view.comm, "data": {"method": "custom", "content": content}}
        self.client.shell_channel.send(self.client.session.msg("comm_msg", body))

    def look(self, count: int, seconds: float = ANSWER) -> None:
        """Wait until so many widgets are there, and begin to receive their messages."""
        deadline = time.monotonic() + seconds
        while len(self.views) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self.views)} of {count} widgets came")
            self._ending.wait(0.05)
        for view in self.views:
            self.say(view, {"type": "hello", "since": 0, "points": 0})

    def listen(self) -> None:
        """Receive messages until :meth:`end`; on a thread."""
        while not self._ending.is_set():
            try:
                message = self.client.get_iopub_msg(timeout=0.2)
            except queue.Empty:  # a chance to see the end
                continue
            content, kind = message["content"], message["msg_type"]
            if kind == "comm_open":
                made = str(content.get("data", {}).get("state", {}).get("_anywidget_id", ""))
                name = made.rpartition(".")[2].removesuffix("Widget").lower()
                if name in ("timeline", "metrics"):
                    self.views.append(View(name, content["comm_id"]))
            elif kind == "comm_msg" and content["data"].get("method") == "custom":
                for view in self.views:
                    if view.comm == content["comm_id"] and content["data"]["content"].get("type") == "rows":
                        view.take(content["data"]["content"], message["buffers"])
            elif kind in ("stream", "error"):
                self._said = [*self._said[-50:], str(content.get("text") or content.get("evalue"))]

    def end(self) -> None:
        self._ending.set()


@contextmanager
def bare_kernel(directory: Path) -> Iterator[BareKernel]:
    """Yield a kernel with its working directory here; it and all that it has started are gone afterwards."""
    directory.mkdir(parents=True, exist_ok=True)
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(directory))
    client = manager.blocking_client()
    client.start_channels()
    kernel = BareKernel(client, psutil.Process(manager.provisioner.pid), directory)
    listening = threading.Thread(target=kernel.listen, name="iopub", daemon=True)
    try:
        client.wait_for_ready(timeout=60)
        listening.start()
        yield kernel
    finally:
        kernel.end()
        if listening.is_alive():
            listening.join(5)
        client.stop_channels()
        with contextlib.suppress(psutil.Error):
            children = kernel.process.children(recursive=True)
        manager.shutdown_kernel()
        _, left = psutil.wait_procs(children, 10)
        for one in left:
            one.kill()


def prefer(nice: int) -> None:
    """Give this process and its children a higher priority than others. Does nothing without the right to."""
    with contextlib.suppress(PermissionError):
        os.nice(nice)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice))
