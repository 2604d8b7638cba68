"""Process sets: groups of ranks that have collectives of their own."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError

GLOBAL_ID = 0


class ProcessSet:
    """Ranks that take part in a collective; pass it as ``process_set=``.

    ``ProcessSet([0, 2])`` names the ranks; it can be used after :func:`add_process_set` (or after being given to
    ``hvd.init(process_sets=...)``), which sets :attr:`process_set_id`.

    Attributes:
        process_set_id: Id of the set in the core, ``None`` while it is not registered.
        ranks: Its ranks in ascending order; once it is registered, those that are there now.
    """

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        self._ranks = _checked_ranks(ranks_or_comm)
        self.process_set_id: int | None = None

    @property
    def ranks(self) -> list[int]:
        if self.process_set_id is None:
            return list(self._ranks)
        return list(members(self.process_set_id) or self._ranks)  # a rank outside need not know its members

    def size(self) -> int | None:
        """Number of ranks in the set; ``None`` if it is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Position of this rank in the set; ``None`` if the set is not registered or this rank is not in it."""
        if self.process_set_id is None:
            return None
        ranks, mine = self.ranks, context.engine().rank
        return ranks.index(mine) if mine in ranks else None

    def included(self) -> bool | None:
        """Whether this rank is in the set; ``None`` if the set is not registered."""
        return None if self.process_set_id is None else context.engine().rank in self.ranks

    def __repr__(self) -> str:
        which = "all" if self.process_set_id == GLOBAL_ID else self._ranks
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={which})"


def _checked_ranks(ranks: object) -> list[int]:
    if hasattr(ranks, "Get_rank"):
        raise UnsupportedError("A process set is made from a list of ranks, not from an MPI communicator.")
    if not isinstance(ranks, Sequence) or not all(isinstance(rank, int) and rank >= 0 for rank in ranks):
        raise InvalidRequestError(
            f"A process set is made from a list of ranks such as [0, 2], not from {ranks!r}."
        )
    if len(set(ranks)) != len(ranks):
        raise InvalidRequestError(f"The ranks of a process set must differ from each other: {list(ranks)}.")
    return sorted(ranks)


def _global() -> ProcessSet:
    whole = ProcessSet([])
    whole.process_set_id = GLOBAL_ID
    return whole


global_process_set = _global()
"""All ranks; the default of every collective."""


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set of ranks; every rank of the world calls it alike, also those outside the set.

    Returns:
        The set, ready to be used as ``process_set=``.

    Raises:
        InvalidRequestError: It is registered already, or its ranks are not ranks of the world.
        MismatchError, AbortedError: The ranks disagree, or one of them failed before it got here.
    """
    wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if wanted.process_set_id is not None:
        raise InvalidRequestError(f"{wanted!r} is registered already.")
    wanted.process_set_id = context.engine().add_process_set(wanted._ranks)
    return wanted


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a set; every rank of the world calls it alike.

    Returns:
        Whether there was something to remove: ``False`` for a set that is not registered.

    Raises:
        InvalidRequestError: It is the global set, which stays.
        MismatchError, AbortedError: As for :func:`add_process_set`; the set is still registered.
    """
    if process_set.process_set_id == GLOBAL_ID:
        raise InvalidRequestError("hvd.global_process_set can't be removed.")
    if process_set.process_set_id is None:
        return False
    context.engine().remove_process_set(process_set.process_set_id)
    process_set.process_set_id = None
    return True


def set_id(process_set: ProcessSet) -> int:
    """The id that a collective is submitted with.

    Raises:
        InvalidRequestError: The argument is no process set, or one that was never registered (or was removed).
    """
    if not isinstance(process_set, ProcessSet):
        raise InvalidRequestError(f"process_set= takes a hvd.ProcessSet, not {type(process_set).__name__}.")
    if process_set.process_set_id is None:
        raise InvalidRequestError(
            f"{process_set!r} is not registered; call hvd.add_process_set(...) with it on every rank first."
        )
    return process_set.process_set_id


def members(process_set: int) -> tuple[int, ...]:
    """The ranks that make up a registered process set now, in ascending order."""
    return context.engine().ranks(process_set)


def position(process_set: int) -> int:
    """This rank's position among the members of a process set that it belongs to."""
    return members(process_set).index(context.engine().rank)
