"""Process of the coordinator, as its starter sees it: settings, with those of its state and server, listening sockets, start, successor,
end.

The starter creates the sockets, and exchanges one line of JSON in each direction with the process over pipes
(:class:`CoordinatorLaunch`, :class:`CoordinatorReady`). If it keeps the sockets when the coordinator dies, a rank or client that
connects meanwhile waits there for the successor, instead of being refused.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from hvdlab.collectives.autotune import TuningOptions
from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.protocol.handshake import UNIX_PATH_LIMIT, TlsAddress, UnixAddress
from hvdlab.collectives.settings import Reader, for_reader
from hvdlab.collectives.system import process_state
from hvdlab.collectives.time_limits import Deadline

# The coordinator's process reads its settings by this module too, and starts faster without what only its starter needs.
if TYPE_CHECKING:
    import subprocess

FUSION_THRESHOLD = 64 * 1024 * 1024
"""Bytes of tensors that are fused into one operation at most (a tensor that alone is larger is not split)."""
SCHEDULING_CREDIT = 4 * 1024 * 1024
"""Bytes of tensors with a priority that are ordered and not executed yet, at most (one that alone is larger is ordered nevertheless)."""
HISTORY_BYTES = 64 * 1024 * 1024
"""Payload of the event history, in bytes: views that open later can show no more."""
START_WITHIN = 30.0
"""Seconds that a coordinator has to start: as many as ranks have. Its modules take a second, and a busy machine ten times as long."""


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """Settings of the state.

    Attributes:
        size: Ranks 0 to ``size - 1`` are expected; ``None``: a client sets them.
        fusion_threshold: Bytes that are fused into one operation at most; 0 fuses nothing.
        flush_delay: Seconds that ready collectives wait for more to fuse with them; 0 executes at once.
        separate_groups: Whether tensors of a group are fused with each other only.
        scheduling_credit: Bytes of tensors with a priority that are executed at a time; 0 orders all at once, in the order of their
            priorities.
        stall_seconds: Seconds after which (and then how often) a waiting collective is reported; 0 never.
        stall_shutdown: Seconds after which a waiting collective ends its generation; 0 never.
        failure_grace: Seconds that a plane's failure waits for the report that explains it, a rank's death.
        dispute_grace: Seconds that ranks which disagree wait for the others, so that the error names all requests.
        history_bytes: Bytes of the history of events at most.
        hierarchical_allreduce, hierarchical_allgather: Whether ranks on several hosts work within each host first;
            ``None`` chooses.
        tuning: How to tune the parameters above, or ``None``.
        incarnation: How many coordinators of these ranks have died before.
        reattach: Seconds that a successor waits for the ranks of its predecessor.
        pid: The coordinator's process id, which its welcome has for peers, or 0.
        require_encryption: Whether to refuse ranks with data that would travel between hosts in the clear: empty, ``1``, or the
            networks that count as encrypted.
        by_seniority: Whether members of process sets are in the order in which they came into the world, those that came
            at once by their numbers; otherwise by their numbers alone.
    """

    size: int | None = None
    fusion_threshold: int = FUSION_THRESHOLD
    flush_delay: float = 0.0
    separate_groups: bool = False
    scheduling_credit: int = SCHEDULING_CREDIT
    stall_seconds: float = 10.0
    stall_shutdown: float = 0.0
    failure_grace: float = 0.25
    dispute_grace: float = 0.5
    history_bytes: int = HISTORY_BYTES
    hierarchical_allreduce: bool | None = None
    hierarchical_allgather: bool | None = None
    tuning: TuningOptions | None = None
    incarnation: int = 0
    reattach: float = 10.0
    pid: int = 0
    require_encryption: str = ""
    by_seniority: bool = False


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Settings of the server. Times are in seconds, sizes in bytes.

    Attributes:
        token: Secret that the Hello of a rank must show.
        client_token: Secret that the Hello of a client must show, which may post cells to ranks; empty admits no client.
        hello_timeout: Time for a stranger to introduce itself, and for the peer of a closing connection to read its backlog.
        ping_after: Silence after which the server asks a peer for a sign of life.
        dead_after: Silence after which the peer counts as lost, unless it is a process of this host that runs.
        backlog_limit: Bytes that can wait for a peer that does not read, before it is dropped.
        tuning_log: File that samples of the tuner are written to, or empty.
        state: Settings of the state.
    """

    token: str
    client_token: str = ""
    hello_timeout: float = 10.0
    ping_after: float = 5.0
    dead_after: float = 30.0
    backlog_limit: int = 256 * 1024 * 1024
    tuning_log: str = ""
    state: CoordinatorOptions = field(default_factory=CoordinatorOptions)


