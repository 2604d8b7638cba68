"""Events and effects of a :class:`~hvdlab.kernel_ext.notebook.debugger.multiplexer.Multiplexer`, and numbers unique for its frontend.

Every rank counts its own threads, frames and variables from one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
"""A message of the Debug Adapter Protocol."""


@dataclass(frozen=True, slots=True)
class Requested:
    """The frontend has sent a request, which the hub numbers ``key``. ``local_stopped``: the kernel itself has stopped."""

    key: int
    request: Json
    local_stopped: bool = False


@dataclass(frozen=True, slots=True)
class LocalReplied:
    """The kernel's own debugger has answered."""

    key: int
    reply: Json


@dataclass(frozen=True, slots=True)
class SetDebuggedRanks:
    """These ranks are there and should be debugged, if the debugger is on."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankOpened:
    """A rank's debug server listens."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankSaid:
    """A rank's debug server has sent a message."""

    rank: int
    message: Json


@dataclass(frozen=True, slots=True)
class RankGone:
    """A rank has ended, or can't be debugged (``refused``)."""

    rank: int
    reason: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Expired:
    """Passing of a request's time limit: answer with the replies that have come."""

    key: int


@dataclass(frozen=True, slots=True)
class Reminded:
    """Passing of the time that :class:`Remind` asked for."""


Event = Requested | LocalReplied | SetDebuggedRanks | RankOpened | RankSaid | RankGone | Expired | Reminded


@dataclass(frozen=True, slots=True)
class AskLocal:
    """Order to have the kernel's own debugger answer this request."""

    key: int
    request: Json


@dataclass(frozen=True, slots=True)
class OpenRank:
    """Order to have this rank start its debug server."""

    rank: int


@dataclass(frozen=True, slots=True)
class CloseRank:
    """Order to have this rank end its session: its stopped threads go on."""

    rank: int


@dataclass(frozen=True, slots=True)
class ToRank:
    """Send this to a rank's debug server."""

    rank: int
    message: Json


@dataclass(frozen=True, slots=True)
class ReplyToFrontend:
    """The answer for the frontend."""

    key: int
    response: Json


@dataclass(frozen=True, slots=True)
class Publish:
    """An event for the frontend."""

    event: Json


@dataclass(frozen=True, slots=True)
class Remind:
    """A rank steps: send :class:`Reminded` after a moment."""


Effect = AskLocal | OpenRank | CloseRank | ToRank | ReplyToFrontend | Publish | Remind

FIRST = 1 << 30
"""The kernel's own numbers, which are passed on as they are, are far below this."""


class Numbers:
    """Gives (rank, number) pairs numbers that are unique among the ranks and the kernel."""

    def __init__(self) -> None:
        self._next = itertools.count(FIRST)
        #: Rank and its own number to the number that the frontend knows, and below the reverse.
        self._given: dict[tuple[int, int], int] = {}
        self._meant: dict[int, tuple[int, int]] = {}

    def assign(self, rank: int, number: int) -> int:
        """Return the number that a frontend gets for a rank's own one; the same each time."""
        pair = (rank, number)
        given = self._given.get(pair)
        if given is None:
            given = self._given[pair] = next(self._next)
            self._meant[given] = pair
        return given

    def resolve(self, given: object) -> tuple[int, int] | None:
        """Return the rank and its own number that a frontend means; None if the number is not from here, or was dropped."""
        return self._meant.get(given) if isinstance(given, int) else None

    def is_assigned(self, given: object) -> bool:
        """Return whether this number was ever given, even if it was dropped since."""
        return isinstance(given, int) and given >= FIRST

    def drop(self, rank: int) -> None:
        """Forget the numbers of a rank. They are not given again."""
        for pair in [pair for pair in self._given if pair[0] == rank]:
            del self._meant[self._given.pop(pair)]

    def drop_one(self, rank: int, number: int) -> None:
        """Forget one number of a rank."""
        given = self._given.pop((rank, number), None)
        if given is not None:
            del self._meant[given]
