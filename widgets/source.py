"""Where a view's data comes from: a recording, or anything that leads to one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError

if TYPE_CHECKING:
    from hvdlab.collectives.tracing.recording import Recording
    from hvdlab.widgets.membership_actions import ChangeablePool

Finder = Callable[[], Any]

Waiting = Callable[[], "Recording | None"]

_finders: list[Finder] = []
"""Functions that return the pool of the notebook in which the user is; the newest is asked first. The extension adds them."""

_waiting: list[Waiting] = []
"""Functions that return the recording of the pool that comes next; the newest is asked first. The extension adds them."""


def add_finder(finder: Finder) -> None:
    """Have ``finder`` asked for the pool that is meant when none is named; it returns ``None`` if it knows of none."""
    _finders.append(finder)


def remove_finder(finder: Finder) -> None:
    """Undo :func:`add_finder`. Nothing happens if ``finder`` is not known."""
    if finder in _finders:
        _finders.remove(finder)


def add_awaiting(waiting: Waiting) -> None:
    """Add ``waiting`` to those that are asked for the recording of the pool that comes next."""
    _waiting.append(waiting)


def remove_awaiting(waiting: Waiting) -> None:
    """Undo :func:`add_awaiting`. Nothing happens if ``waiting`` is not known."""
    if waiting in _waiting:
        _waiting.remove(waiting)


def _awaited() -> Recording | None:
    return next((found for waiting in reversed(_waiting) if (found := waiting()) is not None), None)


def pool_of(source: Any = None) -> ChangeablePool | None:
    """The pool that is meant, by default the notebook's; None if there is none now, or ``source`` is no pool."""
    if source is None:
        source = next((pool for finder in reversed(_finders) if (pool := finder()) is not None), None)
    return source if hasattr(source, "on_membership_change") else None


def recording_of(source: Any = None, *, coming: bool = False) -> Recording:
    """The recording of a pool, a client or of itself; by default that of the notebook's pool.

    It has what the ranks have done before this was called.

    Args:
        source: A pool, a client or a recording; by default the notebook's pool.
        coming: Without a pool, return the recording of the notebook's next pool, which is empty until then.

    Raises:
        InvalidRequestError: There is no pool, or this process is one of its ranks.
        TypeError: ``source`` leads to no recording.
    """
    # Imported here, since these import numpy, which views need and loading the extension does not.
    from hvdlab.collectives.client import Client
    from hvdlab.collectives.tracing.recording import Recording

    if source is None:
        if context.in_rank_of_pool():
            raise InvalidRequestError(
                "this is a rank, which does not see the others: call it in the notebook's own process, in a cell without "
                "%%hvd_run, or under %%local where cells run on the ranks"
            )
        source = next((pool for finder in reversed(_finders) if (pool := finder()) is not None), None)
        if source is None and coming and (awaited := _awaited()) is not None:
            return awaited
        if source is None:
            raise InvalidRequestError(
                "no ranks are running: start some with `%hvd_pool start -np 8` or a %%hvd_run cell, or name a pool"
            )
    if isinstance(source, Recording):
        return source
    client = getattr(source, "client", source)
    if isinstance(client, Client):
        return client.gathered()
    raise TypeError(f"a pool is needed here, not {type(source).__name__}")