SOCKET_NAME = "coordinator"
"""Name of the Unix socket in the private directory."""


BACKLOG = 1024
"""Connections that can wait while no coordinator accepts them; the ranks of a lost coordinator all come at once."""


# mkdtemp() adds eight characters to the prefix.
_NAME_LENGTH = len("/hvdlab-abcdefgh/coordinator")


class CoordinatorProcess:
    """Coordinator's process, which runs as long as its starter, or until :meth:`close`.

    It ends by itself at any end of its starter, and removes its directory. If it dies, a starter that keeps
    its sockets can replace it by a successor with :meth:`respawn`.

    Attributes:
        address: Address at which ranks and clients of this host connect (``unix:/path``).
        tls_address: Address at which those of other hosts connect (``tls:host:port``), or ``None``.
        certificate: PEM text that goes with ``tls_address``, or ``None``.
        token: Secret that the Hello of a rank must show.
        client_token: Secret that the Hello of a client must show. No rank gets to know it.
        pid: Process id; another one after :meth:`respawn`.
        incarnation: How many coordinators have died before this one.
        directory: Its private directory.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        launch: CoordinatorLaunch,
        listeners: Listeners,
        ready: CoordinatorReady,
    ) -> None:
        self._process = process
        # With the certificate, so that a successor gets the same one: ranks trust no other.
        self._launch = msgspec.structs.replace(launch, certificate=ready.certificate, key=ready.key)
        #: The listening sockets, which a successor inherits.
        self._listeners = listeners
        #: Held by :meth:`respawn` and :meth:`close`: no successor starts after the end.
        self._changing = threading.Lock()
        #: Whether :meth:`close` was called.
        self._closed = False
        self.directory = Path(launch.directory)
        self.token, self.client_token = launch.token, launch.client_token
        self.address, self.tls_address = listeners.address, listeners.tls_address
        self.certificate = ready.certificate or None

    @classmethod
    def start(
        cls,
        *,
        size: int | None = None,
        directory: Path | None = None,
        tcp_host: str | None = None,
        linger: bool = False,
        keep: bool = False,
        timeout: float = START_WITHIN,
        environ: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> CoordinatorProcess:
        """Start a coordinator and wait until it listens.

        Args:
            size: Number of ranks, if known; otherwise a client sends the ranks to expect.
            directory: Parent of its private directory; by default the system's temporary directory.
            tcp_host: Address on which it listens for ranks of other hosts (TLS), if any.
            linger: Whether it stays, when its starter has ended, until the last rank has gone.
            keep: Whether this process keeps its sockets, for :meth:`respawn`. Ranks that lose the coordinator then wait for a
                successor (three times ``HVDLAB_REATTACH`` seconds), otherwise they give up at once.
            timeout: Seconds for the start.
            environ: Mapping with users' variables; by default this process's environment.
            settings: Other fields of :class:`~hvdlab.collectives.coordinator.process.CoordinatorLaunch`, such as
                ``stall_seconds``; they win over users' variables.

        Raises:
            InvalidRequestError: A variable of the environment has an invalid value.
            StartError: It did not come up; the text has the reason.
        """
        deadline = Deadline(timeout)
        settings = {**settings_from(os.environ if environ is None else environ), **settings}
        private = private_directory(directory)
        launch = CoordinatorLaunch(
            os.urandom(32).hex(),
            os.urandom(32).hex(),
            str(private),
            os.getpid(),
            size=size,
            tcp_host=tcp_host or "",
            linger=linger,
            keeps=keep,
        )
        listeners: Listeners | None = None
        try:
            launch = msgspec.structs.replace(launch, **settings)
            listeners = Listeners(private, launch.tcp_host)
            process, ready = _start(launch, listeners, deadline)
        # Also at an interrupt, which would otherwise leave the sockets and the directory behind.
        except BaseException:
            if listeners is not None:
                listeners.close()
            remove_directory(private)
            raise
        # The coordinator alone has the sockets then: if it dies, ranks are refused at once, instead of waiting for a successor that
        # will not come.
        if not keep:
            listeners.close()
        return cls(process, launch, listeners, ready)

    @classmethod
    def succeed(
        cls, launch: CoordinatorLaunch, listeners: Listeners, timeout: float = START_WITHIN
    ) -> CoordinatorProcess:
        """Start the successor of a coordinator that another process had started, and that has ended.

        Args:
            launch: The settings that the ended coordinator was started with.
            listeners: Its sockets; they belong to the result then.
            timeout: Seconds for the start.

        Raises:
            StartError: The successor did not come up; the caller can try again.
        """
        # The successor ends with this process, no longer with the one that had started its predecessor.
        launch = msgspec.structs.replace(launch, incarnation=launch.incarnation + 1, starter=os.getpid())
        process, ready = _start(launch, listeners, Deadline(timeout))
        return cls(process, launch, listeners, ready)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def incarnation(self) -> int:
        return self._launch.incarnation

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    @property
    def stopped(self) -> bool:
        """Return whether the process exists but is stopped (SIGSTOP, a debugger), so that it answers no peer."""
        return process_state(self.pid) in ("T", "t")

    def ending(self) -> str:
        """Return how it ended (``killed by SIGKILL``, ``exit status 1``); empty as long as it runs."""
        status = self._process.poll()
        if status is None:
            return ""
        if status >= 0:
            return f"exit status {status}"
        try:
            return f"killed by {signal.Signals(-status).name}"
        # Python has names for no real-time signals but the first and the last.
        except ValueError:
            return f"killed by signal {-status}"

    def respawn(self, timeout: float = START_WITHIN, size: int | None = None) -> None:
        """Kill this coordinator, if it still runs, and start a successor on the same sockets, with the same tokens and certificate.

        Ranks and clients that have lost the connection find the successor at the same addresses. It knows only
        the facts that they send it.

        Args:
            timeout: Seconds for the start.
            size: Number of ranks that the successor has to wait for, if no client will send it.

        Raises:
            InvalidRequestError: It was started without ``keep``.
            StartError: The successor did not come up, and the caller can try again; or :meth:`close` was called.
        """
        if not self._launch.keeps:
            raise InvalidRequestError(
                "Only a coordinator that was started with keep=True can have a successor."
            )
        deadline = Deadline(timeout)
        with self._changing:
            if self._closed:
                raise StartError("The coordinator was closed.")
            self._process.kill()
            self._process.wait()  # before its lifeline is cut: at the end of that it could remove the directory
            # Only to close its pipes: each successor would otherwise leave two descriptors open in this process.
            _end(self._process, 0)
            following = msgspec.structs.replace(self._launch, incarnation=self._launch.incarnation + 1)
            launch = following if size is None else msgspec.structs.replace(following, size=size)
            self._process, _ = _start(launch, self._listeners, deadline)
            # After the start: one that fails is tried again under the same number. Without the caller's `size`, which holds for this
            # start alone.
            self._launch = following

    def release(self, timeout: float = 0.2) -> None:
        """Leave the process to itself: one that lingers ends after the last rank, any other now. Idempotent.

        Args:
            timeout: Seconds to wait for its end, so that no zombie is left if it ends at once.
        """
        # First, as in close(): ranks that lose the coordinator later must not wait for a successor.
        self._listeners.close()
        _cut_lifeline(self._process)
        import subprocess

        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        if self._process.poll() is None:
            self._process.returncode = 0  # it stays on purpose; Popen would warn
        if self._process.stdout is not None:
            self._process.stdout.close()

    def close(self, timeout: float = 5) -> None:
        """End the process and remove its directory, if it has left it. Idempotent.

        Args:
            timeout: Seconds that it has to end by itself before it is killed.
        """
        with self._changing:
            self._closed = True
            # First, so that ranks that lose the coordinator do not wait for a successor.
            self._listeners.close()
            _end(self._process, timeout)
        remove_directory(self.directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CoordinatorLaunch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings that the starter sends to the coordinator's process.

    Attributes:
        token: Secret that ranks have to show.
        client_token: Secret that clients have to show.
        directory: Private directory for the socket; the coordinator removes it at its end.
        starter: Process id of the starter.
        size: Number of ranks, or ``None`` if a client will send the ranks to expect.
        tcp_host: Address to listen on for ranks of other hosts, or empty.
        linger: Whether to stay after the starter's end until no rank is connected.
        listener: Descriptor of the listening Unix socket, passed on by the starter.
        tls_listener: Descriptor of the listening socket for other hosts, or -1.
        certificate, key: PEM texts of the predecessor, or empty to make new ones.
        incarnation: How many coordinators have served these sockets before.
        keeps: Whether the starter keeps the sockets for a successor: then the directory stays as long as it lives.
        reattach: Seconds that a successor waits for the ranks of its predecessor.
        stall_disable: Neither report nor end stalled collectives, for all values of the other fields.
        autotune, autotune_log, autotune_*: Whether to tune, the file to log to, and ``TuningOptions``.
        log_level: The least important lines to write to stderr, as ``logging`` counts.
        fusion_threshold, …: See ``ServerOptions`` and ``CoordinatorOptions``.
    """

    token: str
    client_token: str
    directory: str
    starter: int
    size: int | None = None
    tcp_host: str = ""
    linger: bool = False
    listener: int = -1
    tls_listener: int = -1
    certificate: str = ""
    key: str = ""
    incarnation: int = 0
    keeps: bool = False
    reattach: float = 10.0
    fusion_threshold: int = FUSION_THRESHOLD
    flush_delay: float = 0.0
    separate_groups: bool = False
    scheduling_credit: int = SCHEDULING_CREDIT
    stall_disable: bool = False
    stall_seconds: float = 10.0
    stall_shutdown: float = 0.0
    hierarchical_allreduce: bool | None = None
    hierarchical_allgather: bool | None = None
    history_bytes: int = HISTORY_BYTES
    log_level: int = 30
    autotune: bool = False
    autotune_log: str = ""
    autotune_warmup_samples: int = 3
    autotune_steps_per_sample: int = 10
    autotune_max_samples: int = 20
    ping_after: float = 5.0
    dead_after: float = 30.0
    require_encryption: str = ""
    rank_numbers: str = "stable"


