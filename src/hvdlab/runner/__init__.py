"""Launching ranks: the command ``hvdlab run`` and the function ``hvdlab.run``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdlab.runner.run_function import RankFailedError as RankFailedError
    from hvdlab.runner.run_function import run as run

__all__ = ["RankFailedError", "run"]


def __getattr__(name: str) -> Any:
    # The agent of a host imports this package and needs none of it.
    if name not in __all__:
        raise AttributeError(f"module 'hvdlab.runner' has no attribute {name!r}")
    from hvdlab.runner import run_function

    return getattr(run_function, name)
