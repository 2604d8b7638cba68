"""Starting the coordinator as a process of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from hvdlab.collectives.coordinator.launch import Launch, Ready, settings_from
from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.protocol.address import UNIX_PATH_LIMIT

_NAME_LENGTH = len("/hvdlab-abcdefgh/coordinator")


class CoordinatorProcess:
    """A coordinator that runs as long as its starter, or until :meth:`close`.

    It ends by itself when its starter ends in whatever way, and removes its directory.

    Attributes:
        address: Where ranks and clients of this host connect (``unix:/path``).
        tls_address: Where those of other hosts connect (``tls:host:port``), or ``None``.
        certificate: PEM text that goes with ``tls_address``, or ``None``.
        token: Secret that Hello must show.
        pid: Process id.
        directory: Its private directory.
    """

    def __init__(self, process: subprocess.Popen[bytes], directory: Path, token: str, ready: Ready) -> None:
        self._process = process
        self.directory = directory
        self.token = token
        self.pid = process.pid
        self.address = ready.address
        self.tls_address = ready.tls_address or None
        self.certificate = ready.certificate or None

    @classmethod
    def start(
        cls,
        *,
        size: int | None = None,
        directory: Path | None = None,
        tcp_host: str | None = None,
        linger: bool = False,
        timeout: float = 10,
        environ: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> CoordinatorProcess:
        """Start it and wait until it listens.

        Args:
            size: Number of ranks, if known; else a client says which ranks to expect.
            directory: Where to make its private directory; by default the system's temporary directory.
            tcp_host: Address on which it listens for ranks of other hosts (TLS), if any.
            linger: Whether it stays, when its starter has ended, until the last rank has gone.
            timeout: Seconds.
            environ: Where users' variables are looked up; by default in this process's environment.
            settings: Other fields of :class:`~hvdlab.collectives.coordinator.launch.Launch`, such as
                ``stall_seconds``; they win over users' variables.

        Raises:
            InvalidRequestError: A variable of the environment does not hold what it should.
            StartError: It did not come up; the text says why.
        """
        deadline = Deadline(timeout)
        settings = {**settings_from(os.environ if environ is None else environ), **settings}
        token = secrets.token_hex(32)
        private = _private_directory(directory)
        launch = Launch(token, str(private), os.getpid(), size=size, tcp_host=tcp_host or "", linger=linger)
        process: subprocess.Popen[bytes] | None = None
        try:
            launch = msgspec.structs.replace(launch, **settings)
            process = _spawn()
            ready = _exchange(process, launch, deadline)
        except BaseException:
            if process is not None:
                _end(process, 0)
            shutil.rmtree(private, ignore_errors=True)
            raise
        return cls(process, private, token, ready)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def release(self, timeout: float = 0.2) -> None:
        """Leave it to itself: one that lingers ends after the last rank, any other now. Idempotent.

        Args:
            timeout: Seconds to wait for it to end, so that no zombie is left if it does at once.
        """
        _cut_lifeline(self._process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def close(self, timeout: float = 5) -> None:
        """End the process and remove what it may have left. Idempotent.

        Args:
            timeout: Seconds that it is given to end by itself before it is killed.
        """
        _end(self._process, timeout)
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _private_directory(parent: Path | None) -> Path:
    """A new directory for us alone, with a path that leaves room for a socket's name."""
    candidates = [parent] if parent is not None else [Path(tempfile.gettempdir()), Path("/tmp")]
    for candidate in candidates:
        if len(os.fsencode(candidate)) + _NAME_LENGTH <= UNIX_PATH_LIMIT:
            try:
                return Path(tempfile.mkdtemp(prefix="hvdlab-", dir=candidate))
            except OSError as error:
                raise StartError(f"No directory for the coordinator in {candidate}: {error}") from error
    raise StartError(
        f"The path {candidates[0]} is too long for a Unix socket in it; give a shorter directory."
    )


def _spawn() -> subprocess.Popen[bytes]:
    # -P: a directory named like one of ours in the current directory must not be imported instead.
    # A session of its own keeps Ctrl-C in the starter's terminal away from it.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "hvdlab.collectives.coordinator"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def _exchange(process: subprocess.Popen[bytes], launch: Launch, deadline: Deadline) -> Ready:
    assert process.stdin is not None
    assert process.stdout is not None
    line = b""
    try:
        process.stdin.write(msgspec.json.encode(launch) + b"\n")
        process.stdin.flush()
        output = process.stdout.fileno()
        poll = select.poll()
        poll.register(output, select.POLLIN)
        while not line.endswith(b"\n"):
            left = deadline.remaining()
            if not poll.poll(None if left is None else left * 1000):
                raise StartError(f"The coordinator did not start within {deadline.seconds:g} s.")
            piece = os.read(output, 65536)
            if not piece:
                raise StartError("The coordinator ended before it was up; its output on stderr says why.")
            line += piece
    except BrokenPipeError as error:
        raise StartError("The coordinator ended before it was up; its output on stderr says why.") from error
    ready = msgspec.json.decode(line, type=Ready)
    if ready.error:
        raise StartError(f"The coordinator could not start: {ready.error}")
    return ready


def _cut_lifeline(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None and not process.stdin.closed:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _end(process: subprocess.Popen[bytes], timeout: float) -> None:
    _cut_lifeline(process)
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
