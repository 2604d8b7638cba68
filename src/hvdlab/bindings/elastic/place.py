"""This rank's place among the living ranks; rank numbers stay as they are when other ranks are lost."""

from __future__ import annotations

from hvdlab.collectives import context
from hvdlab.collectives.numbering import shown_number


def rank() -> int:
    """Position of this rank among the living ones, from 0."""
    engine = context.engine("hvd.elastic")
    ranks = engine.ranks()
    return ranks.index(engine.rank) if engine.rank in ranks else engine.rank


def size() -> int:
    """Number of living ranks."""
    return context.engine("hvd.elastic").size


def first_rank() -> int:
    """Number of the first living rank, as scripts number them; 0 before ``hvd.init()``."""
    if not context.is_initialized():
        return 0
    engine = context.engine()
    return shown_number(next(iter(engine.ranks()), engine.rank))


def number_of(rank: int | None) -> int:
    """The number by which scripts know a rank of the core; of the first living rank for ``None``."""
    return first_rank() if rank is None else shown_number(rank)
