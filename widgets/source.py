"""Where a view's data comes from: a recording, or anything that leads to one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hvdlab.collectives.errors import InvalidRequestError

if TYPE_CHECKING:
    from hvdlab.collectives.recording import Recording

Finder = Callable[[], Any]

_finders: list[Finder] = []
"""Ask these for the pool of the place where the user is; the newest first. Filled by the notebook's extension."""


def add_finder(finder: Finder) -> None:
    """Let ``finder`` tell which pool is meant when none is named; it returns ``None`` if it knows of none."""
    _finders.append(finder)


def remove_finder(finder: Finder) -> None:
    """Ask it no more. Nothing happens if it is not known."""
    if finder in _finders:
        _finders.remove(finder)


def recording_of(source: Any = None) -> Recording:
    """The recording of a pool, a client or of itself; by default that of the notebook's pool.

    Raises:
        InvalidRequestError: There is no pool.
        TypeError: This leads to no recording.
    """
    # numpy is wanted only by those who look; who loads the extension does not yet.
    from hvdlab.collectives.client import Client
    from hvdlab.collectives.recording import Recording

    if source is None:
        source = next((pool for finder in reversed(_finders) if (pool := finder()) is not None), None)
        if source is None:
            raise InvalidRequestError(
                "no ranks are running: start some with `%hvd_pool start -np 8` or a %%hvd_run cell, or name a pool"
            )
    if isinstance(source, Recording):
        return source
    client = getattr(source, "client", source)
    if isinstance(client, Client):
        return client.recording
    raise TypeError(f"a pool is needed here, not {type(source).__name__}")
