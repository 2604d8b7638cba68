"""From an exception in a cell to :class:`CellError`."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, TypeVar

import msgspec
from IPython.core.error import StdinNotImplementedError, UsageError

from hvdlab.bindings import step_record
from hvdlab.bindings.framework_hooks import names
from hvdlab.collectives.context import with_own_errors
from hvdlab.collectives.errors import (
    AbortedError,
    CauseKind,
    CollectiveError,
    HvdlabError,
    MismatchError,
    call_name,
)
from hvdlab.kernel_ext.rank.cell_source import label_of
from hvdlab.kernel_ext.wire.cells import CellError
from hvdlab.kernel_ext.wire.codec import wire_text

logger = logging.getLogger(__name__)

_CELL_NAME = re.compile(r"<cell (\[\d+\])(?: #\w+)?>")
"""Matches the name of a numbered cell as a file of code; one that ran before under the same number has a mark."""
_CELL_FILE = re.compile(rf'File "{_CELL_NAME.pattern}", line')
"""Matches a line of a cell as Python's tracebacks name it."""

E = TypeVar("E", bound=BaseException)

LONGEST_VALUE = 64 << 10
LONGEST_LINE = 300
LONGEST_TRACEBACK = 1 << 20
MOST_FRAMES = 60
# Modules in which our own waiting ends up; their frames below one of ours count as ours.
_PLUMBING = frozenset({"threading", "queue", "selectors", "contextlib", "concurrent.futures._base"})


def one_line(error: BaseException) -> str:
    """``ValueError: first line of its text``."""
    text = safe_str(error).strip().split("\n", 1)[0]
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 1] + "…"


def safe_str(error: BaseException) -> str:
    """``str(error)`` whatever its ``__str__`` does, UTF-8 encodable and bounded."""
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001  # a user's __str__ may raise anything
        text = f"<its text could not be made: __str__ raised {type(broken).__name__}>"
    return _clean(text, LONGEST_VALUE)


def describe(shell: Any, error: BaseException, when: int, *, before_exec: bool) -> CellError:
    """Return the description for the pool of ``error``, which ended a cell at ``when`` (``time.monotonic_ns()``).

    Args:
        shell: The InteractiveShell whose settings (``%xmode``, colours) the traceback follows.
        before_exec: Whether the cell failed before its code began to run.
    """
    aborted = _in_chain(error, AbortedError)
    mismatch = _in_chain(error, MismatchError)
    cause = aborted.cause if aborted is not None else None
    decided = _in_chain(error, HvdlabError)
    recorded, wrong = _recorded()
    described = CellError(
        ename=_clean(type(error).__name__, LONGEST_LINE),
        evalue=safe_str(error),
        traceback=tuple(_render(shell, error, before_exec)),
        when=when,
        aborted=aborted is not None,
        collective=call_name(aborted.pending.collective, aborted.pending.name) if aborted is not None else "",
        culprits=cause.ranks if cause is not None else (),
        interrupted=isinstance(error, KeyboardInterrupt),
        mismatch=mismatch is not None,
        syntax=before_exec and isinstance(error, SyntaxError),
        cause=cause.kind.value if cause is not None else "",
        why=_clean(cause.text, LONGEST_VALUE) if cause is not None else "",
        site=_site(error.__traceback__),
        recorded=recorded,
        wrong=wrong,
        decision=decided.decision if decided is not None else 0,
    )
    return sendable(described)


def held_interrupt(error: BaseException) -> BaseException:
    """Return the KeyboardInterrupt in place of the error by which it has ended native code, where it could not be raised itself.

    Args:
        error: What has ended a cell whose interrupt was held. One that is not from a collective is returned as it is.
    """
    error = with_own_errors(error)
    # Whatever it says: the other ranks are interrupted as well, and the first of them to end its cell may be the cause.
    if _in_chain(error, CollectiveError) is None:
        return error
    return KeyboardInterrupt().with_traceback(error.__traceback__)


