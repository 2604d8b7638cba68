"""A rank reports an exception that ends its program: the other ranks learn why it leaves, and a launcher learns which rank
failed first."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from hvdlab.collectives.errors import AbortedError, CollectiveError, HvdlabError

TOPIC = "hvdlab.uncaught"
"""Topic of the mail to clients; its body is :class:`Uncaught` as JSON."""
LONGEST = 300
OUR_FILES = f"{Path(__file__).parents[1]}/"


class Uncaught(msgspec.Struct, frozen=True):
    """Exception that ended a rank's program.

    Attributes:
        error: One line, such as ``ValueError: boom``.
        culprits: The other ranks that caused it, if the exception is from a collective that was aborted.
    """

    error: str
    culprits: tuple[int, ...] = ()


def report(error: BaseException) -> None:
    """Let clients and other ranks know that this exception is about to end the program."""
    from hvdlab.collectives import context

    if not context.is_initialized():
        return
    engine = context.engine()
    said = describe(error, engine.rank)
    engine.farewell = said.error
    engine.post(TOPIC, msgspec.json.encode(said))


def describe(error: BaseException, rank: int) -> Uncaught:
    """The report about an exception of this rank."""
    lines = traceback.format_exception_only(error)
    line = lines[-1].strip().split("\n", 1)[0] if lines else type(error).__name__
    # Python leaves `builtins.` out, but not the modules of other exceptions.
    head, colon, rest = line.partition(":")
    line = f"{head.rpartition('.')[2]}{colon}{rest}"
    culprits = tuple(r for r in blamed_ranks(error) if r != rank)
    return Uncaught(line if len(line) <= LONGEST else line[: LONGEST - 1] + "…", culprits)


def blamed_ranks(error: BaseException) -> tuple[int, ...]:
    """Return the ranks whose failure ended the collective that raised an exception; none for any other exception."""
    aborted = _in_chain(error)
    return tuple(aborted.cause.ranks) if aborted is not None else ()


E = TypeVar("E", bound=BaseException)


def own_error(error: E) -> E | CollectiveError:
    """hvdlab's own error, if a framework's native code has made ``error`` of its text; else ``error``.

    C++ that waits for collectives, as DDP's does, raises a ``RuntimeError`` with the text of ours, words of its own before that and a stack of
    hvdlab's frames behind it. Each own error comes back once, with the traceback and the context of what it replaces.
    """
    from hvdlab.collectives import context

    if type(error) is not RuntimeError or not context.is_initialized():
        return error
    sent, text = context.engine().sent_through_native, str(error)
    for own in reversed(list(sent)):  # a copy, since other threads add to it
        if str(own).partition("\n")[0] in text:
            sent.remove(own)
            own.__cause__, own.__context__ = error.__cause__, error.__context__
            own.__suppress_context__ = error.__suppress_context__
            return own.with_traceback(error.__traceback__)
    return error


def with_own_errors(error: BaseException) -> BaseException:
    """The same, also for all that ``error`` came from: what users get to see, and what programs end with."""
    first = link = own_error(error)
    seen = {id(first)}
    while True:
        before = link.__cause__ or link.__context__
        if before is None or id(before) in seen:
            return first
        own = own_error(before)
        if own is not before and link.__cause__ is not None:
            link.__cause__ = own
        elif own is not before:
            link.__context__ = own
        link = own
        seen.add(id(link))


def _in_chain(error: BaseException | None) -> AbortedError | None:
    """The aborted collective among ``error`` and what it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, AbortedError):
            return error
        seen.add(id(error))
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


def watch() -> None:
    """Have :func:`report` called for uncaught exceptions from now on."""
    previous = sys.excepthook
    if getattr(previous, "__module__", "") == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            own = with_own_errors(error)
            if own is not error:
                kind, error, trace = type(own), own, own.__traceback__
            report(error)
            if isinstance(error, HvdlabError):
                cut_own_frames(trace)
        finally:
            previous(kind, error, trace)

    sys.excepthook = hook
