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
    """Output of a rank; ``total`` counts all bytes of this cell so far."""

    rank: int
    chunks: tuple[Chunk, ...]
    total: int


@dataclass(frozen=True, slots=True)
class DoneArrived:
    """Report of a rank that the cell has ended on it.

    Attributes:
        rank: The rank.
        done: The report.
        host: The rank's host if that has another clock than this process; empty otherwise.
        when: ``time.monotonic_ns()`` when the report came here, from such a host.
    """

    rank: int
    done: CellDone
    host: str = ""
    when: int = 0


@dataclass(frozen=True, slots=True)
class RankDied:
    """End of a rank.

    Attributes:
        rank: The rank.
        reason: The reason, which reads after the rank's name, such as ``killed by SIGKILL``.
        when: ``time.monotonic_ns()`` when this process learned of the end.
        tail: The end of its standard error that was left unread.
        detail: More about its end, such as its peak memory.
        left: Whether it has left by the pool's order.
    """

    rank: int
    reason: str
    when: int
    tail: str = ""
    detail: str = ""
    left: bool = False


@dataclass(frozen=True, slots=True)
class RanksJoined:
    """Report that the pool has sent the cell to these ranks as well, which came later. Only of elastic cells."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RanksReleased:
    """Report that these ranks leave at the next commit of the elastic training. Only of elastic cells."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Takeover of an elastic cell that another process has begun.

    Attributes:
        leaving: Ranks that leave at the next commit.
    """

    leaving: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InterruptRequested:
    """Interrupt of the cell by the user.

    Attributes:
        delay: Seconds until the ranks are interrupted, unless :class:`PoolReleased` comes before.
    """

    delay: float = 0.0


@dataclass(frozen=True, slots=True)
class PoolReleased:
    """Detachment of this process from its ranks, which go on: delayed interrupts were not the user's, and are dropped."""


@dataclass(frozen=True, slots=True)
class DeadlineReached:
    """Passing of :attr:`CellState.deadline`."""


@dataclass(frozen=True, slots=True)
class PoolNews:
    """Line about the pool that the user should read under the cell."""

    text: str


@dataclass(frozen=True, slots=True)
class CollectiveStalled:
    """Report of the coordinator that a collective has been waiting for long; it may be another cell's."""

    stall: Stall


@dataclass(frozen=True, slots=True)
class StackArrived:
    """Answer of a rank to :class:`AskStacks`."""

    rank: int
    stack: Stack


@dataclass(frozen=True, slots=True)
class ProcessSeen:
    """Finding about a rank's process, as it reads after ``rank 2: ``."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class PromptAsked:
    """Question of a rank to the user."""

    rank: int
    request: PromptRequest


@dataclass(frozen=True, slots=True)
class PromptCancelled:
    """Withdrawal of a rank's question: it does not wait for the answer any more."""

    rank: int
    number: int


@dataclass(frozen=True, slots=True)
class AtPrompts:
    """All ranks that wait for the user now."""

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
    """Order to give these chunks to the sink."""

    rank: int
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class SendAcknowledge:
    """Order to acknowledge ``taken`` bytes of the rank's output, so that the rank can write on."""

    rank: int
    taken: int


@dataclass(frozen=True, slots=True)
class InterruptCell:
    """Order to raise KeyboardInterrupt on these ranks."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankBegan:
    """Notice to the sink that this rank writes from now on; it may have ended before."""

    rank: int


@dataclass(frozen=True, slots=True)
class RankEnded:
    """Notice to the sink that this rank's output is complete; ``done`` is None if the rank died or was given up."""

    rank: int
    done: CellDone | None


@dataclass(frozen=True, slots=True)
class Note:
    """Order to show the user one line; ``warning`` if it reports a failure."""

    text: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class AskStacks:
    """Order to ask these ranks for their stacks. A rank can belong to another cell, and :class:`ProcessSeen` be the answer."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LookAt:
    """Order to look at the processes of these ranks, which do not answer."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShowStatus:
    """Order to show the cell's waiting ranks in place of the last such text; an empty ``text`` removes it.

    ``final`` is True if the text stays as it is for as long as the cell waits for the same.
    """

    text: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """End of the run; no effect follows."""

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