def interrupt_behind_exit(error: BaseException) -> BaseException:
    """Return the KeyboardInterrupt that code has caught and answered by exiting, as Lightning's Trainer does; any other error as it is."""
    behind = error.__context__
    return behind if isinstance(error, SystemExit) and isinstance(behind, KeyboardInterrupt) else error


def sendable(error: CellError) -> CellError:
    """Return the error itself; if a message can't carry it, one with what matters most of it."""
    try:
        msgspec.msgpack.encode(error)
    except (TypeError, ValueError, OverflowError) as why:
        logger.warning("a part of what is known about %s can't be sent: %s", error.ename, why)
        return CellError(
            ename=wire_text(error.ename),
            evalue=wire_text(error.evalue),
            traceback=tuple(map(wire_text, error.traceback)),
            when=error.when,
            aborted=bool(error.aborted),
            interrupted=bool(error.interrupted),
            mismatch=bool(error.mismatch),
            syntax=bool(error.syntax),
        )
    return error


def _recorded() -> tuple[tuple[str, ...], str]:
    """Return the record that ``hvd.record()`` has made, if it was called."""
    try:
        lines, wrong = step_record.recent()
    except Exception as broken:  # noqa: BLE001  # a device may have failed: the error of the cell comes first
        return (f"what was recorded can't be shown: {one_line(broken)}",), ""
    return tuple(_clean(line, LONGEST_LINE) for line in lines), _clean(wrong, LONGEST_LINE)


def _site(trace: TracebackType | None) -> str:
    """Return the cell's innermost line in a traceback."""
    for link in reversed(_links(trace)):
        code = link.tb_frame.f_code
        if label := label_of(code.co_filename):
            of = "" if code.co_name == "<module>" else f" in {code.co_name}"
            return _clean(f"cell {label} line {link.tb_lineno}{of}", LONGEST_LINE)
    return ""


def _in_chain(error: BaseException | None, kind: type[E]) -> E | None:
    """Return the first exception of a kind among ``error`` and what it came from."""
    # Python keeps circles out of `__context__` alone: `raise a from b` and `raise b from a` make one.
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kind):
            return error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


