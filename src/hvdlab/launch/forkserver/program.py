"""What the children of a fork server run: a protocol, and how the fork server finds a program by its name."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol, cast

from hvdlab.launch.forkserver.pipes import StdPipes


class Preloads(Protocol):
    """What is imported before a fork, and what the fork must not share of it.

    Attributes:
        required: Modules that every rank needs, in the order in which they are imported. An import error there is a
            broken installation.
    """

    required: Sequence[str]

    def after_required(self) -> None:
        """Called once in the fork server, after the required modules and before those that the user preloads."""

    def usual(self) -> Sequence[str]:
        """The frameworks that the fork server imports, if they are installed and the user does not say otherwise."""
        ...

    def along_with(self, framework: str) -> Sequence[str]:
        """The modules of hvdlab that are imported along with a framework, where they are installed."""
        ...

    def for_training(self) -> Sequence[str]:
        """What the frameworks that were imported import themselves when training begins."""
        ...

    def refresh(self, threads: int) -> None:
        """Undo, in a child, what a fork must not share: random states, and thread pools sized for one process.

        Args:
            threads: How many threads a rank's libraries may use.
        """
        ...


class ForkedProgram(Preloads, Protocol):
    """The program of ranks, and of ipyparallel's controller beside them.

    The fork server imports the module of a program before anything else: the module has to be light, and to import heavy
    modules in the methods that run in a child.

    Attributes:
        later: Modules that ranks need soon after they have started; imported when the fork server has nothing to do.
    """

    later: Sequence[str]

    def make_area(self) -> int:
        """A descriptor of memory that a rank and the fork server share, close-on-exec; -1 for none.

        Raises:
            OSError: Too many files are open.
        """
        ...

    def read_area(self, area: int, stdout: bytes, stderr: bytes) -> bytes | None:
        """What an ended rank left behind, for :class:`~hvdlab.launch.forkserver.messages.Exited`.

        Args:
            area: A descriptor of the memory that :meth:`make_area` made.
            stdout, stderr: What the rank wrote to its descriptors 1 and 2 and did not read itself.

        Returns:
            What the rank left, in an encoding of the program's own. ``None`` if there is nothing: ``stderr`` then counts
            among the rank's last words.
        """
        ...

    def run_rank(self, argv: Sequence[str], pipes: StdPipes, area: int) -> int:
        """Be a rank, in a child, as the environment says. Returns the exit code."""
        ...

    def run_controller(self, argv: Sequence[str], channel: int) -> int:
        """Be ipyparallel's controller, in a child. Returns the exit code."""
        ...


def load_program(name: str) -> ForkedProgram:
    """The program that ``module:attribute`` names. Raises ``ImportError`` or ``AttributeError`` if there is none."""
    module, _, attribute = name.partition(":")
    return cast("ForkedProgram", getattr(importlib.import_module(module), attribute))
