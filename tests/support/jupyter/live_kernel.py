"""A real Jupyter kernel for tests: runs cells and records each message with the time of its arrival."""

from __future__ import annotations

import os
import queue
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from support.patience import PATIENCE


@dataclass
class Cell:
    """Messages of one cell."""

    msg_id: str
    begun: float
    ended: float = 0.0
    reply: dict[str, Any] = field(default_factory=dict)
    messages: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.ended - self.begun

    def text(self, name: str = "stdout") -> str:
        return "".join(c["text"] for _, kind, c in self.messages if kind == "stream" and c["name"] == name)

    def lines(self, name: str = "stdout") -> list[str]:
        return self.text(name).splitlines()

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [content for _, k, content in self.messages if k == kind]

    @property
    def error(self) -> dict[str, Any] | None:
        return next(iter(self.of("error")), None)

    def first(self, text: str) -> float:
        """Return seconds from the begin until ``text`` arrived."""
        for at, kind, content in self.messages:
            if (kind == "stream" and text in content["text"]) or (kind == "error" and text in str(content)):
                return at - self.begun
        raise AssertionError(f"{text!r} did not come: {self.messages}")


class LiveKernel:
    """Kernel process and a client. ``cells`` has everything by the cell it belongs to, ``others`` the messages that
    belong to none.

    Args:
        directory: Its working directory. strip: Whether
        cells get a live strip. Whether one comes depends on how quick the machine is, so tests that look
            at all displays do without.
        name: Which kernel.
        environment: Variables that are set for it. Ranks have only numpy from the beginning, unless ``HVDLAB_PRELOAD``
            is among them: importing torch takes longer than most tests.
        prepare: Cells that are run first, also whenever it is started again.
    """

    def __init__(
        self,
        directory: Path,
        *,
        strip: bool = False,
        name: str = "python3",
        environment: Mapping[str, str] | None = None,
        prepare: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self._name, self._prepare = name, prepare
        preload = os.environ.get("HVDLAB_PRELOAD", "numpy")
        given = {"HVDLAB_STRIP": str(int(strip)), "HVDLAB_PRELOAD": preload, **(environment or {})}
        # Not the user's: kernels that run at the same time would wait for each other to write their history.
        given.setdefault("IPYTHONDIR", os.environ.get("IPYTHONDIR", str(directory / ".ipython")))
        self._environment = os.environ | given
        self.closed = False
        self._start()

    def _start(self) -> None:
        self.cells: dict[str, Cell] = {}
        self.others: list[tuple[float, str, dict[str, Any]]] = []
        # Ports are chosen before the kernel binds them: with kernels of other tests beside it, some are taken by then.
        sockets = Path(tempfile.gettempdir(), f"kernel-{uuid.uuid4().hex[:8]}")
        self.manager = KernelManager(kernel_name=self._name, transport="ipc", ip=str(sockets))
        self.manager.start_kernel(cwd=str(self.directory), env=self._environment)
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        try:
            self.client.wait_for_ready(timeout=60)
            for code in self._prepare:
                cell = self.run(code)
                assert cell.error is None, cell.error
        except BaseException:
            self._kill()
            raise

    def send(self, code: str, **options: Any) -> Cell:
        begun = time.monotonic()
        cell = Cell(self.client.execute(code, **options), begun)
        self.cells[cell.msg_id] = cell
        return cell

    def run(self, code: str, timeout: float = 60, **options: Any) -> Cell:
        cell = self.send(code, **options)
        self.finish(cell, timeout)
        return cell

    def finish(self, cell: Cell, timeout: float = 60) -> None:
        """Take messages until the cell is idle and answered."""
        self.until(lambda: bool(cell.ended), timeout)
        while not cell.reply:
            reply = self.client.get_shell_msg(timeout=timeout)
            if (owner := self.cells.get(reply["parent_header"].get("msg_id", ""))) is not None:
                owner.reply = reply["content"]

    def until(self, reached: Any, timeout: float = 60) -> None:
        """Take messages until ``reached()``."""
        deadline = time.monotonic() + timeout
        while not reached():
            try:
                message = self.client.get_iopub_msg(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                last = [(round(at - deadline + timeout, 1), *what) for at, *what in self._latest()]
                raise AssertionError(f"not reached within {timeout} s; the last messages: {last}") from None
            self._take(message)

    def _latest(self) -> list[tuple[float, str, dict[str, Any]]]:
        every = [one for cell in self.cells.values() for one in cell.messages] + self.others
        return sorted(every, key=lambda one: one[0])[-12:]

    def _take(self, message: dict[str, Any]) -> None:
        cell = self.cells.get(message["parent_header"].get("msg_id", ""))
        now, kind, content = time.monotonic(), message["msg_type"], message["content"]
        if cell is None:
            self.others.append((now, kind, content))
            return
        if kind == "status" and content["execution_state"] == "idle":
            cell.ended = now
        cell.messages.append((now, kind, content))

    def answer_within(self, seconds: float = PATIENCE) -> None:
        """Have its pool wait for its ranks' answers as long as a busy machine needs; for ranks that are stopped, too.

        Without an answer it does not know what a rank does, or which variables it has.
        """
        limit = f"from hvdlab.kernel_ext.notebook import pool as _pool; _pool.ANSWER_WITHIN = {seconds}; del _pool"
        cell = self.run(limit, store_history=False)
        assert cell.error is None, cell.error

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()

    def renew(self) -> None:
        """Kill the kernel, whose ranks end with it, and start another."""
        self._kill()
        self._start()

    def _kill(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()

    def close(self) -> None:
        self.closed = True
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=False)
        self.manager.cleanup_resources()
