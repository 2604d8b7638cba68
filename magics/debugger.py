"""Lets the debugger of the notebook's frontend reach the ranks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hvdlab.kernel_ext.spmd.routing import route
from hvdlab.magics.autohvd import AutoRun
from hvdlab.magics.session import Session

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.debugger.hub import DebugHub

_RANKS = re.compile(r"\s*%%hvd_(run|rank)\b")


def load_debugger(session: Session, auto: AutoRun) -> DebugHub | None:
    """Put a hub before the kernel's own debugger; None if the kernel has none."""
    kernel = getattr(session.shell, "kernel", None)
    if not hasattr(getattr(kernel, "debugger", None), "process_request"):
        return None
    from hvdlab.kernel_ext.notebook.debugger.hub import DebugHub

    hub = DebugHub(kernel, lambda: session.current, lambda code: runs_on_ranks(session, auto, code))
    session.watchers.append(hub.pool_changed)
    session.debugger = hub
    return hub


def unload_debugger(session: Session) -> None:
    """Give the kernel its own debugger back."""
    hub, session.debugger = session.debugger, None
    if hub is not None:
        session.watchers.remove(hub.pool_changed)
        hub.close()


def runs_on_ranks(session: Session, auto: AutoRun, code: str) -> bool:
    """Whether nothing of this cell runs in the kernel itself."""
    if session.ranks_by_default and not _RANKS.match(code):
        way = route(code)
        return bool(way.ranks) and not way.here
    return _RANKS.match("".join(auto(code.splitlines(keepends=True)))) is not None
