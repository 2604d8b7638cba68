"""Process sets as users see them: groups of ranks that have collectives of their own, in any framework."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdlab.collectives import context
from hvdlab.collectives.dtypes import DType, OpKind
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.engine.request import Request
from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from hvdlab.collectives.numbering import core_rank, shown_number
from hvdlab.collectives.planes.buffers import host_view

GLOBAL_ID = 0


class _Registered(NamedTuple):
    """A set as it was registered.

    Attributes:
        ranks: Its ranks in the core.
        epoch: Epoch of the world then.
        processes: Rank, host and process id of each rank of the world then.
    """

    ranks: tuple[int, ...]
    epoch: int
    processes: frozenset[tuple[int, str, int]]

    def remaining(self) -> list[int]:
        """Its ranks that are in the world still; one that was replaced is another process, which is not in the set."""
        now = context.engine().processes()[1]
        return [member[0] for member in now if member[0] in self.ranks and member in self.processes]


class _Known:
    """The sets that were registered with one engine, but for the global one, by id.

    Attributes:
        world: Number of the engine in this process. An id of one world means nothing, or another set, in the next.
    """

    def __init__(self) -> None:
        self.world = next(_worlds)
        self.sets: dict[int, _Registered] = {}


_worlds = itertools.count(1)
_latest: tuple[weakref.ref[Engine], _Known] | None = None


def _known(what: str = "hvd.ProcessSet") -> _Known:
    global _latest
    engine = context.engine(what)
    if _latest is None or _latest[0]() is not engine:
        _latest = weakref.ref(engine), _Known()
    return _latest[1]


class ProcessSet:
    """Ranks that take part in a collective; pass it as ``process_set=``.

    ``ProcessSet([0, 2])`` names the ranks; it can be used after :func:`add_process_set` (or after being given to
    ``hvd.init(process_sets=...)``), which sets :attr:`process_set_id`. A communicator of mpi4py in place of the ranks
    stands for its processes; each rank then gives the one that it is in.

    Attributes:
        ranks: The set's ranks in ascending order; once it is registered, those that are there now.
        mpi_comm: The communicator it was made from, or ``None``.
    """

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        self.mpi_comm = ranks_or_comm if is_communicator(ranks_or_comm) else None
        self._ranks = _checked_ranks(
            world_ranks(self.mpi_comm) if self.mpi_comm is not None else ranks_or_comm
        )
        self._id: int | None = None
        self._world = 0
        self._together: tuple[
            int, ...
        ] = ()  # ids that one call on all ranks registered: one per communicator

    @property
    def process_set_id(self) -> int | None:
        """Id of the set in the core; ``None`` while it is not registered with the world that there is now."""
        if self._id is None or self._id == GLOBAL_ID:
            return self._id
        if not context.is_initialized():
            return None
        known = _known()
        there = known.world == self._world and self._id in known.sets
        return self._id if there and context.engine().knows_process_set(self._id) else None

    @property
    def ranks(self) -> list[int]:
        id = self.process_set_id
        if id is None or (id == GLOBAL_ID and not context.is_initialized()):
            return list(self._ranks)
        # A rank outside need not know its members.
        there = members(id) or (_known().sets[id].remaining() if id != GLOBAL_ID else ())
        return [shown_number(rank) for rank in there]

    def size(self) -> int | None:
        """Number of ranks in the set; ``None`` if it is not registered."""
        if self.process_set_id is None:
            return None
        context.engine("hvd.ProcessSet.size()")
        return len(self.ranks)

    def rank(self) -> int | None:
        """Position of this rank in the set; ``None`` if the set is not registered or this rank is not in it."""
        if self.process_set_id is None:
            return None
        mine = shown_number(context.engine("hvd.ProcessSet.rank()").rank)
        ranks = self.ranks
        return ranks.index(mine) if mine in ranks else None

    def included(self) -> bool | None:
        """Whether this rank is in the set; ``None`` if the set is not registered."""
        if self.process_set_id is None:
            return None
        return shown_number(context.engine("hvd.ProcessSet.included()").rank) in self.ranks

    def __repr__(self) -> str:
        which = "all" if self._id == GLOBAL_ID else self.ranks
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={which})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Sent to another rank, a set is the same set there (without its communicator)."""
        return _received, (self._ranks, self.process_set_id)


def _received(ranks: list[int], id: int | None) -> ProcessSet:
    process_set = global_process_set if id == GLOBAL_ID else ProcessSet(ranks)
    if id and context.is_initialized():
        process_set._id, process_set._world = id, _known().world
    return process_set


def _checked_ranks(ranks: object) -> list[int]:
    try:
        if isinstance(ranks, str) or not isinstance(ranks, Iterable):
            raise TypeError
        numbers = [operator.index(rank) for rank in ranks]
    except TypeError:
        numbers = [-1]
    if any(number < 0 for number in numbers):
        raise InvalidRequestError(
            f"A process set is made from a list of ranks such as [0, 2], not from {ranks!r}."
        )
    if len(set(numbers)) != len(numbers):
        raise InvalidRequestError(f"The ranks of a process set must differ from each other: {numbers}.")
    return sorted(numbers)


# -- communicators of mpi4py ------------------------------------------------------------------------------------------


def is_communicator(value: object) -> bool:
    """Whether this is a communicator of mpi4py."""
    return hasattr(value, "Get_rank") and hasattr(value, "Get_group")


def world_ranks(comm: Any) -> list[int]:
    """The ranks, in MPI's world, of the processes of a communicator.

    Raises:
        UnsupportedError: It reaches processes outside MPI's world.
    """
    from mpi4py import MPI

    group, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = [int(rank) for rank in group.Translate_ranks(None, world)]
    if MPI.UNDEFINED in ranks:
        raise UnsupportedError(
            "A process set can't be made from a communicator that reaches beyond MPI's world."
        )
    return ranks


