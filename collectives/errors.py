"""Errors of the collective core.

::

    HvdlabError                     (a RuntimeError)
    ├── NotInitializedError         (also ValueError) a collective or a query before hvd.init()
    │   └── ForkedProcessError      … in a process that a rank has forked
    ├── InvalidRequestError         (also ValueError) wrong argument on this rank alone; nothing was sent
    │   ├── UnsupportedError        (also NotImplementedError) this dtype, operator or plane can't do it
    │   └── DuplicateNameError      a tensor of this name is already in flight on this rank
    ├── ReleasedError               this rank was released; the others continue without it
    ├── StartError                  coordinator, rank or plane could not start
    ├── ProtocolError               a peer sent bytes that the protocol does not allow
    ├── KVStoreError                a key-value store refused a call, and is as before
    └── CollectiveError             (also HorovodInternalError's base) a collective that was submitted failed
        ├── MismatchError           ranks disagree on dtype, shape, operator, root, …; the group stays usable
        ├── JoinedRanksError        it can't be done while some ranks have joined; the group stays usable
        └── AbortedError            the collective can't complete; the group was rebuilt and stays usable

Every error names the event, its probable reason and a remedy. The data of the text stays available as attributes.
After ``CollectiveError`` the contents of output (and in-place) buffers are undefined; inputs that are not also
outputs are untouched.

Example:
    >>> import hvdlab.numpy as hvd
    >>> from hvdlab.collectives.errors import HvdlabError
    >>> hvd.init()  # on every rank; a process that is no rank becomes a world of one
    >>> try:
    ...     hvd.broadcast([1.0], root_rank=7)
    ... except HvdlabError as error:
    ...     print(type(error).__name__)
    InvalidRequestError
    >>> hvd.shutdown()
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Self, cast

from hvdlab.collectives.text import format_ranks, visible, visible_lines


class HvdlabError(RuntimeError):
    """Base class of all errors that hvdlab itself raises. (Horovod's core reports its errors as ``RuntimeError``.)

    Its text can quote peers and files; control characters in it are shown escaped, so that a terminal obeys none of them.

    Attributes:
        decision: Number of the entry in the coordinator's decision log that led to it; 0 if no decision of the coordinator did. A traceback
            names it in its last line, and ``%hvd_pool status --story`` lists the entries.
    """

    decision: int = 0

    def because_of(self, decision: int) -> Self:
        """Name the decision of the coordinator that led to this error.

        Args:
            decision: Its number in the coordinator's log; 0 leaves the error without one.

        Returns:
            The error itself.
        """
        if decision:
            self.decision = decision
            self.add_note(f"[decision {decision} of the coordinator]")
        return self

    def __str__(self) -> str:
        return visible_lines(self._text())

    def _text(self) -> str:
        """Return the lines of the text. Foreign parts that must stay on one line have gone through :func:`visible`."""
        return super().__str__()


class NotInitializedError(HvdlabError, ValueError):
    """A collective or a rank query was made before ``hvd.init()``. (Horovod raises ``ValueError`` here.)"""

    def __init__(self, what: str = "hvdlab") -> None:
        self.what = what
        super().__init__(what)

    def _text(self) -> str:
        # Programs look for Horovod's words, which are the first four of its sentence.
        return f"Horovod has not been initialized: {self.what} was used before hvd.init(); call hvd.init() first, on every rank."


class ForkedProcessError(NotInitializedError):
    """hvdlab was used in a process that a rank has forked, such as the worker of a ``DataLoader``.

    Attributes:
        rank: The rank that forked it; -1 if the first argument is the whole text (a ``DataLoader`` makes its error from that).
    """

    def __init__(self, what: str, rank: int = -1) -> None:
        super().__init__(what)
        self.rank = rank
        # Exceptions are pickled by their args, in which ``super().__init__`` has left the rank out.
        self.args = (what, rank)

    def _text(self) -> str:
        if self.rank < 0:
            return self.what
        return (
            f"{self.what} was used in a process that rank {self.rank} has forked, such as the worker of a DataLoader. "
            "That process is no rank: call collectives in the rank itself, with what the process returns to it, and "
            "hand over hvd.rank() and hvd.size() as arguments."
        )


class InvalidRequestError(HvdlabError, ValueError):
    """An argument is wrong on this rank. Nothing was sent, other ranks are not affected."""


class UnsupportedError(InvalidRequestError, NotImplementedError):
    """The combination of collective, element type, operator and plane does not exist."""


class DuplicateNameError(InvalidRequestError):
    """A tensor of this name is already in flight on this rank.

    Attributes:
        name: The name.
        first_site: Line of code that submitted the tensor in flight.
        second_site: Line of code that submitted this one.
        advice: The remedy.
    """

    def __init__(
        self,
        name: str,
        first_site: str,
        second_site: str,
        advice: str = "give each tensor a name of its own, or synchronize() the first one before.",
    ) -> None:
        self.name, self.first_site, self.second_site, self.advice = name, first_site, second_site, advice
        # All arguments, here and in the classes below: exceptions are pickled by them, and the text is made where it is shown.
        super().__init__(name, first_site, second_site, advice)

    def _text(self) -> str:
        return (
            f"`{visible(self.name)}` was submitted at {visible(self.second_site)} while the one submitted at "
            f"{visible(self.first_site)} "
            f"is still in flight; {self.advice}"
        )


class ReleasedError(HvdlabError):
    """The coordinator has released this rank: the other ranks continue without it."""


class StartError(HvdlabError):
    """The coordinator, a rank or a plane could not start."""


class ProtocolError(HvdlabError):
    """A peer sent bytes that the protocol does not allow; its connection is closed."""


class KVStoreError(HvdlabError):
    """A key-value store refused a call. The store is as it was before, and works.

    In a process that has imported :mod:`hvdlab.mxnet` it is an ``mx.MXNetError`` as well, which MXNet's programs catch.

    Args:
        text: The whole text.
        key: The key that it is about, if it is about one.

    Attributes:
        key: The key that it is about, or ``None``.
    """

    #: The error of a framework that all errors of stores in this process are instances of, too.
    _framework: ClassVar[type[Exception] | None] = None

    def __new__(cls, *args: object) -> Self:
        klass = cls if cls._framework is None else cast("type[Self]", _also(cls, cls._framework))
        return super().__new__(klass, *args)

    @staticmethod
    def count_as(framework: type[Exception]) -> None:
        """Make all errors of stores that this process raises from now on instances of a framework's error, too.

        Args:
            framework: The class of that error. Its instances must have no state of their own.
        """
        KVStoreError._framework = framework

    def __init__(self, text: str, key: int | str | None = None) -> None:
        self.key = key
        super().__init__(text, key)

    def _text(self) -> str:
        return str(self.args[0])


#: Classes of :func:`_also`, by the identities of its arguments: all errors of one pair have one class.
_ALSO: dict[tuple[int, int], type[KVStoreError]] = {}


def _also(klass: type[KVStoreError], framework: type[Exception]) -> type[KVStoreError]:
    """Return a class of the same name, with instances that are errors of the framework as well."""
    known = _ALSO.get((id(klass), id(framework)))  # both live as long as the class below
    if known is not None:
        return known

    def reduce(self: KVStoreError) -> tuple[Any, ...]:
        return (klass, self.args)  # a process without the framework reads it as well

    members = {"__module__": klass.__module__, "__doc__": klass.__doc__, "__reduce__": reduce}
    made = cast("type[KVStoreError]", type(klass.__name__, (klass, framework), members))
    # Two threads can come here at the same time; both return the class of the first.
    return _ALSO.setdefault((id(klass), id(framework)), made)


class CollectiveError(HvdlabError):
    """A submitted collective failed. Output buffers are undefined, the group remains usable."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Request that some ranks agree on, one of several under one name.

    Attributes:
        ranks: The ranks that agree with each other.
        request: Their request in words, such as ``allreduce float32[10, 4] sum``.
        site: Where one of them made it, such as ``cell [7] line 4``.
    """

    ranks: tuple[int, ...]
    request: str
    site: str


class MismatchError(CollectiveError):
    """Ranks disagree about a collective. Raised on every rank of the process set, with the same text.

    Attributes:
        name: Tensor name.
        process_set: Id of its process set.
        groups: One entry for each of the different requests.
    """

    def __init__(self, name: str, process_set: int, groups: Sequence[Disagreement]) -> None:
        self.name, self.process_set, self.groups = name, process_set, tuple(groups)
        super().__init__(name, process_set, self.groups)

    def _text(self) -> str:
        parts = [f"{format_ranks(g.ranks)} ({visible(g.site)}): {visible(g.request)}" for g in self.groups]
        return (
            f"`{visible(self.name)}`: the ranks disagree. " + "; ".join(parts) + ". "
            "Every rank must give the same operation, dtype, shape, operator and root for one name; "
            "the group is intact and can go on."
        )


class JoinedRanksError(CollectiveError):
    """The collective needs data of every rank, and some have joined. Raised on all ranks that submitted it.

    Other collectives are not affected: ranks that have joined stay so, and the group continues.

    Attributes:
        name: Tensor name.
        process_set: Id of its process set.
        joined: The ranks that have joined.
        reason: One sentence for the user.
    """

    def __init__(self, name: str, process_set: int, joined: Sequence[int], reason: str) -> None:
        self.name, self.process_set, self.joined, self.reason = name, process_set, tuple(joined), reason
        super().__init__(name, process_set, self.joined, reason)

    def _text(self) -> str:
        return f"{visible(self.reason)}."


class CauseKind(StrEnum):
    """Kind of cause that ended a generation."""

    RANK_DIED = "rank_died"
    RANK_LEFT = "rank_left"
    CELL_FAILED = "cell_failed"
    CELL_ENDED = "cell_ended"
    INTERRUPTED = "interrupted"
    WITHDRAWN = "withdrawn"
    MISMATCH = "mismatch"
    DEADLOCK = "deadlock"
    PLANE_FAILED = "plane_failed"
    MEMBERSHIP = "membership"
    TIMEOUT = "timeout"
    COORDINATOR_LOST = "coordinator_lost"
    SHUTDOWN = "shutdown"

    @property
    def is_loss(self) -> bool:
        """Return whether the next generation has fewer members, so that each program has to raise the cause before it goes on."""
        return self in _LOSSES

    @property
    def advice(self) -> str:
        """Return the advice on the likely mistake and its remedy; empty if the cause's text has it."""
        return _ADVICE[self]


_LOSSES = frozenset((CauseKind.RANK_DIED, CauseKind.RANK_LEFT, CauseKind.MEMBERSHIP))

_ADVICE = {
    CauseKind.RANK_DIED: "Look at how it ended, and run this again: the group goes on with the ranks that live.",
    CauseKind.RANK_LEFT: (
        "Probably it had less to do than the others: give every rank equally many collectives, or call join() where "
        "a rank has no more data."
    ),
    CauseKind.CELL_FAILED: "Correct that error and run the cell again on all ranks; the group is intact.",
    CauseKind.CELL_ENDED: (
        "Every rank must call it: probably an `if` or a loop went another way there, or its cell did not run on all "
        "ranks. For some ranks only, use a process set. The group is intact."
    ),
    CauseKind.INTERRUPTED: "The group is intact; run this again.",
    CauseKind.WITHDRAWN: "What that rank reports says what to correct; the group is intact.",
    CauseKind.MISMATCH: "Every rank must give the same tensors, in the same groups; the group is intact.",
    CauseKind.DEADLOCK: "Call them in the same order on every rank; the group is intact.",
    CauseKind.PLANE_FAILED: (
        "The group was rebuilt; run this again. If it fails again, set HVDLAB_PLANE to another plane."
    ),
    CauseKind.MEMBERSHIP: "Run this again with the ranks and process sets that there are now.",
    CauseKind.TIMEOUT: "Find out what kept the others, or raise that limit; the group is intact.",
    CauseKind.COORDINATOR_LOST: "",
    CauseKind.SHUTDOWN: "Call init() to go on.",
}


@dataclass(frozen=True, slots=True)
class Cause:
    """Cause of the end of a generation of a process set; a generation has one.

    Attributes:
        kind: Kind of event.
        ranks: The ranks it happened on, or that are missing; empty if it is not a matter of single ranks.
        text: One sentence for the user.
        site: The line of code that caused it, if known (``cell [7] line 4``).
        decision: Number of the entry in the coordinator's decision log; 0 if the coordinator did not end it. Causes that differ in it
            alone are equal.
    """

    kind: CauseKind
    ranks: tuple[int, ...] = ()
    text: str = ""
    site: str = ""
    decision: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Pending:
    """Collective that was pending when its generation ended.

    Attributes:
        collective: Kind in words, such as ``allreduce``.
        name: Tensor name.
        waited: Ranks that had submitted it.
        missing: Ranks that had not.
        sites: Rank to call site of those that waited.
    """

    collective: str
    name: str
    waited: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    sites: dict[int, str] = field(default_factory=dict)


class AbortedError(CollectiveError):
    """The collective can't complete; raised on every rank that had submitted it.

    If the process set has lost a member, the other ranks raise it as well, once each: with their next collective. A program can catch it and go
    on with the members that are left.

    The process set gets a new generation: the next collective works, with the same ranks if none died.

    The first line of its text names the event, the second the remedy.

    Attributes:
        pending: The collective.
        cause: The reason for which its generation has ended.
        process_set: Id of its process set.
        generation: The generation that has ended.
    """

    def __init__(self, pending: Pending, cause: Cause, process_set: int = 0, generation: int = 0) -> None:
        self.pending, self.cause, self.process_set, self.generation = pending, cause, process_set, generation
        super().__init__(pending, cause, process_set, generation)
        self.because_of(cause.decision)

    @property
    def rank(self) -> int | None:
        """Return the first rank of the cause, if it has one."""
        return self.cause.ranks[0] if self.cause.ranks else None

    def _text(self) -> str:
        p = self.pending
        site = next(iter(p.sites.values()), "")
        head = call_name(p.collective, p.name) + (f" ({visible(site)})" if site else "")
        waited = f"{format_ranks(p.waited)} waited; " if p.waited and p.missing else ""
        tail = f" (at {visible(self.cause.site)})" if self.cause.site else ""
        advice = f"\n{self.cause.kind.advice}" if self.cause.kind.advice else ""
        return f"{head}: {waited}{visible(self.cause.text)}{tail}{advice}"


_UNNAMED = re.compile(r"\w+\.noname(?:\.(\d+))?")
"""The name that a tensor without one has on the wire, with its number in a group."""


def call_name(kind: str, name: str) -> str:
    """Return the call as ``allreduce `loss```; only the kind for a tensor that was given no name.

    Args:
        kind: The collective, such as ``allreduce``.
        name: The tensor's name in the core.
    """
    return kind if name == f"{kind}.noname" else f"{kind} `{visible(name)}`"


def shown_name(name: str) -> str:
    """Return the name of a tensor as views show it: empty for one that was given none, ``tensor 3`` in a group of such.

    Args:
        name: The tensor's name in the core.
    """
    unnamed = _UNNAMED.fullmatch(name)
    if unnamed is None:
        return name
    return f"tensor {unnamed[1]}" if unnamed[1] else ""
