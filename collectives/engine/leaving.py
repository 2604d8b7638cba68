"""Before a rank leaves: it finishes what it executes, since the other members are in the middle of that, too."""

from __future__ import annotations

from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.engine.entries import EXECUTING
from hvdlab.collectives.engine.handles import Handle
from hvdlab.collectives.engine.locked_state import GuardedState
from hvdlab.collectives.engine.rank_state import RankState
from hvdlab.collectives.errors import CauseKind


def settle(guarded: GuardedState, rank: int, why: str, deadline: Deadline | None) -> None:
    """Wait for what is executing, then give up on all ranks what is left.

    The coordinator may be ordering at this very moment what was only announced; other ranks would then wait for this one in the
    plane, so that is given up, too. Nothing may be submitted meanwhile.

    Args:
        guarded: The rank's state.
        rank: This rank.
        why: Why it leaves, as the other ranks read it.
        deadline: How long to wait; ``None``, without a wait, if the calling thread is needed for the operations to end.
    """
    try:
        if deadline is not None:
            _finish(guarded, deadline)
    finally:
        guarded.tell(lambda state: _give_up(state, f"rank {rank} left the job ({why})"))


def _finish(guarded: GuardedState, deadline: Deadline) -> None:
    executing: list[Handle] = []

    def look(state: RankState) -> None:
        executing[:] = [
            entry
            for group in state.sets.values()
            for entry in group.pending
            if entry.phase == EXECUTING and isinstance(entry, Handle)
        ]

    guarded.tell(look)
    while executing:
        for handle in executing:
            left = deadline.remaining()
            if not handle.ended.acquire(timeout=-1 if left is None else left):
                return
            handle.open()
        guarded.tell(look)


def _give_up(state: RankState, text: str) -> None:
    for group in list(state.sets.values()):
        group.retire_seat()
        if group.pending:
            state.withdraw(group.id, CauseKind.RANK_LEFT, text)
