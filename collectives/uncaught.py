"""Report about an exception that ends a rank's program: launchers learn from it which rank failed first.

:mod:`hvdlab.collectives.context` sends it, which knows the engine.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from types import TracebackType

import msgspec

from hvdlab.collectives.errors import AbortedError

TOPIC = "hvdlab.uncaught"
"""Topic of the mail to clients; its body is :class:`Uncaught` as JSON."""
LONGEST = 300
"""Characters of the report's line; a message can hold a whole array."""
OUR_FILES = f"{Path(__file__).parents[1]}/"


class Uncaught(msgspec.Struct, frozen=True):
    """Exception that ended a rank's program.

    Attributes:
        error: One line, such as ``ValueError: boom``.
        culprits: The other ranks that caused it, if the exception is from a collective that was aborted.
    """

    error: str
    culprits: tuple[int, ...] = ()


def describe(error: BaseException, rank: int) -> Uncaught:
    """Return the report about an exception of this rank."""
    lines = traceback.format_exception_only(error)
    line = lines[-1].strip().split("\n", 1)[0] if lines else type(error).__name__
    # Python leaves `builtins.` out, but not the modules of other exceptions.
    head, colon, rest = line.partition(":")
    line = f"{head.rpartition('.')[2]}{colon}{rest}"
    culprits = tuple(r for r in blamed_ranks(error) if r != rank)
    return Uncaught(line if len(line) <= LONGEST else line[: LONGEST - 1] + "…", culprits)


def blamed_ranks(error: BaseException) -> tuple[int, ...]:
    """Return the ranks that caused the end of the collective behind an exception; none for any other exception."""
    aborted = _in_chain(error)
    return tuple(aborted.cause.ranks) if aborted is not None else ()


def _in_chain(error: BaseException | None) -> AbortedError | None:
    """Return the aborted collective among ``error`` and the errors that led to it."""
    # The chain can be a circle, since users set causes.
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, AbortedError):
            return error
        seen.add(id(error))
        # The chain that a traceback shows.
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def cut_own_frames(trace: TracebackType | None) -> None:
    """End a traceback at the user's line: hvdlab's own frames behind it do not help the user.

    A traceback that has only frames of hvdlab is left alone.
    """
    last = None
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(OUR_FILES):
            last = trace
        trace = trace.tb_next
    if last is not None:
        last.tb_next = None
