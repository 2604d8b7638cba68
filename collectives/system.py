"""This host: its processes, its private directories, its addresses, and the position of ranks on it.

Besides, the few calls to Linux for which Python has no function, and NVIDIA's management library.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # CPython's module below ``signal``, which typeshed leaves out
import contextlib
import ctypes
import errno
import fcntl
import hashlib
import importlib
import ipaddress
import logging
import os
import signal
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from hvdlab.collectives.errors import InvalidRequestError, StartError

_CREDENTIALS = struct.Struct("3i")
# Numbers of prctl(2), which Python does not name.
_SET_DEATH_SIGNAL = 1
_SET_NAME = 15
_SET_CHILD_SUBREAPER = 36

logger = logging.getLogger(__name__)


SignalHandler = Callable[[int, FrameType | None], Any] | int | None
"""Handler of a signal; ``None`` stands for one that was not set by Python."""


def signal_handler(number: int) -> SignalHandler:
    """Return the handler of a signal, as :func:`signal.getsignal` does.

    That looks for a member of an enum that is equal to the handler. Of a rank's time for an empty cell this was a fourteenth.
    """
    handler: SignalHandler = _signal.getsignal(number)
    return handler


def set_signal_handler(number: int, handler: SignalHandler) -> SignalHandler:
    """Set the handler of a signal and return the one before, as :func:`signal.signal` does. Main thread only."""
    # CPython's own function knows ``SIG_IGN`` and ``SIG_DFL`` as plain integers only.
    before: SignalHandler = _signal.signal(number, int(handler) if isinstance(handler, int) else handler)
    return before


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int | bytes) -> None:
    # As a long: prctl() reads unsigned longs, and ctypes would pass a number of Python's as a C int.
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    if _libc().prctl(option, argument, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with_parent(parent: int) -> None:
    """Request SIGKILL for this process when its parent ends; end at once if that has happened already.

    The signal comes when the *thread* that forked ends, so the parent must have forked on its main thread.
    """
    _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    # Only after the request: a parent that ends before it causes no signal, one that ends later does.
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the new parent of its orphaned descendants."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def name_process(name: str, title: str) -> None:
    """Show ``name`` (15 bytes at most) in ``ps -e`` and ``top``, ``title`` in ``ps aux``. For readers only."""
    with contextlib.suppress(OSError):
        _prctl(_SET_NAME, name.encode()[:15])
    with contextlib.suppress(OSError, ValueError, IndexError):
        _write_title(title.encode())


def _write_title(title: bytes) -> None:
    # Fields 48 and 49 of proc(5)'s stat are the addresses of the command line in this process's own memory, where the kernel reads it.
    fields = process_status("self")
    # The list begins with field 3, the state.
    start, end = int(fields[45]), int(fields[46])
    room = end - start
    if start and room > 1:
        # To the end of the room: the rest of the old command line would be shown behind the title.
        ctypes.memmove(start, title[: room - 1].ljust(room, b"\0"), room)


def raise_on_hangup(descriptor: int) -> None:
    """Request SIGIO, which ends the process, for the moment when the other end of this pipe is closed."""
    # The receiver before the flag: a hang-up in between would send its signal to no process.
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)


STATE, PARENT, GROUP, SESSION, THREADS, START_TIME, RESIDENT, EXIT_CODE = 0, 1, 2, 3, 17, 19, 21, 49
"""Places in the list that :func:`process_status` returns; see proc(5). The start is in clock ticks since the boot."""


def process_status(pid: int | str, proc: Path = Path("/proc")) -> list[str]:
    """Return the fields of ``/proc/<pid>/stat``, from the state on; empty if there is no such process.

    Args:
        pid: The process, or ``"self"``.
        proc: Tests give a directory of their own.
    """
    try:
        text = (proc / str(pid) / "stat").read_text()
    except OSError:  # also if no descriptor is left
        return []
    # The name before it can hold any character.
    return text.rpartition(")")[2].split()


def process_state(pid: int, proc: Path = Path("/proc")) -> str:
    """Return the letter of a process's state: ``R``, ``S``, ``T`` (stopped), ``Z`` (ended) …; empty if there is none."""
    fields = process_status(pid, proc)
    return fields[STATE] if fields else ""


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Return process id and user at the other end of a connected Unix socket. Raises ``OSError`` where the system does not report them."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        raise OSError("this system does not say whose the other end of a socket is")
    pid, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size))
    return int(pid), int(user)


