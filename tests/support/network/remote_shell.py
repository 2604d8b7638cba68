"""Replacement of ssh between the hosts of :mod:`support.network.namespaces`: ``python tests/support/network/remote_shell.py SOCKET HOST words...``.

The client hands its standard streams to a server outside the hosts, which starts the command on the host, with next to
no environment, as sshd does, and reports its exit status.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Self

sys.path.insert(0, str(Path(__file__).parents[2]))  # where the other modules of tests are, for this program


from support.patience import PATIENCE

if TYPE_CHECKING:
    from support.network.namespaces import Network, Process


class RemoteShell:
    """Server.

    Attributes:
        commands: The command lines that were asked for.
    """

    def __init__(self, network: Network, directory: Path) -> None:
        self.commands: list[str] = []
        self._network = network
        self._path = str(directory / "remote-shell")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._path)
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def client(self) -> str:
        """The command to use in place of ssh."""
        return f"{sys.executable} {__file__} {self._path}"

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()
            if not self._path:
                return

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            data, streams, _, _ = socket.recv_fds(connection, 65536, 3)
            if not data:
                return
            try:
                name, *words = json.loads(data)
                process = self._start(name, " ".join(words), streams)
            finally:
                for fd in streams:
                    os.close(fd)
            code = process.wait() if process is not None else 255
            with contextlib.suppress(OSError):
                connection.sendall(bytes([code % 256]))

    def _start(self, name: str, command: str, streams: list[int]) -> Process | None:
        host = next((host for host in self._network.hosts if host.name == name), None)
        if host is None:
            os.write(streams[2], f"ssh: Could not resolve hostname {name}\n".encode())
            return None
        self.commands.append(command)
        stdin, stdout, stderr = streams
        bare = [
            "env",
            "-i",
            f"PATH={os.environ['PATH']}",
            f"HOME={host.directory}",
            f"TMPDIR={host.directory}",
        ]
        return host.popen([*bare, "sh", "-c", command], stdin=stdin, stdout=stdout, stderr=stderr)

    def wait(self) -> None:
        """Wait until every command that was started has ended."""
        for thread in self._threads[1:]:
            thread.join(PATIENCE)
            assert not thread.is_alive()

    def close(self) -> None:
        path, self._path = self._path, ""
        with socket.socket(socket.AF_UNIX) as last:  # wakes the thread that accepts
            last.connect(path)
        for thread in self._threads:
            thread.join(PATIENCE)
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main(path: str, *words: str) -> int:
    """The client."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [json.dumps(words).encode()], [0, 1, 2])
        for fd in (0, 1):
            os.close(fd)
        return (connection.recv(1) or b"\xff")[0]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
