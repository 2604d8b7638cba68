"""Text that is shown: foreign text made harmless for terminals and logs, call sites, ranks in words, and hvdlab's log.

Names of tensors, hosts and cells, and all other text of peers and files, can hold escape sequences that a terminal obeys: they change its
title, clear it, or hide earlier text. Line ends forge lines of a log, and controls of the direction of writing make a text read
differently. Output of a user's own cells is not touched.

A call site is a line of the user's code: frames of hvdlab and of the frameworks are skipped. Cells are compiled under a file name of their own; the code that
compiles them registers a label for it, so that a site reads ``cell [7] line 4``.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterable, Sequence
from types import CodeType, FrameType
from typing import Any, TextIO

_CONTROLS = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # C0, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of writing
    "\u2028\u2029"  # line ends that not all know
    "\ud800-\udfff"  # halves of a character, which can't be written
    "]"
)
# Colours and tabs. The group keeps them in the result of split(), as its odd parts.
_HARMLESS = re.compile("(\x1b\\[[0-9;]*m|\t)")


def visible(text: str, most: int | None = None) -> str:
    """Return one line in which each control character stands as its escape, such as ``\\x1b``.

    Args:
        text: From elsewhere.
        most: Characters that are left of a longer line, the last of them ``…``; ``None`` cuts nothing.
    """
    if most is not None:
        # Before it grows: a peer's text can be long, and an escape has up to six characters.
        text = text[: most + 1]
    if not text.isascii() or not text.isprintable():
        text = _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return text if most is None or len(text) <= most else f"{text[: most - 1]}…"


def visible_lines(text: str) -> str:
    """Return the same for a text of several lines, which stay lines."""
    return "\n".join(visible(line) for line in text.split("\n"))


def visible_coloured(text: str) -> str:
    """Return the same for lines that a program has coloured or indented by tabs, such as a traceback: colours and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        part if number % 2 else visible_lines(part) for number, part in enumerate(_HARMLESS.split(text))
    )


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # src/hvdlab, or an installed hvdlab
_HOME = os.path.join(_PACKAGE, "")
# The rooms can be reached through links, so a code object's file name is compared in both spellings.
_REAL_HOMES = tuple(
    os.path.join(os.path.realpath(os.path.join(_PACKAGE, room)), "")
    for room in ("collectives", "kernel_ext", "magics", "widgets")
    if os.path.isdir(os.path.join(_PACKAGE, room))
)
_CACHE_LIMIT = 8192
"""Entries of each cache below; a full one is emptied. They keep code objects alive, and each cell of a notebook has new ones."""

UNKNOWN_SITE = "<thread>"
"""The site of a call that comes from no line of the user's code, such as one in a hook that a framework's own thread calls."""

_labels: dict[str, str] = {}
# By the identity of code objects: hashing one costs more time than all other steps here. The objects themselves are kept as well, so
# that no other one gets the same identity.
_skip: dict[int, tuple[bool, CodeType]] = {}
_sites: dict[tuple[int, int], tuple[str, CodeType]] = {}


def register_label(filename: str, label: str) -> None:
    """Set the label of code that was compiled under ``filename``: its sites read ``<label> line <n>``."""
    _labels[filename] = label
    # The code can have run under no label, or an earlier one.
    for key in [key for key, (_, code) in _sites.items() if code.co_filename == filename]:
        del _sites[key]


def call_site(depth: int = 1) -> str:
    """Return the innermost frame outside hvdlab and the frameworks, above ``depth`` frames, in words.

    Returns ``cell [7] line 4`` for registered files, ``train.py:12`` otherwise, and ``UNKNOWN_SITE`` if there is no such
    frame.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        known = _skip.get(id(code))
        if not (_is_ours(code) if known is None else known[0]):
            found = _sites.get((id(code), frame.f_lasti))
            return _describe(code, frame.f_lasti, frame.f_lineno) if found is None else found[0]
        frame = frame.f_back
    return UNKNOWN_SITE


def site_of_lines(lines: Iterable[tuple[str, int]]) -> str:
    """Return the site in a stack that a framework keeps: file names and line numbers, the innermost first."""
    for filename, line in lines:
        if not _is_ours_by_name(filename):
            return _in_words(filename, line)
    return UNKNOWN_SITE


def _is_ours(code: CodeType) -> bool:
    if len(_skip) >= _CACHE_LIMIT:
        _skip.clear()  # cells make new code objects for ever
    skip = _is_ours_by_name(code.co_filename)
    _skip[id(code)] = skip, code
    return skip


def _is_ours_by_name(name: str) -> bool:
    return name not in _labels and name.startswith((_HOME, *_REAL_HOMES, *_framework_homes(), "<frozen "))


def _framework_homes() -> tuple[str, ...]:
    homes = []
    # Not kept: a framework can be imported later.
    for package in ("torch", "tensorflow", "keras", "tf_keras", "threading", "concurrent.futures"):
        module = sys.modules.get(package)
        file = getattr(module, "__file__", None)
        if file:
            homes.append(file if package == "threading" else os.path.join(os.path.dirname(file), ""))
    return tuple(homes)


def _describe(code: CodeType, instruction: int, line: int) -> str:
    if len(_sites) >= _CACHE_LIMIT:
        _sites.clear()
    site = _in_words(code.co_filename, line)
    _sites[id(code), instruction] = site, code
    return site


def _in_words(filename: str, line: int) -> str:
    label = _labels.get(filename)
    return f"{label} line {line}" if label else f"{os.path.basename(filename)}:{line}"


# -- ranks in words ----------------------------------------------------------------------------------------------------


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ``[0, 1, 2, 5]`` as ``ranks 0-2,5``, and one rank as ``rank 3``.

    Args:
        ranks: Ranks in ascending order.
    """
    ordered = sorted(set(ranks))
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    return "ranks " + compact_ranks(ordered)


def compact_ranks(ranks: Sequence[int]) -> str:
    """Return ``[0, 1, 2, 5]`` as ``0-2,5``.

    Args:
        ranks: Ranks in ascending order.
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a},{b}" if b == a + 1 else f"{a}-{b}" for a, b in runs)


# -- hvdlab's log ------------------------------------------------------------------------------------------------------


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


def set_up_log(level: int, *, hide_time: bool) -> None:
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
