"""Failures that are reported elsewhere: of code that only shows something, and of a rank's program.

Those of the former are kept for the views to report, never raised into a cell or written under one. An exception that ends a rank's
program is reported to launchers, which learn from it which rank failed first. :mod:`hvdlab.collectives.context` sends that report, since
it knows the engine.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

from hvdlab.collectives.errors import AbortedError
from hvdlab.collectives.text import visible

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that could not be drawn or computed.

    Attributes:
        what: Its name for the user: ``the lanes``, ``the table of ranks``.
        text: The error in one line.
        trace: Its traceback, for a developer in search of the cause.
        count: How often this has happened.
    """

    what: str
    text: str
    trace: str
    count: int = 1

    def __str__(self) -> str:
        times = "" if self.count == 1 else f" ({self.count} times)"
        return f"{self.what} could not be brought up to date{times}: {visible(self.text)}"


class Failures:
    """Failures so far, the last one of each thing. Any thread.

    A failure stays also when the same thing works again, since the parts missed in between are still missing.

    Args:
        beside: Failures of the data that is shown, which :meth:`all` returns as well.
    """

    def __init__(self, beside: Failures | None = None) -> None:
        self._beside = beside
        self._lock = threading.Lock()
        #: The last failure of each thing, by its name.
        self._known: dict[str, Failure] = {}

    def guard(self, what: str) -> FailureGuard:
        """Return a context manager that keeps an error of its block instead of raising it. Interrupts are raised as always."""
        return FailureGuard(self, what)

    def add(self, what: str, error: BaseException) -> None:
        """Keep this error."""
        # Not above DEBUG: without any set-up, logging writes warnings to stderr, and that is shown under the cell.
        logger.debug("%s failed", what, exc_info=error)
        text = "".join(lines_without_notes(error)).strip().splitlines()[-1]
        with self._lock:
            before = self._known.get(what)
            count = before.count + 1 if before is not None else 1
            self._known[what] = Failure(what, text, "".join(traceback.format_exception(error)), count)

    def all(self) -> tuple[Failure, ...]:
        """Return the failures, in the order in which they first came, after those of ``beside``."""
        others = self._beside.all() if self._beside is not None else ()
        with self._lock:
            return (*others, *self._known.values())


class FailureGuard:
    """Context manager that keeps the error of its ``with`` block. Made by :meth:`Failures.guard`."""

    def __init__(self, failures: Failures, what: str) -> None:
        self._failures, self._what = failures, what

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        # Interrupts are raised as always; ``None`` is the end without an error.
        if not isinstance(error, Exception):
            return False
        self._failures.add(self._what, error)
        return True


def as_messages(failures: Iterable[Failure]) -> list[dict[str, str]]:
    """Return failures as plain values, for a browser: a sentence and the traceback of each."""
    return [{"text": str(one), "trace": one.trace} for one in failures]


UNCAUGHT_TOPIC = "hvdlab.uncaught"
"""Topic of the mail to clients; its body is :class:`Uncaught` as JSON."""
LONGEST_REPORT = 300
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


def lines_without_notes(error: BaseException) -> list[str]:
    """Return the lines of an exception without its traceback; the last one has its text."""
    summary = traceback.TracebackException(type(error), error, None)
    # Notes would come last, and HvdlabError names a decision of the coordinator in one.
    summary.__notes__ = None
    return list(summary.format_exception_only())


def describe_uncaught(error: BaseException, rank: int) -> Uncaught:
    """Return the report about an exception of this rank."""
    lines = lines_without_notes(error)
    line = lines[-1].strip().split("\n", 1)[0] if lines else type(error).__name__
    # Python leaves `builtins.` out, but not the modules of other exceptions.
    head, colon, rest = line.partition(":")
    line = f"{head.rpartition('.')[2]}{colon}{rest}"
    culprits = tuple(r for r in blamed_ranks(error) if r != rank)
    return Uncaught(line if len(line) <= LONGEST_REPORT else line[: LONGEST_REPORT - 1] + "…", culprits)


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
