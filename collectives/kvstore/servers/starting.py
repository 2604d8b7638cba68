"""Starting a server's process, for the first time or after it has died: the first worker of its host that comes does it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.engine.hosts import host_key
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.kvstore.servers.launch import Launch, Place
from hvdlab.collectives.logs import LOG
from hvdlab.collectives.protocol.endpoint import new_certificate
from hvdlab.collectives.protocol.handshake import TlsAddress, UnixAddress, parse_address
from hvdlab.collectives.settings import Settings
from hvdlab.collectives.system import require_own_peer

SOCKET, LOCK, SETTINGS = "socket", "lock", "launch.json"
_BACKLOG = 1024
_PORT_AGAIN_SECONDS = 0.05
_SAY_AFTER_SECONDS = 10.0


class Starter:
    """Starts servers on this host; safe to use from several processes at once.

    A worker's process is the parent of the servers that it has started, and does nothing else for them: they live in sessions of
    their own and end with the job.
    """

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[bytes]] = []

    def make_place(self, index: int, settings: Settings, *, remote: bool, timeout: float) -> Place:
        """Make the place of a new server on this host and start it.

        Args:
            index: Number of the server on this host.
            settings: This rank's settings.
            remote: Whether workers of other hosts have to reach it.
            timeout: Seconds that the start may take.

        Raises:
            StartError: The server did not come up.
        """
        assert settings.coordinator is not None
        directory = tempfile.mkdtemp(prefix="kv", dir=_parent(settings))
        certificate = key = tls_address = ""
        if remote:
            certificate, key = new_certificate(settings.address)
            with _listen_tls(settings.address, 0) as probe:
                tls_address = str(TlsAddress(settings.address, probe.getsockname()[1]))
        place = Place(host_key(), index, directory, tls_address, certificate, secrets.token_hex(32))
        launch = Launch(
            place.token,
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
        _write_private(Path(directory) / SETTINGS, msgspec.json.encode(launch))
        self.ensure(place, timeout)
        return place

    def ensure(self, place: Place, timeout: float) -> None:
        """Start the server of a place of this host, unless it runs.

        Raises:
            StartError: The server did not come up, or its job is over.
        """
        for child in list(self._children):
            if child.poll() is not None:
                if child.stdout is not None:
                    child.stdout.close()
                self._children.remove(child)
        directory = Path(place.directory)
        with _alone(directory):
            if _answers(directory):
                return
            try:
                launch = msgspec.json.decode((directory / SETTINGS).read_bytes(), type=Launch)
            except (OSError, msgspec.MsgspecError) as error:
                raise StartError(f"The settings of the parameter server are gone: {error}") from error
            self._children.append(_spawn(launch, place, Deadline(timeout)))


def _parent(settings: Settings) -> str | None:
    """Return the directory that a server's directory is made in; ``None`` for the system's temporary directory.

    A server may be killed before it can remove its directory. The coordinator's directory is removed with all in it on the
    coordinator's host, that of an agent on each of several. Without either, the server alone removes its own.
    """
    assert settings.coordinator is not None
    where = parse_address(settings.coordinator)
    return str(Path(where.path).parent) if isinstance(where, UnixAddress) else settings.host_directory


def _spawn(launch: Launch, place: Place, deadline: Deadline) -> subprocess.Popen[bytes]:
    path = Path(place.directory) / SOCKET
    with contextlib.ExitStack() as sockets:
        local = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            path.unlink(missing_ok=True)
            local.bind(str(path))
            local.listen(_BACKLOG)
        except OSError as error:
            raise StartError(f"No socket for the parameter server at {path}: {error}") from error
        descriptors = [local.fileno()]
        if place.tls_address:
            where = parse_address(place.tls_address)
            assert isinstance(where, TlsAddress)
            remote = sockets.enter_context(_bind_again(where, deadline))
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
        process.kill()
        process.wait()
        raise
    return process


def _exchange(process: subprocess.Popen[bytes], launch: Launch, deadline: Deadline) -> None:
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
        if poll.poll(1000 * (_SAY_AFTER_SECONDS if left is None else min(left, _SAY_AFTER_SECONDS))):
            break
        if deadline.expired:
            raise StartError(f"The parameter server did not start within {deadline.seconds:g} s.")
        LOG.warning("a parameter server has been starting for more than %.0f s", _SAY_AFTER_SECONDS)
    if os.read(process.stdout.fileno(), 16) != b"ready\n":
        raise StartError("The parameter server ended before it was up; its output on stderr says why.")


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Let one process of this host at a time start the server. The kernel releases the lock of a process that is killed meanwhile."""
    try:
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StartError(f"The directory of the parameter server is gone: {error}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _answers(directory: Path) -> bool:
    """Whether a server serves the socket; the end of a server closes it."""
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


def _bind_again(where: TlsAddress, deadline: Deadline) -> socket.socket:
    """Listen on the port that workers of other hosts know; the system may need a moment to free it after a server has died."""
    while True:
        try:
            return _listen_tls(where.host, where.port)
        except StartError:
            if deadline.expired:
                raise
        time.sleep(_PORT_AGAIN_SECONDS)


def _write_private(path: Path, data: bytes) -> None:
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
    draft.rename(path)
