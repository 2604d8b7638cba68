"""The program that children of a fork server run: its protocol, how it is found by its name, and its modules that are
imported before the fork, so that ranks have them at once and share their memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol, cast

from hvdlab.launch.forkserver.messages import Loaded

PIPE_SIZE = 1 << 20
"""Bytes that fit into a pipe, at most."""


@dataclass(frozen=True, slots=True)
class StdPipes:
    """Two pipes, for stdout and stderr: ``(reading end, writing end)``."""

    out: tuple[int, int]
    err: tuple[int, int]

    @classmethod
    def make(cls) -> StdPipes:
        """Make new pipes, close-on-exec, with the reading ends non-blocking and as much capacity as the system gives."""
        pairs = []
        for _ in range(2):
            reader, writer = os.pipe2(os.O_CLOEXEC)
            # Only the reading end: with a non-blocking writing end, a print into a full pipe would raise
            # instead of waiting.
            os.set_blocking(reader, False)
            # C code may print while it holds the interpreter's lock, and then no thread reads: the more fits, the better.
            # The kernel refuses sizes above fs.pipe-max-size, and any increase once the user's pipes have
            # reached pipe-user-pages-soft.
            with contextlib.suppress(OSError):
                fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
            pairs.append((reader, writer))
        return cls(*pairs)


class Preloads(Protocol):
    """Imports before a fork, and the state of theirs that the fork must not share.

    Attributes:
        required: Modules that every rank needs, in the order in which they are imported. An import error there is a
            broken installation.
    """

    required: Sequence[str]

    def after_required(self) -> None:
        """Prepare the fork server; called once, after the required modules and before those that the user preloads."""

    def usual(self) -> Sequence[str]:
        """Return the frameworks that the fork server imports, if they are installed and the user names no others."""
        ...

    def along_with(self, framework: str) -> Sequence[str]:
        """Return the modules of hvdlab that are imported along with a framework, where they are installed."""
        ...

    def for_training(self) -> Sequence[str]:
        """Return the modules that the imported frameworks import themselves when training begins."""
        ...

    def refresh(self, threads: int) -> None:
        """Reset, in a child, state that a fork must not share: random states, and thread pools sized for one process.

        Args:
            threads: How many threads a rank's libraries may use.
        """
        ...


class ForkedProgram(Preloads, Protocol):
    """The program of ranks, and of ipyparallel's controller beside them.

    The fork server imports the module of a program first: the module has to be light, and to import heavy
    modules in the methods that run in a child.

    Attributes:
        later: Modules that ranks need soon after they have started; imported when the fork server has nothing to do.
    """

    later: Sequence[str]

    def make_area(self) -> int:
        """Return a descriptor of memory that a rank and the fork server share, close-on-exec; -1 for none.

        Raises:
            OSError: Too many files are open.
        """
        ...

    def read_area(self, area: int, stdout: bytes, stderr: bytes) -> bytes | None:
        """Return the remains of an ended rank, for :class:`~hvdlab.launch.forkserver.messages.Exited`.

        Args:
            area: A descriptor of the memory that :meth:`make_area` made.
            stdout, stderr: The rank's output on its descriptors 1 and 2 that it did not read itself.

        Returns:
            The output that the rank left, in an encoding of the program's own. ``None`` if there is nothing: ``stderr`` then counts
            among the rank's last words.
        """
        ...

    def run_rank(self, argv: Sequence[str], pipes: StdPipes, area: int) -> int:
        """Run a rank in a child, according to the environment. Returns the exit code."""
        ...

    def run_controller(self, argv: Sequence[str], channel: int) -> int:
        """Be ipyparallel's controller, in a child. Returns the exit code."""
        ...


def load_program(name: str) -> ForkedProgram:
    """Return the program that ``module:attribute`` names. Raises ``ImportError`` or ``AttributeError`` if there is none."""
    module, _, attribute = name.partition(":")
    return cast("ForkedProgram", getattr(importlib.import_module(module), attribute))


def modules_to_load(program: Preloads, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the user's list ``HVDLAB_PRELOAD`` (names separated by commas), or the usual frameworks that are installed."""
    wanted = environ.get("HVDLAB_PRELOAD")
    if wanted is None:
        return tuple(name for name in program.usual() if _installed(name))
    return tuple(name.strip() for name in wanted.split(",") if name.strip())


def load(program: Preloads, names: Sequence[str]) -> Loaded:
    """Import the program's modules, then these. Failures are in the result and not raised."""
    began = time.monotonic()
    loaded: list[str] = []
    failed: dict[str, str] = {}
    for name in program.required:
        _load_one(name, loaded, failed)
    if not failed:
        program.after_required()
    for name in names:
        _load_one(name, loaded, failed)
        for ours in program.along_with(name) if name in loaded else ():
            if _installed(ours):
                _load_one(ours, loaded, failed)
    return Loaded(tuple(loaded), failed, time.monotonic() - began)


def load_later(name: str) -> None:
    """Import a module ahead of its use; if that fails, the code that uses it gets the error."""
    try:
        importlib.import_module(name)
    # Any error: the module can exist, and yet no descriptor be left to read it.
    except Exception:  # noqa: BLE001
        return


def _load_one(name: str, loaded: list[str], failed: dict[str, str]) -> None:
    try:
        importlib.import_module(name)
    # A module may fail in any way while it is imported; each is an answer here, none may end the fork server.
    except BaseException as error:  # noqa: BLE001
        failed[name] = f"{type(error).__name__}: {error}"
    else:
        loaded.append(name)


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    # ValueError comes for a loaded module without a spec, ImportError for a submodule whose package is
    # missing.
    except (ImportError, ValueError):
        return False
