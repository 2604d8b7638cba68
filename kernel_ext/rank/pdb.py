"""Debuggers in a rank: ``breakpoint()``, ``pdb``, IPython's, and the one that looks at what has failed."""

from __future__ import annotations

import bdb
import gc
import os
import re
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from IPython.core.error import StdinNotImplementedError, UsageError

from hvdlab.kernel_ext.rank.cell_source import label_of
from hvdlab.kernel_ext.rank.errors import is_ours
from hvdlab.kernel_ext.rank.stdin import LeftDebugger

POST_MORTEM = "__import__('hvdlab.kernel_ext.rank.pdb', fromlist=['post_mortem']).post_mortem()"
HAS_FAILED = "getattr(__import__('sys'), 'last_traceback', None) is not None"
"""Whether :func:`post_mortem` finds frames. An expression: to run a cell would drop them."""
"""The cell that ``%hvd_debug`` runs."""

_LOOKS_BACK = re.compile(
    r"%debug|%tb|\bpm\(|post_mortem|\blast_(?:traceback|value|exc|type)|\bsys\.exc_info|call_pdb"
)

_DEBUGGERS = frozenset({"bdb", "pdb", "IPython.core.debugger"})

_REPLACED = "REPLACED BY KeyboardInterrupt"
"""What pybind11's RuntimeError says if an interrupt comes while pybind11 turns an error of C++ into an exception."""

_plain_stop_here = bdb.Bdb.stop_here


def looks_back(source: str) -> bool:
    """Return whether a cell looks at the error that the cell before it failed with."""
    return bool(_LOOKS_BACK.search(source))


def forget_failure(shell: Any) -> None:
    """Let go of the error that a cell has ended with, and with it of all that its frames hold."""
    failed = getattr(sys, "last_value", None) is not None
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    for handler in (getattr(shell, "InteractiveTB", None), getattr(shell, "SyntaxTB", None)):
        for name in ("tb", "etype", "evalue"):
            if getattr(handler, name, None) is not None:
                setattr(handler, name, None)
    if failed:
        gc.collect()  # showing a traceback leaves cycles of frames, which may hold a model's activations


def stop_here(debugger: bdb.Bdb, frame: FrameType) -> bool:
    """In place of ``Bdb.stop_here``: stepping goes over hvdlab's own functions, and out of a cell into the end of it."""
    plumbing = is_ours(frame) or frame.f_globals.get("__name__") == "IPython.core.displayhook"
    return not plumbing and _in_cell(frame) and bool(_plain_stop_here(debugger, frame))


def _in_cell(frame: FrameType) -> bool:
    """Return whether a frame is the cell's, or was called by it. On other threads there is nothing else to stop in."""
    if threading.current_thread() is not threading.main_thread():
        return True
    caller: FrameType | None = frame
    while caller is not None:
        if label_of(caller.f_code.co_filename):
            return True
        caller = caller.f_back
    return False


def stop_tracing() -> None:
    """Stop the tracing of this thread: a cell has ended in which the user may have been stepping."""
    tracer = sys.gettrace()
    if isinstance(getattr(tracer, "__self__", None), bdb.Bdb):
        sys.settrace(None)


def cut_debugger(error: BaseException) -> BaseException:
    """Return the error that a cell has ended with, without a debugger's own frames if it comes out of one.

    An interrupt that became another error on its way is a KeyboardInterrupt again.
    """
    if isinstance(error, bdb.BdbQuit) and not error.args:
        error.args = ("the debugger was left with quit, which ends the cell",)
    left = isinstance(error, LeftDebugger)
    if left or isinstance(error, (bdb.BdbQuit, StdinNotImplementedError)):
        link = error.__traceback__
        while link is not None and link.tb_next is not None:
            if link.tb_next.tb_frame.f_globals.get("__name__") in _DEBUGGERS:
                link.tb_next = None
            link = link.tb_next
    if left or (isinstance(error, RuntimeError) and _REPLACED in str(error)):
        return KeyboardInterrupt().with_traceback(error.__traceback__)
    return error


def make_breakpoint(original: Callable[..., object]) -> Callable[..., object]:
    """Return the function for ``breakpoint()`` to call.

    Args:
        original: What it called before, for a debugger that the user has chosen by ``PYTHONBREAKPOINT``.
    """

    def breakpoint(*args: Any, header: str | None = None, **kwargs: Any) -> object:
        chosen = os.environ.get("PYTHONBREAKPOINT", "")
        if chosen == "0":
            return None
        if chosen and chosen != "pdb.set_trace":
            if header is not None:
                kwargs["header"] = header
            return original(*args, **kwargs)
        from IPython.core.debugger import Pdb

        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_back is not None and is_ours(frame):
            frame = frame.f_back
        debugger: Any = Pdb()  # IPython has no annotations
        if header is not None:
            debugger.message(header)
        debugger.set_trace(frame)
        return None

    return breakpoint


def post_mortem() -> None:
    """Look at the frames of the error that the last cell has ended with here, in IPython's debugger."""
    from IPython.core.debugger import Pdb

    trace = getattr(sys, "last_traceback", None)
    if trace is None:
        raise UsageError(
            "nothing is left to look at here: the last cell on this rank did not fail, "
            "or another one has begun since (what a cell failed with is kept until then)"
        )
    debugger: Any = Pdb()  # IPython has no annotations
    debugger.reset()
    debugger.interaction(None, trace)
