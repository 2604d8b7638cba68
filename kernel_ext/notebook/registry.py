"""Pools that outlive their notebook: one small file for each, by which another process finds it.

The files lie in a directory that only their user can enter, since they contain the pools' secrets. The first process that
sees a file whose processes have ended removes it. The file names the process that is attached to the pool, with its start
time, so that a kernel that is killed has no lock to give back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from hvdlab.collectives import system
from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.protocol.codec import MALFORMED
from hvdlab.collectives.text import visible
from hvdlab.launch.kept import KeptJob, free_name, in_use, no_such_pool
from hvdlab.launch.processes import open_process, readable, start_time

_LONGEST = 300
"""Characters of a text from a file that are shown at most."""


class Process(msgspec.Struct, frozen=True):
    """A process, and when it started in clock ticks since the boot: a later process may get the same number."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return the process that has this number now."""
        return cls(pid, start_time(pid))

    @property
    def lives(self) -> bool:
        """Return whether it runs; a process that has ended and not been waited for does not."""
        process = open_process(self.pid, self.started) if self.started else -1
        if process < 0:
            return False
        try:
            return not readable(process, 0)
        finally:
            os.close(process)

    def send_signal(self, number: signal.Signals) -> None:
        """Send this very process a signal, unless it has ended.

        Args:
            number: The signal.

        Raises:
            PermissionError: It belongs to another user.
        """
        # By its descriptor: another process can get its number after any look at it.
        process = open_process(self.pid, self.started) if self.started else -1
        if process < 0:
            return
        try:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, number)
        finally:
            os.close(process)


class KeptPoolEntry(msgspec.Struct, frozen=True):
    """A pool that is kept.

    Attributes:
        name: The name that users know it by.
        size, plane: Number of ranks, and the data plane that the user asked for.
        started: When it was started, in seconds since 1970.
        address, token, client_token: Where the coordinator is reached, and its secrets for ranks and for clients.
        directory: The coordinator's private directory.
        coordinator, warm: The processes of the coordinator and of the fork server.
        path: Where the fork server waits for a successor of the pool's process.
        ports: ``MASTER_ADDR`` and ``MASTER_PORT`` of its ranks.
        owner: The process that uses the pool.
        place: The working directory of that process, which shows which notebook it is.
        version: The version of hvdlab that the pool's processes have loaded.
    """

    name: str
    size: int
    plane: str
    started: float
    address: str
    token: str
    directory: str
    coordinator: Process
    warm: Process
    path: str
    ports: tuple[str, int]
    owner: Process
    place: str
    version: str = "of another version"
    client_token: str = ""

    @property
    def lives(self) -> bool:
        """Return whether there is anything left to attach to.

        The owner replaces either process if it ends; if there is no owner, the fork server replaces the coordinator.
        """
        return self.owner.lives or self.warm.lives


