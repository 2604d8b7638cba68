"""Where rank 0 publishes the coordinator's address and secret: a directory, torch's TCP store, or a broadcast of MPI.

``MPI_Init`` of another MPI than the launcher's ends the process, or makes a world of one. So :func:`mpi_mismatch` compares them before.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import operator
import os
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from hvdlab.collectives import system
from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.rendezvous.launchers import Meeting, detect
from hvdlab.collectives.time_limits import Deadline


class RendezvousBackend(Protocol):
    """Place that all ranks of a job can see, and that is closed to all other processes as far as possible."""

    def publish(self, data: bytes) -> None:
        """Show ``data`` in place of the previous data. Raises ``StartError`` if that can't be done."""

    def read(self, seconds: float) -> bytes | None:
        """Return the published data; ``None`` if none comes within ``seconds``. Raises ``StartError`` if it can't be read."""

    def pause(self, seconds: float) -> None:
        """Wait up to ``seconds`` for other data than those that are there. Can return too early."""

    def withdraw(self) -> None:
        """Remove the data that :meth:`publish` showed. Does not raise."""

    def close(self) -> None:
        """Free the resources of :meth:`read`. Does not raise; idempotent."""

    @property
    def place(self) -> str:
        """Return the place in words, for error texts."""
        ...

    @property
    def advice(self) -> str:
        """Return advice to the user if nothing appears though rank 0 runs."""
        ...


# Polled, since there is no event: a shared file system does not notify a host of changes by other hosts.
_FIRST_LOOK, _LAST_LOOK = 0.005, 0.2
_LIMIT = 64 * 1024
"""Bytes of a published file that are read at most."""


class DirectoryBackend:
    """Backend for ranks of one host, or with a shared file system: a file in a directory that only its user may enter.

    Args:
        parents: Directories in which ``hvdlab-<user>`` may be made, the best first. Rank 0 uses the first in which that is
            private or can be made; the other ranks search all.
        key: Name of the job.
        shared: Whether ranks of other hosts have to see it.

    Attributes:
        key: Name of the job, and of its file.
    """

    def __init__(self, parents: Sequence[Path], key: str, *, shared: bool) -> None:
        self._places = [parent / system.private_name() for parent in parents]
        #: Where this process writes.
        self._directory = system.choose_private(self._places)
        self.key, self._shared = key, shared
        self._published = False

    def publish(self, data: bytes) -> None:
        self._directory = system.choose_private(self._places)
        draft = self._directory / f"{self.key}.{os.getpid()}"
        try:
            self._write(draft, data)
            # Only when it is whole: other ranks read the data before or all of these.
            draft.rename(self._directory / self.key)
        except BaseException as error:
            with suppress(OSError):
                draft.unlink()
            if isinstance(error, OSError):
                raise StartError(f"Rank 0 can't tell the others where the coordinator is: {error}") from error
            raise
        self._published = True

    def _write(self, draft: Path, data: bytes) -> None:
        with suppress(OSError):
            draft.unlink()  # left by a process that had this one's number, and was killed
        for last in (False, False, True):
            try:
                self._enter()
                return _write_new(draft, data)
            except FileNotFoundError:  # removed by a job that has just started
                if last:
                    raise

    def _enter(self) -> None:
        """Make the directory, or make sure that it belongs to this user alone."""
        self._directory.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self._directory.mkdir(mode=0o700)
        _require_private(self._directory, os.lstat(self._directory), stat.S_ISDIR)

    def read(self, seconds: float) -> bytes | None:
        until = time.monotonic() + seconds
        pause = _FIRST_LOOK
        while (data := self._look()) is None and (left := until - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LAST_LOOK)
        return data

    def _look(self) -> bytes | None:
        """Return the newest data in a directory of this user's. If there are several places, those that are not private are passed over."""
        found: list[tuple[int, bytes]] = []
        refused: StartError | None = None
        for place in self._places:
            try:
                found += self._look_in(place)
            except StartError as error:
                refused = refused or error
        if not found and refused is not None and len(self._places) == 1:
            raise refused
        # By the time of writing: rank 0 and this rank can prefer different places, and an older job's file can be in another one.
        return max(found)[1] if found else None

    def _look_in(self, directory: Path) -> list[tuple[int, bytes]]:
        """Return the data there, after the time of their making; nothing if there are none."""
        path = directory / self.key
        try:
            _require_private(directory, os.lstat(directory), stat.S_ISDIR)
            if self._shared and path.name not in os.listdir(directory):
                return []  # NFS may remember for a minute that a file is not there, unless asked for the directory
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise StartError(f"Rank 0's announcement in {path} can't be read: {error}") from error
        with open(descriptor, "rb") as file:
            # Of the open file: the path may lead to another one by now.
            status = os.fstat(file.fileno())
            _require_private(path, status, stat.S_ISREG)
            return [(status.st_mtime_ns, file.read(_LIMIT))]

    def pause(self, seconds: float) -> None:
        time.sleep(min(seconds, _LAST_LOOK))

    def withdraw(self) -> None:
        if self._published:
            self._published = False
            with suppress(OSError):
                (self._directory / self.key).unlink()
            with suppress(OSError):  # not empty: other jobs are starting
                self._directory.rmdir()

    def close(self) -> None:
        """Do nothing: no file is kept open."""

    @property
    def place(self) -> str:
        return " or ".join(str(place / self.key) for place in self._places)

    @property
    def advice(self) -> str:
        if self._shared:
            return (
                "If that is not on a file system that all hosts share, set HVDLAB_RENDEZVOUS_DIR to a directory that "
                "is, or MASTER_ADDR and MASTER_PORT to rank 0's host and a free port of it."
            )
        return "If ranks have different runtime and temporary directories, set HVDLAB_RENDEZVOUS_DIR to one that they share."


