"""The numbers by which scripts know ranks.

The core, the launchers and all that is shown know a rank by the number it was started with, which stays. Scripts see these
numbers, too, unless ``HVDLAB_RANK_NUMBERS=consecutive``: then the number of a rank is its position in the world, from 0
to ``size() - 1``, as scripts for Horovod expect. The coordinator puts the ranks first that were there first.
"""

from __future__ import annotations

from hvdlab.collectives import context
from hvdlab.collectives.errors import AbortedError, InvalidRequestError, Pending
from hvdlab.collectives.variables import CONSECUTIVE


def own_number(what: str = "hvd.rank()") -> int:
    """Return the number of this rank; ``what`` is the user's call, for the error."""
    engine = context.engine(what)
    return shown_number(engine.rank) if engine.settings.rank_numbers == CONSECUTIVE else engine.rank


def shown_number(rank: int) -> int:
    """Return the number by which scripts know a rank of the core; the core's own number for a rank that is not in the world."""
    engine = context.engine()
    if engine.settings.rank_numbers != CONSECUTIVE:
        return rank
    ranks = engine.ranks()
    return ranks.index(rank) if rank in ranks else rank


def core_rank(number: int, what: str = "hvd.add_process_set()") -> int:
    """Return the rank of the core that scripts know by this number; ``what`` is the user's call, for the error.

    Raises:
        InvalidRequestError: Numbers are consecutive, and there are fewer ranks.
        AbortedError: There are fewer ranks because elastic training has to begin again.
        NotInitializedError: ``init()`` was not called.
    """
    engine = context.engine(what)
    if engine.settings.rank_numbers != CONSECUTIVE:
        return number
    ranks = engine.ranks()
    if not 0 <= number < len(ranks):
        if engine.failure is not None:  # perhaps it is a number of the world that has ended
            raise AbortedError(Pending(what, f"{what}.noname"), engine.failure)
        there = f"they are 0 to {len(ranks) - 1}" if len(ranks) > 1 else "there is rank 0 alone"
        raise InvalidRequestError(f"There is no rank {number}; {there}.")
    return ranks[number]
