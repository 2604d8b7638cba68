"""What a :class:`~hvdlab.kernel_ext.debugger.multiplex.Multiplexer` hears, and what it wants done."""

from __future__ import annotations

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
class Wanted:
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
    """The frontend has waited long enough: answer with what there is."""

    key: int


@dataclass(frozen=True, slots=True)
class Reminded:
    """The time that :class:`Remind` asked for has passed."""


Event = Requested | LocalReplied | Wanted | RankOpened | RankSaid | RankGone | Expired | Reminded


@dataclass(frozen=True, slots=True)
class AskLocal:
    """Let the kernel's own debugger answer this."""

    key: int
    request: Json


@dataclass(frozen=True, slots=True)
class OpenRank:
    """Have this rank start its debug server."""

    rank: int


@dataclass(frozen=True, slots=True)
class CloseRank:
    """Have this rank end its session: what is stopped goes on."""

    rank: int


@dataclass(frozen=True, slots=True)
class ToRank:
    """Send this to a rank's debug server."""

    rank: int
    message: Json


@dataclass(frozen=True, slots=True)
class Reply:
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


Effect = AskLocal | OpenRank | CloseRank | ToRank | Reply | Publish | Remind
