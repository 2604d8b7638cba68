"""Which cell a thread or a task of asyncio belongs to: the one that started it, also when it outlives that cell."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

CELL: ContextVar[str] = ContextVar("hvdlab_cell", default="")
"""The cell of the calling context; empty on threads that a cell has started, which do not inherit its context."""
_ATTRIBUTE = "_hvdlab_cell"


def begin(cell: str) -> None:
    """Count what the calling context does and starts from now on as this cell's. Tasks inherit the context."""
    CELL.set(cell)


def current() -> str:
    """The cell of the calling thread or task; empty if it is of none."""
    return CELL.get() or of_thread()


def of_thread() -> str:
    """The cell that has started the calling thread; empty if none has."""
    return getattr(threading.current_thread(), _ATTRIBUTE, "")


def follow_threads() -> Callable[[], None]:
    """Let a thread belong to the cell of the thread that starts it, since it does not inherit the context.

    Returns a function that undoes it.
    """
    start = threading.Thread.start

    def start_of_cell(self: threading.Thread, *args: Any, **kwargs: Any) -> None:
        setattr(self, _ATTRIBUTE, current())
        start(self, *args, **kwargs)

    threading.Thread.start = start_of_cell  # type: ignore[method-assign]  # that is what is wanted

    def undo() -> None:
        threading.Thread.start = start  # type: ignore[method-assign]  # as above

    return undo