class KeptPoolRegistry:
    """Registry of all kept pools, a file for each.

    Args:
        directory: The files' directory; by default in the user's runtime directory, or as :mod:`hvdlab.collectives.system` chooses.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or _default_directory()

    def all(self) -> list[KeptPoolEntry]:
        """Return the pools that live, sorted by name. Removes the files of all others."""
        with self._locked() as there:
            found = self._read_all() if there else []
        if there and not found:
            self._tidy()
        return found

    def get(self, name: str) -> KeptPoolEntry:
        """Return a pool. Raises ``InvalidRequestError`` if there is none of that name."""
        found = self.all()
        for kept in found:
            if kept.name == name:
                return kept
        raise InvalidRequestError(no_such_pool(name, [kept.name for kept in found]))

    def free_name(self, name: str) -> str:
        """Return this name, or a default one; raises ``InvalidRequestError`` if it is taken or no name."""
        return free_name(name, {kept.name for kept in self.all()})

    def claim(self, name: str, place: str) -> KeptPoolEntry:
        """Become the owner of a pool.

        Raises:
            InvalidRequestError: There is none of that name, or another process uses it; the text names the process.
        """
        self.get(name)  # for its error
        # Read again under the lock: of two processes that claim the pool at once, the second must find the first as its owner.
        with self._locked():
            kept = next((kept for kept in self._read_all() if kept.name == name), None)
            if kept is None:
                raise InvalidRequestError(f"the pool `{name}` has just ended")
            if kept.owner.lives:
                raise InvalidRequestError(_in_use(kept))
            kept = msgspec.structs.replace(kept, owner=Process.of(os.getpid()), place=place)
            self._write(kept)
            return kept

    def add(self, kept: KeptPoolEntry) -> KeptPoolEntry:
        """Write the entry of a new pool.

        Args:
            kept: The entry; with an empty name it gets a default one.

        Returns:
            The entry with its name.

        Raises:
            InvalidRequestError: The name is taken, or no name.
            StartError: The file can't be written.
        """
        return self._write_in_directory(kept, new=True)

    def write(self, kept: KeptPoolEntry) -> None:
        """Write the changed entry of a pool. Raises ``StartError`` if the file can't be written."""
        self._write_in_directory(kept, new=False)

    def _write_in_directory(self, kept: KeptPoolEntry, *, new: bool) -> KeptPoolEntry:
        try:
            while (written := self._try_to_write(kept, new=new)) is None:
                pass  # another process has removed the empty directory before this one could lock it
        except OSError as error:
            raise StartError(
                f"the pool can't be kept: {self._directory}: {error.strerror or error}"
            ) from error
        return written

    def _try_to_write(self, kept: KeptPoolEntry, *, new: bool) -> KeptPoolEntry | None:
        for path in (self._directory.parent, self._directory):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked() as there:
            if not there:
                return None
            if new:
                # Under the lock: of two pools that are started with one name at once, the second must find it taken.
                name = free_name(kept.name, {other.name for other in self._read_all()})
                kept = msgspec.structs.replace(kept, name=name)
            self._write(kept)
        return kept

    def release(self, kept: KeptPoolEntry) -> None:
        """Note that the pool has no owner any more."""
        free = msgspec.structs.replace(kept, owner=Process(0, 0), place="")
        try:
            self.write(free)
        except StartError:
            # On a full disk there is no room for a draft, but the pool must not stay in use by a process that has left it. The new
            # text is shorter than the one in the file.
            if not self._overwrite(free):
                raise

    def remove(self, name: str) -> None:
        """Forget a pool. Nothing happens if it is not known."""
        with self._locked() as there:
            if there:
                self._file(name).unlink(missing_ok=True)
        self._tidy()

    # -- files ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the lock on the files; gives False if there is no directory."""
        try:
            lock = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield False
            return
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # A process that found no pools may have removed the directory since it was opened here: a lock on that keeps no process out of
            # the directory that a third one has made in its place.
            there = os.fstat(lock).st_nlink > 0
            if there:
                _check_private(self._directory)
            yield there
        finally:
            os.close(lock)

    def _read_all(self) -> list[KeptPoolEntry]:
        found: list[KeptPoolEntry] = []
        for path in self._directory.glob("*.json"):
            try:
                kept = msgspec.json.decode(path.read_bytes(), type=KeptPoolEntry)
            except (OSError, *MALFORMED):
                continue
            if kept.lives:
                found.append(kept)
                continue
            # A process could not attach to it any more: end the rest of the pool, and remove its files.
            path.unlink(missing_ok=True)
            for process in (kept.coordinator, kept.warm):
                _end(process)
            shutil.rmtree(kept.directory, ignore_errors=True)
        return sorted(found, key=lambda kept: kept.name)

    def _write(self, kept: KeptPoolEntry) -> None:
        path = self._file(kept.name)
        # Not `.json`: a draft that a killed process has left must not be read as an entry.
        draft = path.with_suffix(f".{os.getpid()}")
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(kept))
            draft.rename(path)  # at once: a reader sees the old entry or the new one, never half of one
        finally:
            draft.unlink(missing_ok=True)  # it is there only if something above has failed

    def _overwrite(self, kept: KeptPoolEntry) -> bool:
        """Write a pool over its own file, which takes no more room. Returns whether that was possible."""
        data = msgspec.json.encode(kept)
        try:
            with self._locked() as there, open(self._file(kept.name), "r+b") as file:
                size = os.fstat(file.fileno()).st_size
                if not there or len(data) > size:
                    return False
                file.write(data.ljust(size))  # blanks behind a JSON text are part of it
        except OSError:
            return False
        return True

    def _file(self, name: str) -> Path:
        return self._directory / f"{name}.json"

    def _tidy(self) -> None:
        # Under the lock: a process that holds it is about to write.
        with contextlib.suppress(OSError), self._locked() as there:  # others are in it
            if there:
                self._directory.rmdir()
                self._directory.parent.rmdir()


def _in_use(kept: KeptPoolEntry) -> str:
    """Return a sentence on the process that uses the pool, with a remedy."""
    if kept.owner.pid == os.getpid():
        return f"the pool `{kept.name}` is in use by this very process"
    return in_use(kept.name, user_of(kept))


def user_of(kept: KeptPoolEntry) -> str:
    """Return the process that uses the pool, in a few words."""
    return f"process {kept.owner.pid} in {visible(kept.place, _LONGEST)}" if kept.owner.lives else "nobody"


def table(pools: Sequence[KeptPoolEntry], elsewhere: Sequence[KeptJob] = ()) -> str:
    """Return a table of kept pools, for users to read.

    Args:
        pools: Pools that are kept on this host.
        elsewhere: Pools that their launchers keep. If there are any, a column names the launcher of each pool.
    """
    if not pools and not elsewhere:
        return "no pool is kept; `%hvd_pool start --keep NAME` in a notebook starts one"
    entries = [
        *((kept.name, kept.size, "local", kept.plane, kept.started, user_of(kept)) for kept in pools),
        *(
            (
                job.name,
                job.size,
                job.launcher,
                job.plane,
                job.started,
                "nobody" if job.owner is None else str(job.owner),
            )
            for job in elsewhere
        ),
    ]
    rows = [("name", "ranks", "launcher", "plane", "started", "in use by")]
    for name, size, launcher, plane, began, user in entries:
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(began))
        rows.append((visible(name, _LONGEST), str(size), launcher, visible(plane, _LONGEST), started, user))
    shown = [cells if elsewhere else [*cells[:2], *cells[3:]] for cells in map(list, rows)]
    widths = [max(len(row[i]) for row in shown) for i in range(len(shown[0]))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in shown
    )


def _default_directory() -> Path:
    return (
        system.choose_private(
            [parent / system.private_name() for parent in system.private_parents(os.environ)]
        )
        / "pools"
    )


def _check_private(directory: Path) -> None:
    """Raise ``StartError`` if other users could read or replace files there."""
    for path in (directory, directory.parent):
        if not system.is_private(path):
            raise StartError(
                f"{path} must belong to you and be closed to others (mode 0700), since it keeps secrets of pools; "
                "remove it, or set XDG_RUNTIME_DIR to a directory of yours"
            )


def _end(process: Process) -> None:
    """End a process that is left of a pool that can't be used any more."""
    with contextlib.suppress(PermissionError):
        process.send_signal(signal.SIGTERM)
