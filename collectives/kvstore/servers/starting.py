"""Start of a server's process, for the first time or after it has died, by the first worker of its host that notices.

The starter sends the server its settings on standard input. Workers get its address from each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hvdlab.collectives.errors import StartError
from hvdlab.collectives.protocol.endpoint import new_certificate
from hvdlab.collectives.protocol.handshake import TlsAddress, UnixAddress, parse_address
from hvdlab.collectives.settings import Settings
from hvdlab.collectives.system import host_key, require_own_peer
from hvdlab.collectives.text import LOG
from hvdlab.collectives.time_limits import Deadline

SOCKET, LOCK, SETTINGS = "socket", "lock", "launch.json"


_BACKLOG = 1024  # connections that may wait to be accepted: all workers may come at once


_REBIND_SECONDS = 0.05
"""Pause between two tries to listen on a port that a dead server's connections still occupy."""


_WARN_AFTER_SECONDS = 10.0
"""Seconds of a start after which it is logged, each time again."""


class ServerLaunch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings that a server reads from its standard input.

    Attributes:
        token: Secret that workers have to show.
        directory: A private directory with its socket.
        listener: Descriptor of the listening Unix socket.
        tls_listener: Descriptor of the listening socket for other hosts, or -1.
        certificate, key: PEM texts for that socket, or empty.
        coordinator, coordinator_token, coordinator_certificate: How to connect to the coordinator of the job, with which the server ends.
        reattach: A third of the seconds that the server waits for the coordinator's successor.
        optimizers: Modules to import, which register optimizers.
        path: Where the starter finds modules (``sys.path``), for these.
    """

    token: str
    directory: str
    listener: int
    tls_listener: int
    certificate: str
    key: str
    coordinator: str
    coordinator_token: str
    coordinator_certificate: str
    reattach: float
    optimizers: tuple[str, ...]
    path: tuple[str, ...]


class ServerAddress(msgspec.Struct, frozen=True):
    """Address and secrets by which workers reach a server.

    Attributes:
        host: Host key of the server's host, which its ranks have in common.
        index: Number of the server among those of its host.
        directory: The server's private directory, which only ranks of its host reach.
        tls_address: Address at which workers of other hosts connect, or empty.
        certificate: PEM text that goes with ``tls_address``.
        token: Secret that workers have to show.
    """

    host: str
    index: int
    directory: str
    tls_address: str
    certificate: str
    token: str


class ServerStarter:
    """Parent of the servers that this process starts on its host; several processes may start one at once.

    It only reaps them: servers live in sessions of their own and end with the job.
    """

    def __init__(self) -> None:
        #: Servers that this process has started and that may still run.
        self._children: list[subprocess.Popen[bytes]] = []

    def start_new(self, index: int, settings: Settings, *, remote: bool, timeout: float) -> ServerAddress:
        """Start a new server on this host, and return its address.

        Args:
            index: Number of the server on this host.
            settings: This rank's settings.
            remote: Whether workers of other hosts have to reach it.
            timeout: Seconds that the start may last.

        Raises:
            StartError: The server did not come up.
        """
        directory = tempfile.mkdtemp(prefix="kv", dir=_parent_directory(settings))
        try:
            return self._start_in(directory, index, settings, remote=remote, timeout=timeout)
        except BaseException:
            # It has the secrets of the server and of the job, and no server that would remove it.
            shutil.rmtree(directory, ignore_errors=True)
            raise

    def _start_in(
        self, directory: str, index: int, settings: Settings, *, remote: bool, timeout: float
    ) -> ServerAddress:
        assert settings.coordinator is not None
        certificate = key = tls_address = ""
        if remote:
            certificate, key = new_certificate(settings.address)
            # Only for a free port: the server and each successor listen on that one, which workers of other hosts know.
            with _listen_tls(settings.address, 0) as probe:
                tls_address = str(TlsAddress(settings.address, probe.getsockname()[1]))
        address = ServerAddress(host_key(), index, directory, tls_address, certificate, secrets.token_hex(32))
        launch = ServerLaunch(
            address.token,
            directory,
            -1,
            -1,
            certificate,
            key,
            settings.coordinator,
            settings.token,
            settings.certificate or "",
            settings.reattach,
            settings.kv_optimizers,
            tuple(os.path.abspath(entry) for entry in sys.path) if settings.kv_optimizers else (),
        )
        # Before the start: any worker of this host starts the server again with these settings.
        _write_private(Path(directory) / SETTINGS, msgspec.json.encode(launch))
        self.ensure_running(address, timeout)
        return address

    def ensure_running(self, address: ServerAddress, timeout: float) -> None:
        """Start the server of an address of this host, unless it runs.

        Raises:
            StartError: The server did not come up, or its job is over.
        """
        for child in list(self._children):
            if child.poll() is not None:
                if child.stdout is not None:
                    child.stdout.close()
                self._children.remove(child)
        directory = Path(address.directory)
        with _start_lock(directory):
            # Under the lock: another process may have started the server while this one waited for it.
            if _is_serving(directory):
                return
            try:
                launch = msgspec.json.decode((directory / SETTINGS).read_bytes(), type=ServerLaunch)
            except (OSError, msgspec.MsgspecError) as error:
                raise StartError(f"The settings of the parameter server are gone: {error}") from error
            self._children.append(_spawn(launch, address, Deadline(timeout)))


def _parent_directory(settings: Settings) -> str | None:
    """Return the directory that a server's directory is made in; ``None`` for the system's temporary directory.

    A server may be killed before it can remove its directory. The coordinator's directory is removed with all in it on the
    coordinator's host, that of an agent on each of several. Without either, the server alone removes its own.
    """
    assert settings.coordinator is not None
    where = parse_address(settings.coordinator)
    return str(Path(where.path).parent) if isinstance(where, UnixAddress) else settings.host_directory


def _spawn(launch: ServerLaunch, address: ServerAddress, deadline: Deadline) -> subprocess.Popen[bytes]:
    path = Path(address.directory) / SOCKET
    with contextlib.ExitStack() as sockets:
        local = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            # Under the lock, and no server listens: the file is that of a dead one, on which no socket can be bound.
            path.unlink(missing_ok=True)
            local.bind(str(path))
            local.listen(_BACKLOG)
        except OSError as error:
            raise StartError(f"No socket for the parameter server at {path}: {error}") from error
        descriptors = [local.fileno()]
        if address.tls_address:
            where = parse_address(address.tls_address)
            assert isinstance(where, TlsAddress)
            remote = sockets.enter_context(_rebind(where, deadline))
            descriptors.append(remote.fileno())
        launch = msgspec.structs.replace(
            launch, listener=descriptors[0], tls_listener=descriptors[1] if len(descriptors) > 1 else -1
        )
        # -P: a directory named like one of ours in the current directory must not be imported instead.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hvdlab.collectives.kvstore.servers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            pass_fds=descriptors,
        )
    try:
        _exchange(process, launch, deadline)
    except BaseException:
        # A server that did not report in time must not come up later, when another one has its socket.
        process.kill()
        process.wait()
        raise
    return process


def _exchange(process: subprocess.Popen[bytes], launch: ServerLaunch, deadline: Deadline) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(launch) + b"\n")
        process.stdin.close()
    except BrokenPipeError as error:
        raise StartError(
            "The parameter server ended before it was up; its output on stderr says why."
        ) from error
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while True:
        left = deadline.remaining()
        if poll.poll(1000 * (_WARN_AFTER_SECONDS if left is None else min(left, _WARN_AFTER_SECONDS))):
            break
        if deadline.expired:
            raise StartError(f"The parameter server did not start within {deadline.seconds:g} s.")
        LOG.warning("a parameter server has been starting for more than %.0f s", _WARN_AFTER_SECONDS)
    if os.read(process.stdout.fileno(), 16) != b"ready\n":
        raise StartError("The parameter server ended before it was up; its output on stderr says why.")


@contextlib.contextmanager
def _start_lock(directory: Path) -> Iterator[None]:
    """Hold the lock under which one process of this host at a time starts the server; the kernel releases that of a killed process."""
    try:
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartError(f"The directory of the parameter server is gone: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _is_serving(directory: Path) -> bool:
    """Return whether a server listens on the socket; the end of a server closes it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.connect(str(directory / SOCKET))
            require_own_peer(sock)
        except OSError:
            return False
    return True


def _listen_tls(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise StartError(f"The parameter server can't listen on {host} port {port}: {error}") from error


def _rebind(where: TlsAddress, deadline: Deadline) -> socket.socket:
    """Listen again on the port that workers of other hosts know; the system may need a moment to free it after a server has died."""
    while True:
        try:
            return _listen_tls(where.host, where.port)
        except StartError:
            if deadline.expired:
                raise
        # A pause, since no event announces that the port is free.
        time.sleep(_REBIND_SECONDS)


def _write_private(path: Path, data: bytes) -> None:
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
    draft.rename(path)
