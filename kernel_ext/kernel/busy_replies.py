"""Answers to a client while a cell runs, given by the thread that takes the client's messages, not by the one that runs cells."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from hvdlab.collectives.errors import HvdlabError

KINDS = {
    "complete_request": "complete_reply",
    "inspect_request": "inspect_reply",
    "is_complete_request": "is_complete_reply",
    "kernel_info_request": "kernel_info_reply",
}
"""Requests that may be answered while a cell runs, and the messages that answer them."""


class BusyReplies:
    """Base of a kernel's class, before ipykernel's own classes among its bases.

    ipykernel takes messages on a thread of its own from version 7 on; in older ones everything waits for the cell.
    """

    session: Any
    iopub_socket: Any
    shell_stream: Any
    log: Any

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._main = threading.current_thread()
        self._running = threading.Lock()
        self._runs: Any = None  # the request whose cell runs
        # Ids of requests for cells that the main thread has not ended: the thread of messages adds, the main thread discards.
        self._cells: set[str] = set()
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="hvdlab-aside")
        self._answering: set[asyncio.Task[None]] = set()

    def answer_aside(self, kind: str, content: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the content of the answer to a request; None if it has to wait. Not on the main thread."""
        raise NotImplementedError

    @contextmanager
    def running(self, request: Any) -> Iterator[None]:
        """Mark the request as the one whose cell runs, within this context. Main thread."""
        self._runs = request
        try:
            yield
        finally:
            with self._running:  # after this, _answer() sends no state of this cell any more
                self._runs = None

    async def shell_channel_thread_main(self, msg: Any) -> None:
        """Take a message of the shell channel. The thread of that channel."""
        header = self._header(msg)
        if header.get("msg_type") == "execute_request" and header.get("subshell_id") is None:
            # From now on messages that follow would wait behind this cell, long before the main thread begins it.
            self._cells.add(header["msg_id"])
        request = self._request(msg) if self._cells else None
        if request is None:
            await super().shell_channel_thread_main(msg)  # type: ignore[misc]  # of ipykernel's class
            return
        task = asyncio.create_task(self._answer(msg, *request))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def dispatch_shell(self, msg: Any, /, **how: Any) -> None:
        """Handle a message. Main thread, or that of a subshell."""
        # Read before the message is handled: afterwards it can't be read again.
        msg_id = self._header(msg).get("msg_id", "") if self._cells else ""
        try:
            await super().dispatch_shell(msg, **how)  # type: ignore[misc]  # of ipykernel's class
        finally:
            self._cells.discard(msg_id)

    def _peek(self, msg: Any) -> dict[str, Any]:
        """Return a message, or an empty one if it is not valid, without receiving it: a message can be received only once."""
        try:
            _, frames = self.session.feed_identities(msg, copy=False)
            return dict(self.session.deserialize(frames, content=False, copy=False))
        # ipykernel will report it; the marks that it sends itself are no messages either.
        except (ValueError, TypeError, KeyError):
            return {}

    def _header(self, msg: Any) -> dict[str, Any]:
        return dict(self._peek(msg).get("header", {}))

    def _request(self, msg: Any) -> tuple[str, dict[str, Any]] | None:
        """Return the kind and content of a request that can be answered now; None for any other message."""
        peeked = self._peek(msg)
        header = peeked.get("header", {})
        if header.get("msg_type") not in KINDS or header.get("subshell_id") is not None:
            return None
        return header["msg_type"], self.session.unpack(peeked["content"])

    async def _answer(self, msg: Any, kind: str, content: dict[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(self._helper, self.answer_aside, kind, content)
        except HvdlabError:  # the ranks are gone; the cell will report it
            answer = None
        if answer is None:
            await super().shell_channel_thread_main(msg)  # type: ignore[misc]  # of ipykernel's class
            return
        idents, frames = self.session.feed_identities(msg, copy=False)
        request = self.session.deserialize(frames, copy=False)
        self._say("busy", request)
        self.session.send(self.shell_stream, KINDS[kind], answer, request, ident=idents)
        with self._running:
            self._say("idle", request)
            if self._runs is not None:  # clients take the last state that was sent for the kernel's
                self._say("busy", self._runs)

    def _say(self, state: str, request: Any) -> None:
        self.session.send(
            self.iopub_socket,
            "status",
            {"execution_state": state},
            parent=request,
            ident=self._topic("status"),
        )

    def _topic(self, topic: str) -> bytes:
        found: bytes = super()._topic(topic)  # type: ignore[misc]  # of ipykernel's class
        return found
