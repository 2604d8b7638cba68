"""Process sets as users see them: groups of ranks that have collectives of their own, in any framework."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from hvdlab.collectives import context
from hvdlab.collectives.context import core_rank, shown_number
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from hvdlab.collectives.planes.base import host_view
from hvdlab.collectives.protocol.messages import MOST_RANKS
from hvdlab.collectives.types import DType, OpKind

GLOBAL_ID = 0
"""Id of the set of all ranks, on the wire as well."""


class _Registered(NamedTuple):
    """Process set as it was registered.

    Attributes:
        ranks: Its ranks in the core.
        generation: Generation of the world then.
        processes: Rank, host and process id of each rank of the world then.
        together: Ids of the sets that the same call registered on all ranks, this one's among them: one per communicator.
    """

    ranks: tuple[int, ...]
    generation: int
    processes: frozenset[tuple[int, str, int]]
    together: tuple[int, ...]

    def remaining(self) -> list[int]:
        """Return its ranks that are still in the world; one that was replaced is another process, which is not in the set."""
        now = context.engine().processes()[1]
        return [member[0] for member in now if member[0] in self.ranks and member in self.processes]


class _Known:
    """Sets that were registered between one ``init()`` and the ``shutdown()`` after it, but for the global one.

    Attributes:
        world: Its number in this process. An id of one world means nothing, or another set, in the next.
        sets: The sets, by id.
        former: Sets of the worlds before on the same engine: a pool's ranks stay connected over ``shutdown()``, and its core keeps them.
    """

    def __init__(self, former: Mapping[int, _Registered]) -> None:
        self.world = next(_worlds)
        self.sets: dict[int, _Registered] = {}
        self.former = dict(former)


_worlds = itertools.count(1)
# Weak: a module's variable must not keep an engine after shutdown().
_latest: tuple[weakref.ref[Engine], int, _Known] | None = None


def _known(what: str = "hvd.ProcessSet") -> _Known:
    global _latest
    engine, joined = context.engine(what), context.joined_worlds()
    if _latest is None or _latest[0]() is not engine:
        _latest = weakref.ref(engine), joined, _Known({})
    elif _latest[1] != joined:
        before = _latest[2]
        _latest = weakref.ref(engine), joined, _Known(before.former | before.sets)
    return _latest[2]


class ProcessSet:
    """Set of ranks that have collectives of their own; pass it as ``process_set=``.

    ``ProcessSet([0, 2])`` names the ranks; it can be used after :func:`add_process_set` (or after being given to
    ``hvd.init(process_sets=...)``), which sets :attr:`process_set_id`. A communicator of mpi4py in place of the ranks
    stands for its processes; each rank then gives the one that it is in.

    Args:
        ranks_or_comm: The ranks, or a communicator of mpi4py.

    Attributes:
        ranks: The set's ranks in ascending order; once it is registered, those in the world now. Before, it can be set.
        mpi_comm: The communicator it was made from, or ``None``.

    Raises:
        InvalidRequestError: These are no ranks, or a rank comes twice.
        UnsupportedError: The communicator reaches processes outside MPI's world.
    """

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        self.mpi_comm = ranks_or_comm if is_communicator(ranks_or_comm) else None
        self._ranks = _checked_ranks(
            world_ranks(self.mpi_comm) if self.mpi_comm is not None else ranks_or_comm
        )
        #: Id of the latest registration, or the one that users' code has set.
        self._id: int | None = None
        self._is_assigned = False  # users' code has set the id, which can be that of no set
        self._world = 0  # number of the world that the id belongs to; 0 for the next one

    @property
    def process_set_id(self) -> int | None:
        """Return the id of the set in the core; ``None`` while it is not registered with the present world.

        Users' code can set it, as in Horovod, where it is a plain attribute: the object then stands for the set with this id until the
        world ends, and using it raises ``InvalidRequestError`` if there is none. With ``None`` it is not registered.

        Raises:
            InvalidRequestError: It is set to a value that is no integer, or the id of the global set is changed.
        """
        if not self._is_assigned:
            return self._id if _is_there(self._id, self._world) else None
        world = _known().world if context.is_initialized() else 0
        if self._world == 0:
            self._world = world  # set before init(): it belongs to the first world in which it is read
        return self._id if self._world == world else None

    @process_set_id.setter
    def process_set_id(self, number: SupportsIndex | None) -> None:
        id = _checked_id(number)
        if self is global_process_set:
            if id != GLOBAL_ID:
                raise InvalidRequestError(
                    f"The process_set_id of hvd.global_process_set stays {GLOBAL_ID}, and can't be set to {number!r}; make a "
                    "hvd.ProcessSet of your own for another one."
                )
            return
        self._id, self._is_assigned = id, id is not None
        self._world = _known().world if context.is_initialized() else 0

    @property
    def ranks(self) -> list[int]:
        """Return the set's ranks in ascending order; once it is registered, those in the world now.

        It can be set while the set is not registered.

        Raises:
            InvalidRequestError: It is set while the set is registered, or to ranks that are no numbers or come twice.
        """
        id = self.process_set_id
        if id is None or not context.is_initialized() or not _exists(id):
            return list(self._ranks)
        return [shown_number(rank) for rank in _ranks_now(id)]

    @ranks.setter
    def ranks(self, ranks: Sequence[int]) -> None:
        if self is global_process_set or is_registered(self):
            raise InvalidRequestError(
                f"The ranks of {self!r} can't be set to {ranks!r} while it is registered: make another hvd.ProcessSet."
            )
        self._ranks = _checked_ranks(ranks)

    def size(self) -> int | None:
        """Return the number of ranks in the set; ``None`` if it is not registered.

        Raises:
            InvalidRequestError: Users' code has set a :attr:`process_set_id` that no set has.
        """
        return None if self._used("size") is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return the position of this rank in the set; ``None`` if the set is not registered or this rank is not in it.

        Raises:
            InvalidRequestError: Users' code has set a :attr:`process_set_id` that no set has.
            NotInitializedError: ``init()`` was not called.
        """
        if self._used("rank") is None:
            return None
        mine = shown_number(context.engine().rank)
        ranks = self.ranks
        return ranks.index(mine) if mine in ranks else None

    def included(self) -> bool | None:
        """Return whether this rank is in the set; ``None`` if the set is not registered.

        Raises:
            InvalidRequestError: Users' code has set a :attr:`process_set_id` that no set has.
            NotInitializedError: ``init()`` was not called.
        """
        if self._used("included") is None:
            return None
        return shown_number(context.engine().rank) in self.ranks

    def _used(self, method: str) -> int | None:
        """Return the id for a method that uses the set, or ``None``. Raises as that method does."""
        id = self.process_set_id
        if id is not None:
            check_id(id, f"hvd.ProcessSet.{method}()")
        return id

    def __repr__(self) -> str:
        which = "all" if self._id == GLOBAL_ID else self.ranks
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={which})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the set's ranks and id: on another rank it is the same set, without its communicator."""
        return _received, (self._ranks, self.process_set_id, self._is_assigned)