def require_own_peer(sock: socket.socket) -> int:
    """Return the process id at the other end of a connected Unix socket, if that process may be trusted with secrets.

    The directory of a socket keeps other users out. This check holds also where that directory is another user's, or open to others.
    For the connecting side the other end is the process that began to listen, for the accepting side the one that connected.

    Raises:
        PermissionError: The process belongs neither to this user nor to root.
        OSError: The system does not report the other end.
    """
    pid, user = peer_credentials(sock)
    if user not in (os.geteuid(), 0):
        raise PermissionError(
            errno.EPERM,
            f"the process at the other end of the socket belongs to user {user}, neither to user {os.geteuid()} nor to root",
        )
    return pid


def boot_id() -> str:
    """Return a text that differs between hosts, and changes with each boot; empty where the kernel does not show it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def living_children() -> list[int]:
    """Return the process ids of this process's children, adopted ones included."""
    pid = os.getpid()
    children: list[int] = []
    # By thread: the kernel lists for each the children that it has forked.
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += [int(number) for number in tasks.read_text().split()]
    return children


def open_nvml(purpose: str) -> Any:
    """Return the module ``pynvml``, initialized; the caller ends it with ``nvmlShutdown()``.

    Args:
        purpose: The consequence of its absence, for the log: ``GPUs are not sampled``.

    Returns:
        ``None`` without GPUs, their driver or ``nvidia-ml-py``.
    """
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        logger.debug("%s: %s", purpose, error)
        return None
    return pynvml


def private_parents(environ: Mapping[str, str]) -> list[Path]:
    """Return the places for a private directory, which only the user may enter, the safest first.

    Processes of one user that look for each other choose alike, by :func:`choose_private`: a directory that exists wins over one
    that could be made, and the order is the same for all.

    The user's runtime directory belongs to the user alone. In the temporary directory another user can occupy the name, and
    only that one can remove it; then the directory lies among the user's caches.
    """
    import tempfile  # not above: it is the larger part of the imports of an agent, which seldom needs it

    given = environ.get("XDG_RUNTIME_DIR", "")
    cache = environ.get("XDG_CACHE_HOME", "")
    found = [
        *([Path(given)] if os.path.isabs(given) else []),
        Path(f"/run/user/{os.geteuid()}"),
        Path(tempfile.gettempdir()),
        Path(cache) if os.path.isabs(cache) else Path.home() / ".cache",
    ]
    return list(dict.fromkeys(found))


def private_name() -> str:
    """Return the name of a private directory in each of :func:`private_parents`."""
    return f"hvdlab-{os.geteuid()}"


def choose_private(places: list[Path]) -> Path:
    """Return the first of these directories that is private; without one, the first that can be made, or the last."""
    for usable in (is_private, _can_be_made):
        for place in places:
            if usable(place):
                return place
    return places[-1]


def is_private(path: Path) -> bool:
    """Return whether the path is a directory, and no link, that belongs to this user and is closed to others."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _can_be_made(path: Path) -> bool:
    """Return whether the name is free, in a directory in which other users can't replace a directory of this process."""
    try:
        parent = path.parent.stat()
    except OSError:
        return False
    safe = parent.st_uid in (0, os.geteuid()) and (
        not parent.st_mode & 0o022 or bool(parent.st_mode & stat.S_ISVTX)
    )
    return safe and not os.path.lexists(path) and os.access(path.parent, os.W_OK | os.X_OK)


