"""Lets a widget hear from the browser while a cell runs."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def unparented(call: Callable[..., T], *arguments: Any, **more: Any) -> T:
    """Call something that sends messages of a widget, so that the messages belong to no cell.

    A kernel with subshells handles messages of the browser on the subshell that the page has chosen, also while a cell
    runs. But if a widget's last message was part of a cell, the page sends its answers to the main shell, where they wait
    until the cell has ended. Output that the call makes must not rely on the cell either. In a kernel without subshells,
    and without a kernel, this is a plain call.
    """
    parent = _parent_variable()
    if parent is None:
        return call(*arguments, **more)

    def run() -> T:
        parent.set({})
        return call(*arguments, **more)

    return contextvars.copy_context().run(run)


def _parent_variable() -> contextvars.ContextVar[Any] | None:
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    found = getattr(getattr(shell, "kernel", None), "_shell_parent", None)
    return found if isinstance(found, contextvars.ContextVar) else None