def _received(ranks: list[int], id: int | None, is_assigned: bool) -> ProcessSet:
    if id == GLOBAL_ID and not is_assigned:
        # The object itself, not one like it: is_registered() recognises the global set by identity.
        return global_process_set
    process_set = ProcessSet(ranks)
    if is_assigned:
        process_set.process_set_id = id
    elif id and context.is_initialized():
        process_set._id, process_set._world = id, _known().world
    return process_set


def _checked_id(number: SupportsIndex | None) -> int | None:
    try:
        return None if number is None else operator.index(number)
    except TypeError:
        raise InvalidRequestError(
            f"process_set_id is the number of a process set, or None, and can't be set to {number!r}."
        ) from None


def _checked_ranks(ranks: object) -> list[int]:
    try:
        if isinstance(ranks, str) or not isinstance(ranks, Iterable):
            raise TypeError
        numbers = [operator.index(rank) for rank in ranks]
    except TypeError:
        # For the error below, which is the same for values that are no numbers and for negative ones.
        numbers = [-1]
    if not all(0 <= number < MOST_RANKS for number in numbers):
        raise InvalidRequestError(
            f"A process set is made from a list of ranks such as [0, 2], not from {ranks!r}."
        )
    if len(set(numbers)) != len(numbers):
        raise InvalidRequestError(f"The ranks of a process set must differ from each other: {numbers}.")
    return sorted(numbers)


# -- communicators of mpi4py ------------------------------------------------------------------------------------------


def is_communicator(value: object) -> bool:
    """Return whether this is a communicator of mpi4py."""
    # By its methods: importing ``mpi4py.MPI`` would initialize MPI in processes that do not use it.
    return hasattr(value, "Get_rank") and hasattr(value, "Get_group")