def open_own_directory(path: Path) -> int:
    """Return a descriptor of a directory that belongs to this user; from now on no other user can write there.

    Raises:
        PermissionError: It belongs to another user.
        OSError: It can't be opened, or is a link.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    # Of the descriptor, not the path: another user can't put a directory of its own in place between check and use.
    status = os.fstat(descriptor)
    try:
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to user {status.st_uid}, not to user {os.geteuid()}")
        if status.st_mode & 0o022:  # made under a lax umask
            os.fchmod(descriptor, 0o700)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def create_private(path: Path, text: str) -> None:
    """Create a file that only this user may read, in a directory of this user's; an existing file or link is not touched.

    Raises:
        FileExistsError: The name exists.
        OSError: As :func:`open_own_directory` does, or the file can't be written.
    """
    directory = open_own_directory(path.parent)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        # In the directory that was checked: its path can lead to another one by now.
        descriptor = os.open(path.name, flags, 0o600, dir_fd=directory)
    finally:
        os.close(directory)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


LOOPBACK = "127.0.0.1"
CHOICES = ("HVDLAB_ADDRESS", "HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME")
"""Variables that choose, the first that is set. Each can hold an address, a network or names of interfaces."""
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # reserved for documentation: to ask which interface leads out


def chosen_address(environ: Mapping[str, str]) -> str | None:
    """Return the address that the environment chooses, or ``None`` if it does not.

    Raises:
        InvalidRequestError: This host has no such address; the text lists those it has.
    """
    for variable in CHOICES:
        text = environ.get(variable, "").strip()
        if text:
            return _resolve(variable, text)
    return None


def interface_address(names: Iterable[str]) -> str:
    """Return the address of the first of these interfaces that this host has. Raises ``InvalidRequestError``."""
    return _resolve("--network-interface", ",".join(names))


def _resolve(variable: str, text: str) -> str:
    if _is_address(text):
        return text
    interfaces = list(_interfaces())
    for piece in (piece.strip() for piece in text.split(",")):
        network = _network(piece)
        for interface, address in interfaces:
            if interface == piece or (network is not None and ipaddress.ip_address(address) in network):
                return address
    have = ", ".join(f"{interface} {address}" for interface, address in interfaces)
    raise InvalidRequestError(
        f"{variable}={text!r} names no address, network or interface of this host ({socket.gethostname()}), which "
        f"has: {have or 'none'}."
    )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    if "/" not in text:
        return None
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _interfaces() -> Iterator[tuple[str, str]]:
    """Yield interfaces and addresses of this host, IPv4 first; link-local ones are left out."""
    import psutil

    found = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for interface, entries in found.items():
            for entry in entries:
                if (
                    entry.family == family
                    and not ipaddress.ip_address(entry.address.split("%")[0]).is_link_local
                ):
                    yield interface, entry.address


def address_towards(host: str) -> str | None:
    """Return the address of this host from which it reaches ``host``, and at which ``host`` reaches it; ``None`` without a route."""
    try:
        # Port 9 stands for any: only the route to the host is asked for.
        candidates = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in candidates:
        try:
            with socket.socket(family, kind, protocol) as sock:
                sock.connect(address)  # of a datagram socket: nothing is sent
                return str(sock.getsockname()[0])
        except OSError:
            continue
    return None


def outward_address(hints: Iterable[str] = ()) -> str:
    """Return an address of this host that other hosts can reach.

    Args:
        hints: Hosts in the network in question, which are tried first; then the host's own name, and an address outside.

    Raises:
        StartError: There is only the loopback interface.
    """
    for host in (*hints, socket.gethostname(), *_ELSEWHERE):
        address = address_towards(host) if host else None
        if address is not None and not is_loopback(address):
            return address
    for _, address in _interfaces():
        if not is_loopback(address):
            return address
    raise StartError(
        f"This host ({socket.gethostname()}) has no address that other hosts could reach; set HVDLAB_ADDRESS to an "
        "address, a network such as 10.1.0.0/16, or an interface (`hvdlab run` has --network-interface)."
    )


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


HOST_VARIABLE = "HVDLAB_HOST"
"""Variable that replaces the name of :func:`host_key`."""


def host_key() -> str:
    """Return a name that processes have in common if and only if they can share memory.

    ``HVDLAB_HOST`` in the environment, if set, is that name: for cases that a process can't detect, such as containers that do
    share memory, or processes that should behave as if they were on different hosts.
    """
    # Read on each call, unlike the rest, which is cached: the variable can be set after the first call.
    return os.environ.get(HOST_VARIABLE, "").strip() or _found_host_key()


@cache
def _found_host_key() -> str:
    """Return the host's name with a digest of the boot (two machines can have one name) and of the namespaces of memory and sockets."""
    parts = [boot_id()]
    # Sockets are found by their paths (mnt), and segments by way of /proc/PID/fd (pid).
    for namespace in ("ipc", "mnt", "pid"):
        try:
            parts.append(str(os.stat(f"/proc/self/ns/{namespace}").st_ino))
        except OSError:
            parts.append("")
    digest = hashlib.blake2b(" ".join(parts).encode(), digest_size=6).hexdigest()
    return f"{socket.gethostname()}#{digest}"


