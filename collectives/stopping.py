"""Breakpoints on some ranks only, or under a condition."""

from __future__ import annotations

import os
import pdb  # noqa: T100  # this module is for stopping
import sys
from collections.abc import Callable, Collection
from typing import Any

from hvdlab.collectives import context


def breakpoint(
    ranks: int | Collection[int] | None = None,
    when: object = None,
    *,
    header: str | None = None,
) -> None:
    """Stop in the debugger, as the built-in ``breakpoint()`` does, on some ranks only or when something holds.

    In a rank of a pool the debugger's prompt comes in the notebook, and no clock of a stall runs meanwhile. The other ranks go on
    until they wait for this one.

    Args:
        ranks: Ranks to stop on, one or several; by default every rank. A process that is not initialized is rank 0.
        when: Stop only if this is true; if it is a function, it is called without arguments, on these ranks only.
        header: Text that the debugger shows when it stops.
    """
    if ranks is not None and _rank() not in ({ranks} if isinstance(ranks, int) else ranks):
        return
    if when is not None and not (when() if callable(when) else when):
        return
    hook: Callable[..., Any] = sys.breakpointhook
    if hook is sys.__breakpointhook__ and os.environ.get("PYTHONBREAKPOINT", "") in ("", "pdb.set_trace"):
        debugger = pdb.Pdb()
        if header is not None:
            debugger.message(header)
        # In the caller's frame: the user's own line, not this one.
        debugger.set_trace(sys._getframe(1))
    elif header is not None and hook is not sys.__breakpointhook__:
        hook(header=header)
    else:
        hook()


def _rank() -> int:
    return context.engine().rank if context.is_initialized() else 0