def world_ranks(comm: Any) -> list[int]:
    """Return the ranks, in MPI's world, of the processes of a communicator.

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


# -- the sets that there are ------------------------------------------------------------------------------------------


def _exists(id: int) -> bool:
    """Return whether the core has a set of this id."""
    return id == GLOBAL_ID or context.engine().knows_process_set(id)


def _is_there(id: int | None, world: int) -> bool:
    """Return whether the core still has the set that was registered under this id, with the world of this number."""
    if id is None or id == GLOBAL_ID:
        return True
    if not context.is_initialized():
        return False
    known = _known()
    return known.world == world and id in known.sets and _exists(id)


def _ranks_now(id: int) -> Sequence[int]:
    """Return the ranks of the core that are in an existing set; a rank outside need not know its members."""
    engine, registered = context.engine(), _known().sets.get(id)
    there = members(id)
    if there or id == GLOBAL_ID:
        return there
    if registered is not None:
        return registered.remaining()
    living = engine.ranks()
    return [rank for rank in engine.added_process_sets().get(id, ()) if rank in living]


def check_id(number: int, what: str = "hvd.ProcessSet") -> None:
    """Check that there is a process set of this number.

    Args:
        number: A ``process_set_id``.
        what: The user's call, for the error if ``init()`` was not called.

    Raises:
        InvalidRequestError: There is none; the text names the numbers that there are.
        NotInitializedError: ``init()`` was not called.
    """
    engine = context.engine(what)
    if not _exists(number):
        numbers = ", ".join(map(str, sorted({GLOBAL_ID, *engine.added_process_sets()})))
        raise InvalidRequestError(
            f"There is no process set {number}. Those that exist have process_set_id {numbers}: use one of these, or make a set "
            "with hvd.add_process_set(...) on every rank."
        )


def is_registered(process_set: ProcessSet) -> bool:
    """Return whether a set can be used now: it need not be registered, by this object or another one."""
    id = process_set.process_set_id
    if process_set is global_process_set:
        return True
    return id is not None and context.is_initialized() and _exists(id)


# -- registration -----------------------------------------------------------------------------------------------------


def _global() -> ProcessSet:
    whole = ProcessSet([])
    whole._id = GLOBAL_ID
    return whole


global_process_set = _global()
"""All ranks; the default of every collective."""


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a set of ranks; every rank of the world calls it alike, also those outside the set.

    Args:
        process_set: A ``ProcessSet``, or the member ranks, such as ``[0, 2]``; equal on all ranks.

    Returns:
        The set, ready to be used as ``process_set=``.

    Raises:
        InvalidRequestError: It is registered already, or another set of the same ranks is (then nothing was sent; a set from before a
            rank was replaced or added does not count, nor one from before elastic training has begun again); or it names ranks that are
            not in the world (raised on all).
        MismatchError, AbortedError: The ranks disagree, or one of them failed before it got here.
        NotInitializedError: ``init()`` was not called.
    """
    wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if is_registered(wanted):
        raise InvalidRequestError(f"{wanted!r} is registered already.")
    for ranks in _named_by_all(wanted):
        _refuse_second(ranks)
    register(wanted)
    return wanted


def register(process_set: ProcessSet) -> None:
    """Register a set, even if there is another one of the same ranks. Raises as :func:`add_process_set` does."""
    known = _known("hvd.add_process_set()")
    generation, processes = context.engine().processes()
    ids: dict[tuple[int, ...], int] = {}
    for ranks in _named_by_all(process_set):
        members = tuple(sorted(core_rank(rank) for rank in ranks))
        former = _former_set(members, frozenset(processes))
        ids[ranks] = context.engine().add_process_set(members) if former is None else former
        # At once: if the next addition fails, this set exists all the same.
        known.sets[ids[ranks]] = _Registered(members, generation, frozenset(processes), (ids[ranks],))
    for id in ids.values():
        known.sets[id] = known.sets[id]._replace(together=tuple(ids.values()))
    process_set._id, process_set._world = ids[tuple(process_set._ranks)], known.world
    process_set._is_assigned = False


