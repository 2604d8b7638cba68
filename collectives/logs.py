"""Lines of ranks in the logger ``hvdlab`` (membership, planes and aborts, at level INFO), and logs of our processes for their operators."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

from hvdlab.collectives.errors import compact_ranks
from hvdlab.collectives.protocol.messages import Abort, Configure
from hvdlab.collectives.text import visible, visible_coloured

#: The logger of all ranks' lines; applications configure it by this name.
LOG = logging.getLogger("hvdlab")

LONGEST_LINE = 4000
"""Characters of a line for an operator at most: peers choose parts of some lines."""


class _Stderr(logging.StreamHandler[TextIO]):
    """Handler that writes to the ``sys.stderr`` of the moment, since a notebook replaces it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]  # logging's own last resort does it like this
        return sys.stderr


class _Visible(logging.Formatter):
    """Formatter that makes one line of each record, also with line ends in a peer's text; a traceback stands below it."""

    def __init__(self, form: str, datefmt: str | None = None, longest: int | None = None) -> None:
        super().__init__(form, datefmt)
        self._longest = longest

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = visible(record.message, self._longest)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return visible_coloured(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return visible_coloured(super().formatStack(stack_info))


def set_up(level: int, *, hide_time: bool) -> None:
    """Write lines from ``level`` on to stderr, unless the application has configured logging itself.

    A level that the application has given to the logger stands, unless the user asks for another than the default.
    """
    logging.addLevelName(5, "TRACE")
    if level != logging.WARNING or LOG.level == logging.NOTSET:
        LOG.setLevel(level)
    if not LOG.hasHandlers():
        handler = _Stderr()
        time = "" if hide_time else "%(asctime)s "
        handler.setFormatter(_Visible(f"{time}hvdlab %(levelname)s: %(message)s"))
        LOG.addHandler(handler)


def operator_log(process: str, *, level: int = logging.WARNING, journal: str = "") -> logging.Logger:
    """Return the log of one of our processes, one visible line for each record.

    Args:
        process: The process's name, with which lines on stderr begin.
        level: The level from which on lines go to stderr.
        journal: A file that gets the lines of all levels with their times; empty for none. It can be moved or removed meanwhile.
    """
    # Not in the hierarchy, which an application's modules may configure.
    log = logging.Logger(f"hvdlab {process}")  # noqa: LOG001
    on_stderr = _Stderr()
    on_stderr.setLevel(level)
    on_stderr.setFormatter(_Visible(f"{log.name}: %(message)s", longest=LONGEST_LINE))
    log.addHandler(on_stderr)
    if journal:
        # Imported only here: it needs modules that no coordinator has otherwise.
        from logging.handlers import WatchedFileHandler

        in_file = WatchedFileHandler(journal, encoding="utf-8", delay=True)
        in_file.setFormatter(_Visible("%(asctime)s %(message)s", "%F %T", LONGEST_LINE))
        log.addHandler(in_file)
    return log


def configured(rank: int, message: Configure) -> None:
    """Log the new generation of a process set."""
    if not LOG.isEnabledFor(logging.INFO):
        return
    ranks = compact_ranks([member.rank for member in message.members])
    LOG.info(
        "rank %d: %s, generation %d: ranks %s, plane %s",
        rank,
        _set(message.process_set),
        message.generation,
        ranks,
        visible(message.plane),
    )
    note = message.options.get("note")
    if note:
        LOG.info("rank %d: %s", rank, visible(note))


def aborted(rank: int, message: Abort) -> None:
    """Log the end of a generation; calls that wait for its collectives raise an error with the same text."""
    LOG.info(
        "rank %d: %s, generation %d ended (%s): %s",
        rank,
        _set(message.process_set),
        message.generation,
        visible(message.kind),
        visible(message.text),
    )


def lost(rank: int, reason: str) -> None:
    """Log the loss of the coordinator; every collective that waits, or is submitted later, raises an error with this reason."""
    LOG.info("rank %d: %s", rank, visible(reason))


def _set(process_set: int) -> str:
    return f"process set {process_set}" if process_set else "world"
