"""A wire between a browser and its server that can be cut and mended, as when a laptop is closed and opened again."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


class CutWire:
    """Proxy that passes connections on. Those that are open when it is cut end, and new ones are refused until it is
    mended."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._whole = True
        self._server: tuple[str, int] = ("", 0)

    @contextmanager
    def to(self, address: str) -> Iterator[str]:
        """Yield the address of this end of a wire to a server."""
        parts = urlsplit(address)
        assert parts.hostname
        assert parts.port
        self._server = parts.hostname, parts.port
        with socket.create_server((parts.hostname, 0)) as listener:
            self._go(self._accept, listener)
            try:
                yield f"{parts.scheme}://{parts.hostname}:{listener.getsockname()[1]}"
            finally:
                self.cut()
                listener.shutdown(socket.SHUT_RDWR)
                for thread in self._threads:
                    thread.join(10)

    def cut(self) -> None:
        with self._changing:
            self._whole = False
            ended = list(self._open)
        for one in ended:
            # Its end may have closed the connection first.
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        with self._changing:
            self._whole = True

    def _go(self, act: object, *arguments: socket.socket) -> None:
        thread = threading.Thread(target=act, args=arguments)  # type: ignore[arg-type]  # any callable of ours
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:  # the listener was closed
                return
            with self._changing:
                if not self._whole:
                    near.close()
                    continue
                far = socket.create_connection(self._server)
                self._open |= {near, far}
            self._go(self._pass, near, far)
            self._go(self._pass, far, near)

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        # Either end may reset the connection, and a cut shuts it down under this thread.
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        with self._changing:
            # The other direction can still use it; the last of the two closes both.
            if source in self._open:
                self._open.discard(source)
            if sink not in self._open:
                source.close()
                sink.close()
