"""Channels by which output messages leave the kernel: into the running cell, or into a cell that may have ended."""

from __future__ import annotations

import sys
from typing import Any, Protocol

from IPython.core.interactiveshell import InteractiveShell


class OutputChannel(Protocol):
    """Channel of one cell's output messages."""

    def stream(self, name: str, text: str) -> None: ...
    def display(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str, *, update: bool = False
    ) -> None: ...
    def clear(self, wait: bool) -> None: ...


class RunningCellChannel:
    """Channel into the cell that is running now, through the shell, so that ``%%capture`` and Output widgets work."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._last = sys.stdout

    def stream(self, name: str, text: str) -> None:
        # Read at each call: `%%capture` and `redirect_stdout` exchange the streams while the cell runs.
        target = sys.stderr if name == "stderr" else sys.stdout
        if target is not self._last:
            self._last.flush()
        self._last = target
        target.write(text)
        target.flush()

    def display(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str, *, update: bool = False
    ) -> None:
        transient = {"display_id": display_id}
        self._shell.display_pub.publish(data, metadata, transient=transient, update=update)

    def clear(self, wait: bool) -> None:
        self._shell.display_pub.clear_output(wait)


class FixedCellChannel:
    """Channel into one cell, also while another runs: messages carry the header of the first cell's request.

    Any thread; the socket hands messages to the kernel's own output thread.
    """

    def __init__(self, shell: InteractiveShell) -> None:
        kernel: Any = shell.kernel  # type: ignore[attr-defined]  # only a kernel's shell has it
        self._session, self._socket = kernel.session, kernel.iopub_socket
        # Read now: later the kernel's parent is the request of another cell.
        self._parent = kernel.get_parent("shell")

    def stream(self, name: str, text: str) -> None:
        self._send("stream", {"name": name, "text": text}, f"stream.{name}")

    def display(
        self, data: dict[str, Any], metadata: dict[str, Any], display_id: str, *, update: bool = False
    ) -> None:
        transient = {"display_id": display_id} if display_id else {}
        content = {"data": data, "metadata": metadata, "transient": transient}
        self._send("update_display_data" if update else "display_data", content, "display_data")

    def clear(self, wait: bool) -> None:
        self._send("clear_output", {"wait": wait}, "clear_output")

    def _send(self, kind: str, content: dict[str, Any], topic: str) -> None:
        self._session.send(self._socket, kind, content, parent=self._parent, ident=topic.encode())


class LineTracking:
    """Channel that knows whether the text so far stops in the middle of a line, and how often it was cleared.

    Args:
        inner: Sends the messages.

    Attributes:
        in_line: Whether the last text did not end its line.
        clears: Number of times that everything was cleared.
    """

    def __init__(self, inner: OutputChannel) -> None:
        self._inner = inner
        self.in_line = False
        self.clears = 0
        self.display = inner.display

    def stream(self, name: str, text: str) -> None:
        if text:
            self.in_line = not text.endswith("\n")
        self._inner.stream(name, text)

    def clear(self, wait: bool) -> None:
        self.in_line = False
        self.clears += 1
        self._inner.clear(wait)


def in_notebook(shell: InteractiveShell) -> bool:
    """Return whether the shell belongs to a Jupyter kernel."""
    return getattr(shell, "kernel", None) is not None