def _former_set(ranks: tuple[int, ...], processes: frozenset[tuple[int, str, int]]) -> int | None:
    """Return the id of a set of these ranks that a pool's core still has from before ``shutdown()``, or ``None``.

    All ranks come to the same answer: they registered that set together, and no process of the world is another one since then.
    """
    known, engine = _known(), context.engine()
    for id, registered in reversed(known.former.items()):
        alike = (registered.ranks, registered.processes) == (ranks, processes)
        if alike and id not in known.sets and engine.knows_process_set(id):
            return id
    return None


def _named_by_all(process_set: ProcessSet) -> list[tuple[int, ...]]:
    """Return the lists of ranks that all ranks register together: one, or one for each of their communicators."""
    own = tuple(process_set._ranks)
    if process_set.mpi_comm is None:
        return [own]
    mine = np.array([len(own), *own], np.int64)
    request = Request(OpKind.ALLGATHER, "process_set.communicators", mine, dtype=DType.I64)
    gathered = context.engine().run(request).output
    assert gathered is not None
    # Each rank's part: the number of its ranks, then these.
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
    # Ranks that came later know no earlier set. When elastic training begins again with them, or the set has lost a rank, all register
    # it again, and one that refused would let the others wait. Within a generation, and among the same processes, all know the same sets.
    now, processes = engine.processes()
    generation = now if engine.elastic.training else None
    for id, known in _known().sets.items():
        same = generation in (None, known.generation) and known.processes.issuperset(processes)
        if known.ranks == wanted and same and engine.knows_process_set(id):
            raise InvalidRequestError(
                f"A set of the ranks {list(ranks)} is registered already, as process set {id}; use that one, or "
                "remove it first with hvd.remove_process_set(...)."
            )


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregister a set; every rank of the world calls it alike. The object can be registered again.

    Of sets made from communicators, the sets of all ranks are removed.

    Args:
        process_set: The registered set; the same on all ranks.

    Returns:
        Whether the set was removed: ``False`` for a set that is not registered, and for the global set, which stays.

    Raises:
        InvalidRequestError: It is no ``ProcessSet``, or users' code has set a ``process_set_id`` that no set has.
        MismatchError, AbortedError: As for :func:`add_process_set`; the set is still registered.
        NotInitializedError: ``init()`` was not called.
    """
    if not isinstance(process_set, ProcessSet):
        raise InvalidRequestError(f"hvd.remove_process_set takes a hvd.ProcessSet, not {process_set!r}.")
    id = process_set.process_set_id
    engine = context.engine("hvd.remove_process_set()")
    # As in Horovod: programs remove all the sets that they hold, and the global one may be among them.
    if id is None or id == GLOBAL_ID:
        return False
    check_id(id)
    registered = _known().sets.get(id)
    for each in (id,) if registered is None else registered.together:
        engine.remove_process_set(each)
        # Only once the core has removed it: after an error, which is raised above, it is still registered.
        _known().sets.pop(each, None)
    process_set._id, process_set._is_assigned = None, False
    return True


def set_id(process_set: ProcessSet) -> int:
    """Return the id that a collective is submitted with.

    Raises:
        InvalidRequestError: The argument is no process set, or one that was never registered (or was removed), or users' code has
            set a ``process_set_id`` that no set has.
    """
    if not isinstance(process_set, ProcessSet):
        raise InvalidRequestError(f"process_set= takes a hvd.ProcessSet, not {type(process_set).__name__}.")
    id = process_set.process_set_id
    if id is None:
        context.engine()
        raise InvalidRequestError(
            f"{process_set!r} is not registered; call hvd.add_process_set(...) with it on every rank first."
        )
    if process_set._is_assigned:
        check_id(id)
    return id


def members(process_set: int) -> tuple[int, ...]:
    """Return the ranks of the core that make up a registered process set now, by position."""
    return context.engine().ranks(process_set)


def position(process_set: int) -> int:
    """Return this rank's position among the members of a process set that it belongs to."""
    return members(process_set).index(context.engine().rank)


def newest(ranks: tuple[int, ...], otherwise: int) -> int:
    """Return the id of the process set of just these ranks of the core that was registered last; ``otherwise`` if there is none now.

    A set has lost a rank that was cut off for good, also when that is back: then all ranks register a set of the same ranks again.
    They do that together, so that all find the same one afterwards.
    """
    engine, sets = context.engine(), _known().sets
    alike = [id for id, known in [*sets.items()] if known.ranks == ranks]  # a copy: any thread can ask
    return next((id for id in reversed(alike) if engine.knows_process_set(id)), otherwise)
