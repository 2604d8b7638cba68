"""One fork server as its pool holds it: started here, or found where an earlier pool left it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import IO

from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.protocol.endpoint import Endpoint
from hvdlab.collectives.system import require_own_peer
from hvdlab.launch.exits import describe_signal
from hvdlab.launch.forkserver.lifeline import Lifeline
from hvdlab.launch.processes import exit_status, readable


class ServerHandle:
    """A fork server, and the connection to it.

    Attributes:
        endpoint: The connection.
        pid: Its process id.
    """

    def __init__(
        self,
        sock: socket.socket,
        pid: int,
        log: IO[bytes] | None,
        process: subprocess.Popen[bytes] | None = None,
        pulse: Lifeline | None = None,
    ) -> None:
        self.endpoint = Endpoint(sock, descriptors=process is None)
        self.pid = pid
        self._log, self._process, self._pulse = log, process, pulse
        self._pidfd = os.pidfd_open(pid)

    @classmethod
    def start(cls, environ: Mapping[str, str], lifeline: Lifeline, program: str) -> ServerHandle:
        """Start a fork server. Raises ``StartError``."""
        ours, theirs = socket.socketpair()
        log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (belongs to the object)
        # When this process ends, the pipe's writing end is closed: so the fork server learns of it, even while it imports.
        reader, pulse = Lifeline.with_reader()
        try:
            process = subprocess.Popen(
                # -P: modules in the working directory must not shadow those that the fork server needs.
                [
                    *(sys.executable, "-P", "-m", "hvdlab.launch.forkserver"),
                    *(str(number) for number in (theirs.fileno(), os.getpid(), lifeline.descriptor)),
                    program,
                ],
                stdin=reader,
                stdout=log,
                stderr=log,
                env=dict(environ),
                pass_fds=(theirs.fileno(), lifeline.descriptor),
                start_new_session=True,
            )
            return cls(ours, process.pid, log, process, pulse)
        except OSError as error:
            ours.close()
            log.close()
            pulse.close()
            raise StartError(f"the fork server could not be started: {error.strerror or error}") from error
        finally:
            theirs.close()
            os.close(reader)

    @classmethod
    def find(cls, path: str, deadline: Deadline) -> ServerHandle:
        """Connect to a fork server that was kept. Raises ``StartError`` if there is none."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(deadline.remaining())
            sock.connect(path)
            pid = require_own_peer(sock)
            return cls(sock, pid, _log_of(pid))
        except OSError as error:
            sock.close()
            raise StartError(f"no pool waits at {path}: {error.strerror or error}") from error

    def has_ended(self, timeout: float | None) -> bool:
        """Wait for the fork server's end. Returns whether it has ended."""
        return readable(self._pidfd, timeout)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def why_ended(self, otherwise: str) -> str:
        """How the fork server ended, with its last words; ``otherwise`` if that is unknown."""
        if not self.has_ended(1.0):
            return otherwise
        if self._process is not None:
            code: int | None = self._process.wait()
        else:
            status = exit_status(self._pidfd, self.pid)
            code = None if status is None else os.waitstatus_to_exitcode(status)
        how = otherwise if code is None else describe_signal(-code) if code < 0 else f"exit code {code}"
        said = self._last_words()
        return f"{how}; its last words were:\n{said}" if said else how

    def _last_words(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 8192))
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return "\n".join(lines[-20:])

    def release(self) -> None:
        """Let go of the fork server, whether it has ended or stays. Idempotent."""
        self.endpoint.close()
        if self._process is not None and self._process.poll() is None:
            self._process.returncode = 0  # it stays on purpose; Popen would warn
        if self._process is None:
            with contextlib.suppress(ChildProcessError):  # unless this very process started it once
                os.waitpid(self.pid, os.WNOHANG)
        if self._pulse is not None:
            self._pulse.close()
        if self._log is not None:
            self._log.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _log_of(pid: int) -> IO[bytes] | None:
    """The file that another process's standard error is written to; None if it can't be opened."""
    try:
        return open(f"/proc/{pid}/fd/2", "rb")
    except OSError:
        return None
