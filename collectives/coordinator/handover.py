"""Handover of the listening socket of a coordinator that outlives its starter, to the process that supervises it next.

A process that holds the listening socket can start a successor when the coordinator dies. The coordinator hands it out at a Unix
socket in a directory that only the user may enter; it sends away a process of another user that gets there all the same.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import msgspec

from hvdlab.collectives.coordinator.process import CoordinatorLaunch
from hvdlab.collectives.system import require_own_peer

_NAME = "handover"
"""Name of the socket in the coordinator's directory."""
_LARGEST = 1 << 16
"""Bytes of one read; the launch has a few thousand."""


class Handover:
    """Coordinator's side of the handover.

    Args:
        launch: Settings for a successor, and the descriptor of the listening socket.

    Attributes:
        socket: The socket to watch: call :meth:`serve` when it is readable.
    """

    def __init__(self, launch: CoordinatorLaunch) -> None:
        self._launch = launch
        path = Path(launch.directory) / _NAME
        path.unlink(missing_ok=True)  # a predecessor's
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(str(path))
        self.socket.listen(4)
        self.socket.setblocking(False)

    def serve(self) -> None:
        """Send one process the launch and the listening socket."""
        with contextlib.suppress(OSError):  # it has gone again, or is another user's
            peer, _ = self.socket.accept()
            with peer:
                require_own_peer(
                    peer
                )  # tokens and key are the user's alone, also if the directory has been opened to others
                peer.setblocking(False)  # a process that does not read must not stop the coordinator
                socket.send_fds(peer, [msgspec.json.encode(self._launch)], [self._launch.listener])


def server_of(directory: Path, timeout: float) -> int:
    """Return the process id of the coordinator in this directory; 0 if it has ended, or is another user's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.settimeout(timeout)
        try:
            door.connect(str(directory / _NAME))
            return require_own_peer(door)
        except OSError:
            return 0


def take_over(directory: Path, timeout: float) -> tuple[CoordinatorLaunch, socket.socket]:
    """Return the settings and the listening socket of the coordinator in this directory.

    Raises:
        OSError: No coordinator of this user's hands them over there within ``timeout`` seconds for each step.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.settimeout(timeout)
        door.connect(str(directory / _NAME))
        require_own_peer(door)
        said, descriptors, _, _ = socket.recv_fds(door, _LARGEST, 1)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        try:
            while piece := door.recv(_LARGEST):
                said += piece
            launch = msgspec.json.decode(said, type=CoordinatorLaunch)
        except (OSError, msgspec.DecodeError) as error:
            for descriptor in descriptors:
                os.close(descriptor)
            raise OSError(f"the coordinator in {directory} hands nothing over: {error}") from error
    if not descriptors:
        raise OSError(f"the coordinator in {directory} hands no socket over")
    return launch, socket.socket(fileno=descriptors[0])
