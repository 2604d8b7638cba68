"""Starting a relay as a process of its own, and looking after it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from hvdlab.collectives.coordinator.listeners import Listeners
from hvdlab.collectives.coordinator.process import private_directory, remove_directory
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.heartbeat import Heartbeat
from hvdlab.collectives.linux import process_state
from hvdlab.collectives.relay.launch import RelayLaunch


class RelayProcess:
    """A relay that runs until the coordinator's connection ends, or :meth:`close`.

    Ranks may connect at once: until the relay has a connection to the coordinator, they wait at its socket. If its starter ends, the relay
    stays until its last rank has gone.

    The starter looks after it, since nothing else on this host would notice if it hung: at :meth:`due`, and whenever :attr:`answers` is readable,
    it calls :meth:`look`. A relay that does not answer, or is stopped, is killed: its ranks then connect by themselves, and lose nothing.

    Args:
        coordinator: The coordinator's address.
        token: Its secret for relays.
        certificate: PEM text (``tls`` only), or empty.
        host: What the coordinator calls this host.
        dead_after: Seconds of silence after which a coordinator of another host counts as lost.
        directory: Where to make its private directory; by default the system's temporary directory.

    Attributes:
        address: Where ranks of this host connect, ``unix:/path``.
        answers: Descriptor to watch.

    Raises:
        StartError: The process can't be started.
    """

    def __init__(
        self,
        coordinator: str,
        token: str,
        certificate: str,
        host: str,
        *,
        dead_after: float = 30.0,
        directory: Path | None = None,
    ) -> None:
        self._directory = private_directory(directory)
        listeners: Listeners | None = None
        try:
            listeners = Listeners(self._directory, "")
            self.address, listener = listeners.address, listeners.descriptors[0]
            launch = RelayLaunch(
                coordinator, token, certificate, host, str(self._directory), listener, dead_after
            )
            self._process = _spawn(launch)
        except BaseException:
            remove_directory(self._directory)
            raise
        finally:
            # The relay alone has the socket: when it is gone, ranks must not wait there.
            if listeners is not None:
                listeners.close()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions, self.answers = self._process.stdin, self._process.stdout.fileno()
        os.set_blocking(self.answers, False)
        self._heartbeat = Heartbeat(time.monotonic(), self._is_stopped)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def _is_stopped(self) -> bool:
        return process_state(self.pid) in ("T", "t")

    def due(self, now: float) -> float:
        """Seconds until :meth:`look` has to be called."""
        return self._heartbeat.timeout(now)

    def look(self, now: float) -> str:
        """Take in answers, ask if it is time to, and kill the relay if it does not answer. Returns why it was killed; else empty."""
        with contextlib.suppress(BlockingIOError):
            if os.read(self.answers, 4096):
                self._heartbeat.heard(now)
        if self._heartbeat.asks(now):
            with contextlib.suppress(BrokenPipeError):  # it has ended; that is noticed otherwise
                os.write(self._questions.fileno(), b"?")
        reason = self._heartbeat.lost(now)
        if reason:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._heartbeat.heard(now)
        return reason

    def close(self, timeout: float = 2.0) -> None:
        """Have it end, after ``timeout`` seconds by SIGKILL, and remove what it may have left. Idempotent."""
        with contextlib.suppress(BrokenPipeError):
            self._questions.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        remove_directory(self._directory)


def _spawn(launch: RelayLaunch) -> subprocess.Popen[bytes]:
    # As the coordinator is started: -P, or else a directory of the user's might be imported; a session of its own, for Ctrl-C.
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hvdlab.collectives.relay"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(launch.listener,),
            bufsize=0,
        )
    except OSError as error:
        raise StartError(f"The relay of {launch.host} could not be started: {error}") from error
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, as is noticed later
        process.stdin.write(msgspec.json.encode(launch) + b"\n")
    return process
