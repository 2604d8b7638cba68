"""What ranks agree on: whose state is the one to go on from, and whether the world is about to change."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.collectives import context
from hvdlab.collectives.dtypes import DType, OpKind, ReduceOp
from hvdlab.collectives.elastic.interrupts import HostUpdateResult
from hvdlab.collectives.elastic.state import News
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.planes.buffers import host_view
from hvdlab.collectives.protocol.messages import MOST_RANKS

ATTEMPT = 1 << 24
"""Each time the ranks begin again together, the count of their saves goes on from the next multiple of this.

So a rank that was cut off, and that the others have gone on without, is behind them however often it had saved before.
"""


def begun_again(saves: int) -> int:
    """The count of saves of all ranks, once they have begun again with the state of a rank that had saved so often."""
    return (saves // ATTEMPT + 1) * ATTEMPT


def is_overtaken(saves: int, elected: int) -> bool:
    """Whether others have begun again since a rank that has saved so often did; ``elected`` is the count of the one that is ahead."""
    return saves // ATTEMPT < elected // ATTEMPT


def elect(saves: int) -> tuple[int, int]:
    """Agree on the rank whose state is ahead: of those that began again last, the one that saved most often; among several, the one that
    was started with the lowest number.

    A newcomer has not saved yet, so its state is never chosen, which would undo what others have trained. After a failure that hit
    ranks at different points, one of them may have committed once more than the others.

    Args:
        saves: This rank's count of saves (:data:`ATTEMPT`).

    Returns:
        The rank, as the core numbers it, and its count. Without other ranks, this one.
    """
    # Not as scripts number them: ranks that are let go before training has begun may change these numbers on the way.
    if not context.is_initialized():
        return 0, saves
    engine = context.engine()
    if engine.size == 1:
        return engine.rank, saves
    mine = np.array([engine.rank - saves * MOST_RANKS], dtype=np.int64)
    least = int(_reduced(mine, DType.I64, "elastic.root", ReduceOp.MIN)[0])
    return least % MOST_RANKS, -(least // MOST_RANKS)


def united(news: News) -> News:
    """The news of all ranks together, in one small collective."""
    if not context.is_initialized() or context.engine().size == 1:
        return news
    before, latest, changes = news
    removed, added = bool(changes & HostUpdateResult.removed), bool(changes & HostUpdateResult.added)
    mine = np.array([before, latest, removed, added], dtype=np.float64)
    before, latest, removed, added = _reduced(mine, DType.F64, "elastic.news", ReduceOp.MAX).tolist()
    return before, latest, HostUpdateResult.removed * int(removed) | HostUpdateResult.added * int(added)


def _reduced(values: npt.NDArray[Any], dtype: DType, name: str, op: ReduceOp) -> npt.NDArray[Any]:
    """The result of an allreduce of a few numbers."""
    result = context.engine().run(Request(OpKind.ALLREDUCE, name, values, dtype=dtype, op=op))
    assert result.output is not None
    return host_view(result.output)