def _write_new(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # for ranks that read it on other hosts


def _require_private(path: Path, status: os.stat_result, kind: object) -> None:
    """Raise ``StartError`` unless only this user can have put the entry there."""
    assert callable(kind)
    if not kind(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise StartError(
            f"{path} is not trusted: it must belong to user {os.geteuid()} alone (mode 0700, no link), but has owner "
            f"{status.st_uid} and mode {stat.filemode(status.st_mode)}. Remove it, or set HVDLAB_RENDEZVOUS_DIR."
        )


_PAUSE = 0.2
"""Seconds between two reads of a store that has an earlier job's data."""


class TcpStoreBackend:
    """Backend of a key of ``torch.distributed``'s TCP store, which torchrun's ranks, and those with MASTER_ADDR, can all reach.

    torchrun's agent serves the store itself. Otherwise rank 0 does, in a way that lets ``init_process_group`` use the same
    port afterwards. As with ``init_process_group``, any process that reaches the port while the job starts can read the store.

    Args:
        environ: Has ``MASTER_ADDR`` and ``MASTER_PORT``.
        key: Name of the job.
        serve: Whether this rank serves the store, unless torchrun's agent does.
        deadline: Limit for finding the store.

    Attributes:
        of_rank_0: Whether rank 0 serves the store, which then ends when rank 0 closes it.

    Raises:
        StartError: There is no PyTorch here, or the store can't be reached in time.
    """

    def __init__(self, environ: Mapping[str, str], key: str, *, serve: bool, deadline: Deadline) -> None:
        self._host, self._port = environ["MASTER_ADDR"], _port(environ)
        self._key = f"hvdlab/{key}"
        self.of_rank_0 = environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._store: Any = self._open(serve and self.of_rank_0, deadline)
        self._published = False

    def _open(self, serve: bool, deadline: Deadline) -> Any:
        import torch.distributed as dist

        limit = timedelta(seconds=max(1.0, deadline.remaining() or 0.0))
        try:
            # With multi_tenant another store of this process, that of `init_process_group()`, can use the same port.
            return dist.TCPStore(  # type: ignore[attr-defined]  # torch imports it without exporting it
                self._host, self._port, None, serve, limit, wait_for_workers=False, multi_tenant=True
            )
        except (RuntimeError, ValueError, OSError) as error:
            what = f"Rank 0 can't serve {self.place}"
            if not serve:
                what = (
                    f"This rank has not reached {self.place} within {deadline.seconds:g} s: rank 0 has not come to "
                    "hvd.init(), has ended, or is not to be reached there"
                )
            raise StartError(f"{what} ({_first_line(error)}). {self.advice}") from error

    def publish(self, data: bytes) -> None:
        try:
            self._store.set(self._key, data)
        except RuntimeError as error:
            raise StartError(
                f"{self.place} does not take rank 0's announcement: {_first_line(error)}"
            ) from error
        self._published = True

    def read(self, seconds: float) -> bytes | None:
        import torch.distributed as dist

        try:
            self._store.wait([self._key], timedelta(seconds=max(0.01, seconds)))
            return bytes(self._store.get(self._key))
        except dist.DistStoreError:  # not there within this time
            return None
        except RuntimeError as error:
            raise StartError(
                f"{self.place} is gone ({_first_line(error)}): rank 0 has ended, or torchrun's agent."
            ) from error

    def pause(self, seconds: float) -> None:
        time.sleep(min(seconds, _PAUSE))

    def withdraw(self) -> None:
        if self._published and self._store is not None:
            self._published = False
            # The store can have ended with the process that serves it, and the secret with the store.
            with suppress(RuntimeError):
                self._store.delete_key(self._key)

    def close(self) -> None:
        self._store = None

    @property
    def place(self) -> str:
        return f"the store at {self._host}:{self._port}"

    @property
    def advice(self) -> str:
        return (
            "MASTER_ADDR must be an address of rank 0's host that all others reach, and MASTER_PORT a port that is "
            "free there and open between the hosts."
        )


def store_usable(environ: Mapping[str, str]) -> bool:
    """Return whether the environment names a store, and PyTorch is installed to use it."""
    named = bool(environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"))
    return named and importlib.util.find_spec("torch") is not None


def _port(environ: Mapping[str, str]) -> int:
    text = environ["MASTER_PORT"]
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise InvalidRequestError(f"MASTER_PORT={text!r} is no port.")
    return int(text)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")


_POLL_SECONDS = 0.001
"""Seconds between two polls of MPI, which has no event for a broadcast's end."""


class MpiBackend:
    """Backend for ranks of several hosts that an MPI launcher started: one broadcast, in which all ranks take part.

    Raises:
        StartError: MPI can't be started in time.
    """

    def __init__(self, rank: int, size: int, deadline: Deadline) -> None:
        self._deadline = deadline
        self._data: bytes | None = None
        self._comm = _initialized(deadline)
        if (self._comm.rank, self._comm.size) != (rank, size):
            raise StartError(
                f"The launcher says rank {rank} of {size}, but mpi4py's MPI rank {self._comm.rank} of "
                f"{self._comm.size}: mpi4py was built for another MPI than the launcher's. Install the mpi4py that "
                "goes with it, or set HVDLAB_RENDEZVOUS_DIR to a directory that all hosts share."
            )

    def publish(self, data: bytes) -> None:
        import numpy as np

        # Two broadcasts: the receivers have to allocate a buffer of the right length for the second one.
        self._broadcast(np.array([len(data)], np.int64))
        self._broadcast(np.frombuffer(data, np.uint8).copy())

    def read(self, seconds: float) -> bytes | None:
        # Kept: all ranks have their part in the broadcast once, so a second receive would wait for ever.
        if self._data is None:
            import numpy as np

            length = np.zeros(1, np.int64)
            self._broadcast(length)
            received = np.zeros(int(length[0]), np.uint8)
            self._broadcast(received)
            self._data = received.tobytes()
        return self._data

    def _broadcast(self, array: Any) -> None:
        """Broadcast rank 0's array to all. MPI keeps it if this is given up: there is no call that cancels a broadcast."""
        from hvdlab.collectives.planes.host import leave_to_library

        requests: list[Any] = []
        try:
            # Beginning the operation and noting it are one step of the interpreter: an interrupt can't come in between.
            requests.extend(map(operator.call, (functools.partial(self._comm.Ibcast, array, 0),)))
            while not requests[0].Test():
                if self._deadline.expired:
                    raise StartError(
                        f"MPI did not bring rank 0's announcement to all within {self._deadline.seconds:g} s: some ranks "
                        "have not come to hvd.init(), or have ended."
                    )
                time.sleep(_POLL_SECONDS)
        except BaseException:
            leave_to_library(*requests, array)
            raise

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def withdraw(self) -> None:
        """Do nothing: a broadcast leaves nothing behind."""

    def close(self) -> None:
        """Leave MPI running: the data plane may use it."""

    @property
    def place(self) -> str:
        return "MPI's broadcast"

    @property
    def advice(self) -> str:
        return "If the hosts do not reach each other's addresses, choose others by HVDLAB_ADDRESS."


def _initialized(deadline: Deadline) -> Any:
    """Return MPI's world.

    ``MPI_Init`` returns when all ranks have called it, and mpi4py would keep the interpreter locked meanwhile. So a thread of its own
    calls it, past mpi4py; that thread is left behind if time is over.
    """
    import mpi4py

    # mpi4py finalizes only an MPI that it has initialized, unless asked to; launchers end the job of a rank
    # that exits without.
    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise StartError(f"mpi4py can't load its MPI library: {error}") from error
    if not MPI.Is_initialized():
        library = ctypes.CDLL(MPI.__file__)
        provided = ctypes.c_int()
        arguments = (None, None, ctypes.c_int(MPI.THREAD_MULTIPLE), ctypes.byref(provided))
        thread = threading.Thread(
            target=library.MPI_Init_thread, args=arguments, name="hvdlab-mpi-init", daemon=True
        )
        thread.start()
        thread.join(deadline.remaining())
        if thread.is_alive():
            raise StartError(
                f"MPI did not start within {deadline.seconds:g} s: some ranks have not come to hvd.init(), or have "
                "ended without telling mpiexec."
            )
    return MPI.COMM_WORLD


_ROOM = 64 * 1024  # for the text; the longest MPI_MAX_LIBRARY_VERSION_STRING known is 8192


def mpi_works(environ: Mapping[str, str]) -> bool:
    """Return whether ranks reach each other by MPI: its launcher has started several, and mpi4py has the library for it."""
    return started_by_mpi(environ) and mpi_mismatch(environ) is None


def started_by_mpi(environ: Mapping[str, str]) -> bool:
    """Return whether an MPI launcher has started this process as one of several."""
    launched = detect(environ)
    return launched is not None and launched.size > 1 and launched.launcher.meeting is Meeting.MPI


def mpi_mismatch(environ: Mapping[str, str]) -> str | None:
    """Return why mpi4py's library can't be used under the launcher that started this process; ``None`` if it may be usable."""
    launched = detect(environ)
    if launched is None or not launched.launcher.libraries:
        return None
    library = mpi_version()
    if library is None:
        return "mpi4py is not installed, or finds no MPI library"
    if any(name in library for name in launched.launcher.libraries):
        return None
    return (
        f"{launched.launcher.name} started the ranks, but mpi4py uses {library.splitlines()[0].split(',')[0]}"
    )


@functools.cache
def mpi_version() -> str | None:
    """Return the version text of the MPI library; ``None`` without one. Neither initializes MPI nor imports mpi4py's module."""
    try:
        spec = importlib.util.find_spec("mpi4py.MPI")
        if spec is None or spec.origin is None:
            return None
        library = ctypes.CDLL(spec.origin)
        text, length = ctypes.create_string_buffer(_ROOM), ctypes.c_int()
        library.MPI_Get_library_version(text, ctypes.byref(length))
    # AttributeError: a library from before MPI 3 does not have this function.
    except (ImportError, RuntimeError, OSError, AttributeError):
        return None
    return text.value.decode(errors="replace")
