"""A rank reports an exception that ends its program: the other ranks learn why it leaves, and a launcher learns which rank
failed first."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import TracebackType

import msgspec

from hvdlab.collectives.errors import AbortedError, HvdlabError

TOPIC = "hvdlab.uncaught"
"""Topic of the mail to clients; its body is :class:`Uncaught` as JSON."""
LONGEST = 300
OUR_FILES = f"{Path(__file__).parents[1]}/"


class Uncaught(msgspec.Struct, frozen=True):
    """What ended a rank's program.

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
    put_back_cause(error)
    lines = traceback.format_exception_only(error)
    line = lines[-1].strip().split("\n", 1)[0] if lines else type(error).__name__
    # Python leaves `builtins.` out, but not the modules of other exceptions.
    head, colon, rest = line.partition(":")
    line = f"{head.rpartition('.')[2]}{colon}{rest}"
    aborted = _in_chain(error)
    culprits = tuple(r for r in aborted.cause.ranks if r != rank) if aborted is not None else ()
    return Uncaught(line if len(line) <= LONGEST else line[: LONGEST - 1] + "…", culprits)


def put_back_cause(error: BaseException) -> None:
    """If a framework's native code has made ``error`` from the text of an error of hvdlab's, make that its ``__cause__``.

    DDP's backward pass waits for collectives in C++, which raises a ``RuntimeError``.
    """
    from hvdlab.collectives import context

    if type(error) is not RuntimeError or error.__cause__ is not None or not context.is_initialized():
        return
    text = str(error)
    for ours in reversed(context.engine().sent_through_native):
        if str(ours).partition("\n")[0] in text:
            error.__cause__ = ours
            return


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
            report(error)
            if isinstance(error, HvdlabError):
                cut_own_frames(trace)
        finally:
            previous(kind, error, trace)

    sys.excepthook = hook
