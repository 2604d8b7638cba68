"""Another debugger than the notebook's, at a port."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from hvdlab.kernel_ext.wire.debug import Unframer, frame

Json = dict[str, Any]


class DapPort:
    """Client of the Debug Adapter Protocol at a port of this host."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._unframer, self._heard, self._seq = Unframer(), list[Json](), 0

    def ask(self, command: str, **arguments: object) -> Json:
        """Send a request and return its answer."""
        return self.answer(self.begin(command, **arguments))

    def begin(self, command: str, **arguments: object) -> int:
        """Send a request, and return the number by which :meth:`answer` knows it."""
        self._seq += 1
        request = {"type": "request", "seq": self._seq, "command": command, "arguments": arguments}
        self._socket.sendall(frame(json.dumps(request).encode()))
        return self._seq

    def answer(self, seq: int) -> Json:
        """Wait for the answer to this request."""
        return self.wait(lambda one: one["type"] == "response" and one["request_seq"] == seq)

    def wait(self, wanted: Callable[[Json], bool]) -> Json:
        while True:
            for one in self._heard:
                if wanted(one):
                    self._heard.remove(one)
                    return one
            data = self._socket.recv(1 << 16)
            assert data, "the port was closed"
            self._heard += [json.loads(message) for message in self._unframer.feed(data)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