class CoordinatorReady(msgspec.Struct, frozen=True):
    """Answer of the coordinator's process: certificate and key of the TLS socket, if there is one, or why it could not start."""

    certificate: str = ""
    key: str = ""
    error: str = ""


def settings_from(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the coordinator's settings from users' environment variables, as fields of :class:`CoordinatorLaunch`.

    Raises:
        InvalidRequestError: Variables have invalid values; the text names them.
    """
    return for_reader(Reader.COORDINATOR, environ)


def state_options(launch: CoordinatorLaunch) -> CoordinatorOptions:
    """Return the settings of the coordinator's state."""
    tuning = None
    if launch.autotune:
        tuning = TuningOptions(
            launch.autotune_warmup_samples,
            launch.autotune_steps_per_sample,
            launch.autotune_max_samples,
        )
    return CoordinatorOptions(
        size=launch.size,
        fusion_threshold=launch.fusion_threshold,
        flush_delay=launch.flush_delay,
        separate_groups=launch.separate_groups,
        scheduling_credit=launch.scheduling_credit,
        stall_seconds=0.0 if launch.stall_disable else launch.stall_seconds,
        stall_shutdown=0.0 if launch.stall_disable else launch.stall_shutdown,
        history_bytes=launch.history_bytes,
        hierarchical_allreduce=launch.hierarchical_allreduce,
        hierarchical_allgather=launch.hierarchical_allgather,
        tuning=tuning,
        incarnation=launch.incarnation,
        reattach=launch.reattach,
        require_encryption=launch.require_encryption,
        by_seniority=launch.rank_numbers == "consecutive",
        pid=os.getpid(),
    )


class Listeners:
    """Listening sockets of a coordinator: a Unix socket, and one for ranks of other hosts if there are any.

    Args:
        directory: Directory of the Unix socket.
        tcp_host: Address to listen on for other hosts, or empty.
        local: The Unix socket, if another process has created it.

    Attributes:
        address: Address at which ranks and clients of this host connect.
        tls_address: Address at which those of other hosts connect, or ``None``.
    """

    def __init__(self, directory: Path, tcp_host: str, local: socket.socket | None = None) -> None:
        path = directory / SOCKET_NAME
        #: The listening socket for other hosts, if there is one.
        self._remote: socket.socket | None = None
        self.tls_address: str | None = None
        #: The one for this host.
        self._local = local or socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if local is None:
                self._local.bind(str(path))
                self._local.listen(BACKLOG)
            if tcp_host:
                family = socket.AF_INET6 if ":" in tcp_host else socket.AF_INET
                self._remote = socket.create_server((tcp_host, 0), family=family, backlog=BACKLOG)
                self.tls_address = str(TlsAddress(tcp_host, self._remote.getsockname()[1]))
        except OSError as error:
            self.close()
            raise StartError(f"The coordinator could not start: {error}") from error
        self.address = str(UnixAddress(str(path)))
        _open.add(self)

    @property
    def descriptors(self) -> tuple[int, int]:
        """Return the descriptors of the two sockets; -1 for one that does not exist."""
        return self._local.fileno(), self._remote.fileno() if self._remote is not None else -1

    def close(self) -> None:
        """Close the sockets; they live on in a coordinator that has them. Idempotent."""
        self._local.close()
        if self._remote is not None:
            self._remote.close()


_open: weakref.WeakSet[Listeners] = weakref.WeakSet()


def _forked() -> None:
    # A child that outlives the starter would keep the sockets open, at which no coordinator accepts any more.
    for listeners in list(_open):
        listeners.close()


os.register_at_fork(after_in_child=_forked)


def remove_directory(directory: Path) -> None:
    """Remove the private directory. Where this process can open no file any more, that works if only a socket is in it."""
    import shutil

    # rmtree() opens the directory; unlink() and rmdir() need no descriptor.
    shutil.rmtree(directory, ignore_errors=True)
    if directory.exists():
        with contextlib.suppress(OSError):
            (directory / SOCKET_NAME).unlink(missing_ok=True)
            directory.rmdir()


def private_directory(parent: Path | None) -> Path:
    """Create a directory that only this user may enter, with a path that leaves room for a socket's name. Raises ``StartError``."""
    import tempfile

    # TMPDIR can be longer than the path in the address of a Unix socket may be; /tmp never is.
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


def _start(
    launch: CoordinatorLaunch, listeners: Listeners, deadline: Deadline
) -> tuple[subprocess.Popen[bytes], CoordinatorReady]:
    """Start the process and wait until it listens. Raises ``StartError``; no process is left then."""
    local, remote = listeners.descriptors
    process = _spawn(tuple(fd for fd in (local, remote) if fd >= 0))
    try:
        # `pass_fds` keeps the numbers that the sockets have here, so the launch can name them.
        launch = msgspec.structs.replace(launch, listener=local, tls_listener=remote)
        return process, _exchange(process, launch, deadline)
    # Also at an interrupt: the coordinator would otherwise run as long as its starter, without any rank.
    except BaseException:
        _end(process, 0)
        raise


def _spawn(descriptors: tuple[int, ...]) -> subprocess.Popen[bytes]:
    import subprocess

    # -P: a directory named like one of ours in the current directory must not be imported instead.
    # A session of its own keeps Ctrl-C in the starter's terminal away from it.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "hvdlab.collectives.coordinator"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        pass_fds=descriptors,
    )


def _exchange(
    process: subprocess.Popen[bytes], launch: CoordinatorLaunch, deadline: Deadline
) -> CoordinatorReady:
    assert process.stdin is not None
    assert process.stdout is not None
    line = b""
    try:
        process.stdin.write(msgspec.json.encode(launch) + b"\n")
        process.stdin.flush()
        output = process.stdout.fileno()
        # Not select(), which fails for descriptors from 1024 on: a starter can have many files open.
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
    ready = msgspec.json.decode(line, type=CoordinatorReady)
    if ready.error:
        raise StartError(f"The coordinator could not start: {ready.error}")
    return ready


def _cut_lifeline(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None and not process.stdin.closed:
        # A coordinator that died before it read its settings leaves them in the buffer, and close() writes that again.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _end(process: subprocess.Popen[bytes], timeout: float) -> None:
    import subprocess

    _cut_lifeline(process)
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