# -- registration -----------------------------------------------------------------------------------------------------


def _global() -> ProcessSet:
    whole = ProcessSet([])
    whole._id = GLOBAL_ID
    return whole


global_process_set = _global()
"""All ranks; the default of every collective."""


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set of ranks; every rank of the world calls it alike, also those outside the set.

    Returns:
        The set, ready to be used as ``process_set=``.

    Raises:
        InvalidRequestError: It is registered already, or another set of the same ranks is (then nothing was sent; a set of before a rank
            was replaced or added does not count, nor one of before elastic training has begun anew); or it names ranks that are not
            there (raised on all).
        MismatchError, AbortedError: The ranks disagree, or one of them failed before it got here.
    """
    wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if wanted.process_set_id is not None:
        raise InvalidRequestError(f"{wanted!r} is registered already.")
    for ranks in _named_by_all(wanted):
        _refuse_second(ranks)
    register(wanted)
    return wanted


def register(process_set: ProcessSet) -> None:
    """Register a set, even if there is another one of the same ranks. Raises what :func:`add_process_set` does."""
    known = _known("hvd.add_process_set()")
    epoch, processes = context.engine().processes()
    ids: dict[tuple[int, ...], int] = {}
    for ranks in _named_by_all(process_set):
        members = tuple(sorted(core_rank(rank) for rank in ranks))
        ids[ranks] = context.engine().add_process_set(members)
        known.sets[ids[ranks]] = _Registered(members, epoch, frozenset(processes))
    process_set._id, process_set._world = ids[tuple(process_set._ranks)], known.world
    process_set._together = tuple(ids.values())


def _named_by_all(process_set: ProcessSet) -> list[tuple[int, ...]]:
    """The lists of ranks that all ranks register together: one, or with communicators that of each of them."""
    own = tuple(process_set._ranks)
    if process_set.mpi_comm is None:
        return [own]
    mine = np.array([len(own), *own], np.int64)
    request = Request(OpKind.ALLGATHER, "process_set.communicators", mine, dtype=DType.I64)
    gathered = context.engine().run(request).output
    assert gathered is not None
    rows = host_view(gathered).tolist()
    found: dict[tuple[int, ...], None] = {}
    while rows:
        length = rows.pop(0)
        found[tuple(rows[:length])] = None
        del rows[:length]
    return list(found)


def _refuse_second(ranks: tuple[int, ...]) -> None:
    engine = context.engine("hvd.add_process_set()")
    wanted = tuple(sorted(core_rank(rank) for rank in ranks))
    if wanted == tuple(sorted(engine.ranks())):
        raise InvalidRequestError(f"A set of the ranks {list(ranks)} exists: it is hvd.global_process_set.")
    # Ranks that came later know no set of before, and elastic training begins anew with them, or the set has lost a rank: all register
    # it again then, and one that refused would let the others wait. Within an epoch, and among the same processes, all know the same sets.
    now, processes = engine.processes()
    epoch = now if engine.elastic.training else None
    for id, known in _known().sets.items():
        same = epoch in (None, known.epoch) and known.processes.issuperset(processes)
        if known.ranks == wanted and same and engine.knows_process_set(id):
            raise InvalidRequestError(
                f"A set of the ranks {list(ranks)} is registered already, as process set {id}; use that one, or "
                "remove it first with hvd.remove_process_set(...)."
            )


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a set; every rank of the world calls it alike. The object can be registered again.

    Of sets made from communicators, the sets of all ranks are removed.

    Returns:
        Whether there was something to remove: ``False`` for a set that is not registered.

    Raises:
        InvalidRequestError: It is the global set, which stays.
        MismatchError, AbortedError: As for :func:`add_process_set`; the set is still registered.
    """
    if not isinstance(process_set, ProcessSet):
        raise InvalidRequestError(f"hvd.remove_process_set takes a hvd.ProcessSet, not {process_set!r}.")
    id = process_set.process_set_id
    if id == GLOBAL_ID:
        raise InvalidRequestError("hvd.global_process_set can't be removed.")
    engine = context.engine("hvd.remove_process_set()")
    if id is None:
        return False
    for each in process_set._together or (id,):
        engine.remove_process_set(each)
        _known().sets.pop(each, None)
    process_set._id = None
    return True


def set_id(process_set: ProcessSet) -> int:
    """The id that a collective is submitted with.

    Raises:
        InvalidRequestError: The argument is no process set, or one that was never registered (or was removed).
    """
    if not isinstance(process_set, ProcessSet):
        raise InvalidRequestError(f"process_set= takes a hvd.ProcessSet, not {type(process_set).__name__}.")
    id = process_set.process_set_id
    if id is None:
        context.engine()
        raise InvalidRequestError(
            f"{process_set!r} is not registered; call hvd.add_process_set(...) with it on every rank first."
        )
    return id


def members(process_set: int) -> tuple[int, ...]:
    """The ranks of the core that make up a registered process set now, by position."""
    return context.engine().ranks(process_set)


def position(process_set: int) -> int:
    """This rank's position among the members of a process set that it belongs to."""
    return members(process_set).index(context.engine().rank)


def newest(ranks: tuple[int, ...], otherwise: int) -> int:
    """The id of the process set of just these ranks of the core that was registered last; ``otherwise`` if there is none now.

    A set has lost a rank that was cut off for good, also when that is back: then all ranks register one of the same ranks anew. They
    do that together, so that all find the same one afterwards.
    """
    engine, sets = context.engine(), _known().sets
    alike = [id for id, known in [*sets.items()] if known.ranks == ranks]  # a copy: any thread may ask
    return next((id for id in reversed(alike) if engine.knows_process_set(id)), otherwise)