@dataclass(frozen=True, slots=True)
class HostPosition:
    """Position of a rank among the ranks of its host, and among the hosts.

    Attributes:
        local_rank: Its number among the ranks of its host, from 0.
        local_size: Number of ranks on its host.
        cross_rank: Number of its host among those that have a rank with this local rank.
        cross_size: Number of these hosts.
    """

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def host_position(rank: int, ranks: Sequence[int], hosts: Sequence[str]) -> HostPosition:
    """Derive the position from the host of each rank; both are given by position. Hosts are ordered by their first rank.

    ``cross`` counts the hosts that have a rank with this local rank, as Horovod does.
    """
    by_host: dict[str, list[int]] = {}
    for other, host in zip(ranks, hosts, strict=True):
        by_host.setdefault(host, []).append(other)
    own = next((here for here in by_host.values() if rank in here), [rank])
    local_rank = own.index(rank)
    column = [here for here in by_host.values() if len(here) > local_rank] or [own]
    return HostPosition(local_rank, len(own), column.index(own), len(column))


def bind_threads(cores: Sequence[int], local_rank: int, threads: Iterable[threading.Thread]) -> None:
    """Bind threads to the core of this local rank, and with them the threads that they start.

    Without a core for this rank in ``cores``, log a warning and leave the threads alone: where they run is no condition for the results.

    Raises:
        InvalidRequestError: The machine has no core of that number.
    """
    if local_rank >= len(cores):
        logger.warning(
            "HOROVOD_THREAD_AFFINITY names %d cores, and this is local rank %d, whose threads are not bound; name one for each.",
            len(cores),
            local_rank,
        )
        return
    core = cores[local_rank]
    for thread in threads:
        if thread.native_id is None or not thread.is_alive():
            continue
        try:
            os.sched_setaffinity(thread.native_id, {core})
        except OSError as error:
            raise InvalidRequestError(
                f"HOROVOD_THREAD_AFFINITY: core {core} can't be used by local rank {local_rank}: {error.strerror}."
            ) from None


def create_memory(name: str, size: int) -> int:
    """Return a descriptor of nameless shared memory: ``size`` zero bytes that can neither shrink nor grow. The caller closes it.

    Without a name nothing is left behind, however the processes that use it end.

    Raises:
        OSError: No descriptors, no memory, or no memfd on this system.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd")
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        # Without the seals a member that truncates it would make the others die of SIGBUS.
        fcntl.fcntl(
            descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
