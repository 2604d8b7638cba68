"""The controller reads which engines come and go."""

from __future__ import annotations

import socket
from typing import cast

from hvdlab.kernel_ext.forkserver.controller import PoolController


class Channel:
    """Connection to the fork server, of which each read takes one of these pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)

    def recv(self, limit: int) -> bytes:
        return self._pieces.pop(0)


class Controller(PoolController):
    """Controller without a hub, which notes the engines that come and go."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = cast(socket.socket, channel)
        self.news: list[tuple[str, int]] = []

    def _finish(self, engine: int) -> None:
        self.news.append(("comes", engine))

    def _forget(self, engine: int) -> None:
        self.news.append(("goes", engine))


def test_line_cut_by_a_read_names_the_right_engine() -> None:
    controller = Controller(Channel(b"+7\n-1", b"2", b"3\n+", b"4\n"))
    for _ in range(4):
        controller._read_channel(0, 0)
    assert controller.news == [("comes", 7), ("goes", 123), ("comes", 4)]