def _render(shell: Any, error: BaseException, before_exec: bool) -> list[str]:
    """Traceback lines as IPython would show them; falls back to Python's own, then to one line."""
    with contextlib.ExitStack() as hidden:
        left_out = 0
        for link in _chain(error):
            hidden.enter_context(_own_frames_hidden(link))
            left_out += hidden.enter_context(_middle_hidden(link))
        try:
            if _is_consequence(error):
                lines = traceback.format_exception(type(error), error, user_part(error.__traceback__))
            else:
                lines = _render_as_ipython(shell, error, before_exec)
        except Exception:  # noqa: BLE001  # formatting runs the user's __repr__ and __str__
            try:
                lines = traceback.format_exception(type(error), error, user_part(error.__traceback__))
            except Exception:  # noqa: BLE001  # as above
                lines = [one_line(error)]
    if left_out:
        lines.insert(-1, f"[... {left_out} frames in the middle are left out]\n")
    text = [_clean(line, LONGEST_TRACEBACK) for line in lines]
    while len(text) > 2 and sum(map(len, text)) > LONGEST_TRACEBACK:
        del text[len(text) // 2]
    return text


def _is_consequence(error: BaseException) -> bool:
    """Return whether the report is about another rank and says of this one only that it was stopped.

    Python's own traceback has to do then: importing what renders IPython's and rendering it takes a tenth of a second of
    each rank's CPU, which all ranks of a host pay before the cell has ended. ``%tb`` on the rank still shows IPython's.
    """
    return isinstance(error, AbortedError) and error.cause.kind in (
        CauseKind.RANK_DIED,
        CauseKind.CELL_FAILED,
    )


def _render_as_ipython(shell: Any, error: BaseException, before_exec: bool) -> list[str]:
    kind = type(error)
    trace = user_part(error.__traceback__)
    if isinstance(error, SyntaxError):
        calls = [] if before_exec else traceback.extract_tb(trace)
        return list(shell.SyntaxTB.structured_traceback(kind, error, calls))
    if isinstance(error, UsageError):
        return [f"UsageError: {error}"]
    if isinstance(error, SystemExit):
        return [*map(str.rstrip, shell.InteractiveTB.get_exception_only(kind, error)), *_exit_line(trace)]
    custom = getattr(error, "_render_traceback_", None)
    if custom is not None:
        return list(custom())
    if any(isinstance(link, BaseExceptionGroup) for link in _chain(error)):
        # Python ends each entry with a line feed; IPython's entries, which are joined by line feeds, have none.
        lines = (line.removesuffix("\n") for line in traceback.format_exception(kind, error, trace))
        return [_CELL_FILE.sub(r"Cell In\1, line", line) for line in lines]
    return list(shell.InteractiveTB.structured_traceback(kind, error, trace, tb_offset=0))


def _exit_line(trace: TracebackType | None) -> list[str]:
    """Return the line of a cell that called ``sys.exit()``, as IPython would name it; none for an exit elsewhere."""
    frames = traceback.extract_tb(trace)
    if not frames or (cell := _CELL_NAME.fullmatch(frames[-1].filename)) is None:
        return []
    return [f"Cell In{cell[1]}, line {frames[-1].lineno}: {frames[-1].line}"]


def remember(error: BaseException) -> None:
    """Let ``%tb``, ``%debug`` and ``pdb.pm()`` find the error."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, user_part(error.__traceback__)
    if sys.version_info >= (3, 12):
        sys.last_exc = error


def user_part(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the user's first frame on: without those of the runner that called it."""
    start = trace
    while start is not None and is_ours(start.tb_frame):
        start = start.tb_next
    return start


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        link = todo.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        todo += [link.__cause__, link.__context__]


@contextlib.contextmanager
def _own_frames_hidden(error: BaseException) -> Iterator[None]:
    """Cut the traceback below the user's call into hvdlab, for as long as it is shown.

    Only for errors that hvdlab raises on purpose; in others our frames may be what is wrong.
    """
    cut = None
    if isinstance(error, (HvdlabError, KeyboardInterrupt, ValueError, TypeError, StdinNotImplementedError)):
        cut = _last_user_frame(error.__traceback__)
    below = cut.tb_next if cut is not None else None
    if cut is not None:
        cut.tb_next = None
    try:
        yield
    finally:
        if cut is not None:
            # Put back: a debugger that the user starts over this error shows all frames.
            cut.tb_next = below


@contextlib.contextmanager
def _middle_hidden(error: BaseException) -> Iterator[int]:
    """Leave out the middle of a very long traceback, as of a recursion, which IPython takes seconds to format."""
    links = _links(user_part(error.__traceback__))
    if len(links) <= MOST_FRAMES:
        yield 0
        return
    head, tail = links[MOST_FRAMES // 2 - 1], links[-MOST_FRAMES // 2]
    following, head.tb_next = head.tb_next, tail
    try:
        yield len(links) - MOST_FRAMES
    finally:
        head.tb_next = following


def _links(trace: TracebackType | None) -> list[TracebackType]:
    links: list[TracebackType] = []
    while trace is not None:
        links.append(trace)
        trace = trace.tb_next
    return links


def _last_user_frame(trace: TracebackType | None) -> TracebackType | None:
    """Return the frame after which only ours follow (with the plumbing they wait in); None if none of ours do."""
    links = _links(user_part(trace))
    last = len(links)
    while last and is_internal(links[last - 1].tb_frame):
        last -= 1
    hidden = next((i for i in range(last, len(links)) if is_ours(links[i].tb_frame)), len(links))
    return links[hidden - 1] if 0 < hidden < len(links) else None


def is_ours(frame: FrameType) -> bool:
    """Return whether a frame is hvdlab's."""
    return _module(frame).split(".", 1)[0] == "hvdlab"


def is_internal(frame: FrameType) -> bool:
    """Return whether a frame is hvdlab's or one that its waiting and computing ends up in: frameworks below our frames are ours, too."""
    module = _module(frame)
    return is_ours(frame) or module in _PLUMBING or module.split(".", 1)[0] in names()


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _clean(text: str, limit: int) -> str:
    text = wire_text(text)
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters in all)"
