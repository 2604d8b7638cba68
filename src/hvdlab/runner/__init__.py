"""Launching ranks: the command ``hvdlab run`` and the function ``hvdlab.run``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdlab.runner.calling import RankFailedError as RankFailedError
    from hvdlab.runner.calling import run as run

__all__ = ["RankFailedError", "run"]


def __getattr__(name: str) -> Any:
    # The agent of a host imports this package and needs none of it.
    if name not in __all__:
        raise AttributeError(f"module 'hvdlab.runner' has no attribute {name!r}")
    from hvdlab.runner import calling

    return getattr(calling, name)
