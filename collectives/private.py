"""Directories that only this process's user may enter, in places where another user can't take the name first, or not all of them.

Processes of one user that look for each other choose alike: a directory that exists wins over one that could be made, and
the order is the same for all.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path


def parents(environ: Mapping[str, str]) -> list[Path]:
    """Where a private directory may be made, the safest place first.

    The user's runtime directory belongs to the user alone. In the temporary directory another user may have taken the name, and
    only that one can remove it; then the directory lies among the user's caches.
    """
    given = environ.get("XDG_RUNTIME_DIR", "")
    cache = environ.get("XDG_CACHE_HOME", "")
    found = [
        *([Path(given)] if os.path.isabs(given) else []),
        Path(f"/run/user/{os.geteuid()}"),
        Path(tempfile.gettempdir()),
        Path(cache) if os.path.isabs(cache) else Path.home() / ".cache",
    ]
    return list(dict.fromkeys(found))


def name() -> str:
    """The name of a private directory in each of these."""
    return f"hvdlab-{os.geteuid()}"


def choose(places: list[Path]) -> Path:
    """The first of these directories that is private, else the first that can be made, else the last."""
    for usable in (is_private, _can_be_made):
        for place in places:
            if usable(place):
                return place
    return places[-1]


def is_private(path: Path) -> bool:
    """Whether this is a directory, and no link, that belongs to this user and is closed to others."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def _can_be_made(path: Path) -> bool:
    """Whether the name is free, in a directory in which other users can't replace what this process makes."""
    try:
        parent = path.parent.stat()
    except OSError:
        return False
    safe = parent.st_uid in (0, os.geteuid()) and (
        not parent.st_mode & 0o022 or bool(parent.st_mode & stat.S_ISVTX)
    )
    return safe and not os.path.lexists(path) and os.access(path.parent, os.W_OK | os.X_OK)


def open_own(path: Path) -> int:
    """A descriptor of a directory that belongs to this user; from now on no other user can write there.

    Raises:
        PermissionError: It belongs to another user.
        OSError: It can't be opened, or is a link.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
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


def create(path: Path, text: str) -> None:
    """Make a file that only this user may read, in a directory of this user's; a file or link that is there is not touched.

    Raises:
        FileExistsError: There is something of that name.
        OSError: As :func:`open_own` does, or the file can't be written.
    """
    directory = open_own(path.parent)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path.name, flags, 0o600, dir_fd=directory)
    finally:
        os.close(directory)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
