"""Failures of code that only shows something: kept for the views to report, never raised into a cell or written under one."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType

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
        text = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
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
