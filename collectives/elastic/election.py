"""Whose state is the one to go on from."""

from __future__ import annotations

import numpy as np

from hvdlab.collectives import api, context

_RANKS = 1 << 20
"""More than there ever are."""


def elect(saves: int) -> tuple[int, int]:
    """Agree on the rank whose state is ahead: the one that saved most often, and among these the first.

    A rank that has come anew has not saved yet, so it is never one that would undo what others have trained. Of ranks
    that were torn apart by a failure, one may have committed once more than the others.

    Args:
        saves: How often this rank has saved.

    Returns:
        The rank, and how often it has saved. Without other ranks, this one.
    """
    if not context.is_initialized():
        return 0, saves
    engine = context.engine()
    if engine.size == 1:
        return engine.rank, saves
    mine = np.array([engine.rank - saves * _RANKS], dtype=np.int64)
    least = int(api.allreduce(mine, "elastic.root", api.Min)[0])
    return least % _RANKS, -(least // _RANKS)
