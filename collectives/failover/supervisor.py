"""Supervision of a coordinator by rank 0 that has started it, and the handover of one to the process that supervises it next.

When the coordinator dies, a thread of rank 0 starts a successor. A process that holds the listening socket of a coordinator that
outlives its starter can do so, too. The coordinator hands it out at a Unix socket in a directory that only the user may enter; it
sends away a process of another user that gets there all the same.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from pathlib import Path

import msgspec

from hvdlab.collectives.coordinator.process import CoordinatorLaunch, CoordinatorProcess
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.system import require_own_peer
from hvdlab.collectives.text import LOG
from hvdlab.collectives.time_limits import RestartLimit

_POLL = 1.0
"""Seconds between two checks of a process whose end can't be waited for."""


class Keeper:
    """Supervisor of a coordinator that was started with ``keep``.

    The other ranks wait at the coordinator's sockets until the successor serves them. If there can be no successor, this closes the
    sockets, so that no rank waits for one; the end of this process closes them, too.

    Args:
        coordinator: The coordinator; it stays the caller's.
    """

    def __init__(self, coordinator: CoordinatorProcess) -> None:
        self._coordinator = coordinator
        #: Eventfd that ends the thread; -1 after :meth:`close`.
        self._end = os.eventfd(0)
        #: Limit on successors: a fault that ends each of them must not be repeated for ever.
        self._restarts = RestartLimit()
        #: The thread that waits for the coordinator's end.
        self._thread = threading.Thread(target=self._run, name="hvdlab-keeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the supervision. Call it before the coordinator is released. Idempotent."""
        if self._end >= 0:
            os.eventfd_write(self._end, 1)
            # Before the descriptor is closed: the thread would otherwise select on a number that another file has meanwhile.
            self._thread.join()
            os.close(self._end)
            self._end = -1

    def _run(self) -> None:
        while self._died():
            # Before `respawn()`, which replaces the process that has ended.
            how = self._coordinator.ending()
            began = time.monotonic()
            if self._restarts.reached:
                self._give_up(how, f"it has ended {self._restarts.most} times within a minute")
                return
            self._restarts.add()  # before the attempt: one that hangs or fails counts as well
            try:
                self._coordinator.respawn()
            # Also a fault of ours: with the sockets open and no thread that serves them, ranks would wait for a successor in vain.
            except Exception as error:  # noqa: BLE001  (for any error there is no successor)
                self._give_up(how, str(error) if isinstance(error, StartError | OSError) else repr(error))
                return
            LOG.warning(
                "the coordinator ended (%s), and rank 0 has started another within %.1f s. What ranks were doing "
                "together at that moment has failed; those that can, go on",
                how,
                time.monotonic() - began,
            )

    def _died(self) -> bool:
        """Wait for the coordinator's end. Return False if :meth:`close` was called."""
        process = -1
        with contextlib.suppress(OSError):  # it was waited for already; or no descriptor is left
            process = os.pidfd_open(self._coordinator.pid)
        watched = select.poll()  # select() refuses descriptors from 1024 on
        watched.register(self._end, select.POLLIN)
        if process >= 0:
            watched.register(process, select.POLLIN)
        try:
            while not self._coordinator.ending():
                ready = dict(watched.poll(None if process >= 0 else _POLL * 1000))
                # Read before the coordinator's end: a caller that closes both must not get a successor.
                if self._end in ready:
                    return False
            return True
        finally:
            if process >= 0:
                os.close(process)

    def _give_up(self, how: str, why: str) -> None:
        LOG.error("the coordinator ended (%s), and no other one can take its place: %s", how, why)
        self._coordinator.close()


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
        #: Descriptor in reserve for a connection that comes when the process has no other left; -1 while that has it.
        self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def serve(self) -> None:
        """Send one process the launch and the listening socket."""
        with contextlib.suppress(OSError):  # it has gone again, or is another user's
            peer = self._accept()
            with peer:
                require_own_peer(
                    peer
                )  # tokens and key are the user's alone, also if the directory has been opened to others
                peer.setblocking(False)  # a process that does not read must not stop the coordinator
                socket.send_fds(peer, [msgspec.json.encode(self._launch)], [self._launch.listener])
        if self._reserve < 0:
            with contextlib.suppress(OSError):  # none is left: the next call tries again
                self._reserve = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _accept(self) -> socket.socket:
        try:
            return self.socket.accept()[0]
        except OSError as error:
            if error.errno != errno.EMFILE or self._reserve < 0:
                raise
        # A connection that nothing accepts keeps the socket readable, and the coordinator's loop would never sleep.
        os.close(self._reserve)
        self._reserve = -1
        return self.socket.accept()[0]

    def close(self) -> None:
        """Free all descriptors. Idempotent. A coordinator leaves that to the end of its process."""
        self.socket.close()
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1


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
        # The socket comes with the first bytes, and a plain recv() would have the kernel close it.
        said, descriptors, _, _ = socket.recv_fds(door, _LARGEST, 1)
        for descriptor in descriptors:
            # The kernel hands descriptors over inheritable: a child that kept the socket open would let ranks wait there in vain.
            os.set_inheritable(descriptor, False)
        try:
            # The coordinator closes the connection behind the message.
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
