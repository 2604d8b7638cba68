"""What a rank has written is sent before ``os._exit`` ends it, which calls no exit handler."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import NoReturn, Protocol

from hvdlab.kernel_ext.rank.capture import Capture

ECHO = "hvdlab.rank.echo"
"""Mail of a rank to itself: once it is back, everything before it has left."""

WITHIN = 0.5
"""Seconds that this may take; code that calls ``os._exit`` wants the process gone, perhaps because it hangs."""


class Mail(Protocol):
    """An engine's mail."""

    @property
    def rank(self) -> int: ...
    def post(self, topic: str, body: bytes, to: tuple[int, ...] | None = None) -> None: ...
    def on_mail(self, topic: str, callback: Callable[[int, bytes], None]) -> None: ...


class LastWords:
    """Takes the place of ``os._exit``; a process that the rank forked gets the real one.

    Args:
        capture: What has not been sent yet.
        engine: Sends it.
    """

    def __init__(self, capture: Capture, engine: Mail) -> None:
        self._capture, self._engine = capture, engine
        self._pid = os.getpid()
        self._exit = os._exit
        self._back = threading.Event()

    def install(self) -> None:
        """Replace ``os._exit``."""
        self._engine.on_mail(ECHO, lambda sender, body: self._back.set())
        os._exit = self._leave

    def uninstall(self) -> None:
        """Put the real ``os._exit`` back, unless other code has put another in its place."""
        if os._exit == self._leave:
            os._exit = self._exit

    def _leave(self, status: int) -> NoReturn:
        if os.getpid() == self._pid:
            # On a thread of its own: this one may hold a lock that is needed, or be one that the sending waits for.
            sender = threading.Thread(target=self._send, name="hvdlab-last-words", daemon=True)
            sender.start()
            sender.join(WITHIN)
        self._exit(status)

    def _send(self) -> None:
        self._capture.flush()
        self._engine.post(ECHO, b"", (self._engine.rank,))
        self._back.wait(WITHIN)
