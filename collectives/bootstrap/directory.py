"""A file in a directory that only its user may enter: for ranks of one host, or with a shared file system."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hvdlab.collectives import private
from hvdlab.collectives.errors import StartError

# Polled, since there is no event: a shared file system does not notify a host of what other hosts do.
_FIRST_LOOK, _LAST_LOOK = 0.005, 0.2
_LIMIT = 64 * 1024


class Directory:
    """See :class:`~hvdlab.collectives.bootstrap.board.Board`.

    Args:
        parents: Directories in which ``hvdlab-<user>`` may be made, the best first. Rank 0 takes the first in which that is
            private or can be made; the other ranks look in all.
        key: Name of the job.
        shared: Whether ranks of other hosts have to see it.

    Attributes:
        key: Name of the job, and of its file.
    """

    def __init__(self, parents: Sequence[Path], key: str, *, shared: bool) -> None:
        self._places = [parent / private.name() for parent in parents]
        #: Where this process writes.
        self._directory = private.choose(self._places)
        self.key, self._shared = key, shared
        self._published = False

    def publish(self, data: bytes) -> None:
        self._directory = private.choose(self._places)
        draft = self._directory / f"{self.key}.{os.getpid()}"
        try:
            self._write(draft, data)
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
                return _write(draft, data)
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
        """The newest card in a directory of this user's. If there are several places, those that are not private are passed over."""
        found: list[tuple[int, bytes]] = []
        refused: StartError | None = None
        for place in self._places:
            try:
                found += self._look_in(place)
            except StartError as error:
                refused = refused or error
        if not found and refused is not None and len(self._places) == 1:
            raise refused
        return max(found)[1] if found else None

    def _look_in(self, directory: Path) -> list[tuple[int, bytes]]:
        """The card there, after the time of its making; nothing if there is none."""
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
        """Nothing is kept open."""

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


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())  # for ranks that read it on other hosts


def _require_private(path: Path, status: os.stat_result, kind: object) -> None:
    """Raise ``StartError`` unless only this user can have put there what is there."""
    assert callable(kind)
    if not kind(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise StartError(
            f"{path} is not trusted: it must belong to user {os.geteuid()} alone (mode 0700, no link), but has owner "
            f"{status.st_uid} and mode {stat.filemode(status.st_mode)}. Remove it, or set HVDLAB_RENDEZVOUS_DIR."
        )
