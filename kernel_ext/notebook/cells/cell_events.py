"""Events of a running cell, and effects, which the thread that drives it carries out.

:class:`~hvdlab.kernel_ext.notebook.cells.cell_state.CellState` takes events and returns effects; it does no I/O and knows no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvdlab.kernel_ext.wire.cells import CellDone, Chunk, PromptRequest
from hvdlab.kernel_ext.wire.status import Stack

if TYPE_CHECKING:
    from hvdlab.collectives.types import Stall
    from hvdlab.kernel_ext.notebook.cells.results import CellResults

# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OutputArrived:
    """A rank wrote; ``total`` counts all bytes of this cell so far."""

    rank: int
    chunks: tuple[Chunk, ...]
    total: int


@dataclass(frozen=True, slots=True)
class DoneArrived:
    """The cell ended on a rank."""

    rank: int
    done: CellDone


@dataclass(frozen=True, slots=True)
class RankDied:
    """A rank is gone. ``reason`` reads after the rank's name, such as ``killed by SIGKILL``.

    ``when`` is ``time.monotonic_ns()`` at which the death was seen, ``tail`` the end of its standard error that was left
    unread, ``detail`` what else is known, such as its peak memory. ``left`` says that it has left as the pool wanted.
    """

    rank: int
    reason: str
    when: int
    tail: str = ""
    detail: str = ""
    left: bool = False


@dataclass(frozen=True, slots=True)
class RanksJoined:
    """The pool has sent the cell to these ranks as well, which came later. Only of elastic cells."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RanksReleased:
    """These ranks leave at the next commit of the elastic training. Only of elastic cells."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Another process has begun the elastic cell, and this one goes on with it.

    Attributes:
        leaving: Ranks that leave at the next commit.
    """

    leaving: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InterruptRequested:
    """The user wants the cell to end.

    Attributes:
        delay: Seconds until the ranks are interrupted, unless :class:`PoolReleased` comes before.
    """

    delay: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolReleased:
    """This process lets go of its ranks, which go on: delayed interrupts were not the user's, and are dropped."""


@dataclass(frozen=True, slots=True)
class DeadlineReached:
    """:attr:`CellState.deadline` was reached."""


@dataclass(frozen=True, slots=True)
class PoolNews:
    """Something happened to the pool that the user should read under the cell, in one line."""

    text: str


@dataclass(frozen=True, slots=True)
class CollectiveStalled:
    """The coordinator says that a collective has been waiting for long; it may be another cell's."""

    stall: Stall


@dataclass(frozen=True, slots=True)
class StackArrived:
    """A rank answered :class:`AskStacks`."""

    rank: int
    stack: Stack


@dataclass(frozen=True, slots=True)
class ProcessSeen:
    """Finding about a rank's process, as it reads after ``rank 2: ``."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class PromptAsked:
    """A rank asks the user."""

    rank: int
    request: PromptRequest


@dataclass(frozen=True, slots=True)
class PromptCancelled:
    """A rank does not wait for the answer to this question any more."""

    rank: int
    number: int


@dataclass(frozen=True, slots=True)
class AtPrompts:
    """These ranks wait for the user now, and no others do."""

    ranks: tuple[int, ...]


Event = (
    OutputArrived
    | DoneArrived
    | RankDied
    | RanksJoined
    | RanksReleased
    | TakenOver
    | InterruptRequested
    | PoolReleased
    | DeadlineReached
    | PoolNews
    | CollectiveStalled
    | StackArrived
    | ProcessSeen
    | PromptAsked
    | PromptCancelled
    | AtPrompts
)

# -- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Deliver:
    """Give these chunks to the sink."""

    rank: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class SendAcknowledge:
    """Tell the rank that ``taken`` bytes of its output were taken, so that it may write on."""

    rank: int
    taken: int


@dataclass(frozen=True, slots=True)
class InterruptCell:
    """Raise KeyboardInterrupt on these ranks."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankBegan:
    """Tell the sink that this rank writes from now on; it may have ended before."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankEnded:
    """Tell the sink that nothing more comes from this rank; ``done`` is None if it died or was given up."""

    rank: int
    done: CellDone | None


@dataclass(frozen=True, slots=True)
class Note:
    """Show the user one line; ``warning`` if it tells of something that went wrong."""

    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class AskStacks:
    """Ask these ranks where they are. They may belong to another cell, and :class:`ProcessSeen` may be the answer."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LookAt:
    """Look at the processes of these ranks, which do not answer."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShowStatus:
    """Show what the cell waits for, in place of what was shown before; nothing if ``text`` is empty.

    ``final`` is True if it will not change any more, unless the cell waits for something else later.
    """

    text: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """The run is over; no effect follows."""

    results: CellResults


Effect = (
    Deliver
    | SendAcknowledge
    | InterruptCell
    | RankBegan
    | RankEnded
    | Note
    | AskStacks
    | LookAt
    | ShowStatus
    | Finished
)
