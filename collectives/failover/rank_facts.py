"""Facts that only ranks know, and that each keeps for a successor of the coordinator. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from hvdlab.collectives.engine.process_set_view import SetState
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import OpKind

ENDED_CELLS = 16
"""Ends of cells that a rank reports to a successor again: perhaps the coordinator died before it had passed them on."""


class FailoverFacts:
    """Facts for a successor. Its fields belong to the rank's state.

    Attributes:
        sets: Ranks of the process sets that were added in this world, by id, also of those without this rank.
        regroup: The unanswered ``Regroup`` of this rank's elastic training, or ``None``.
        paused: Reasons for which the user has paused this rank, the latest last; empty if it is not paused.
    """

    def __init__(self) -> None:
        self.sets: dict[int, tuple[int, ...]] = {}
        self.regroup: m.Regroup | None = None
        self.paused: tuple[str, ...] = ()
        #: The highest id of a process set that this rank has seen: a successor must not use it again.
        self._last_set = 0
        #: Ranks of the additions of process sets that failed with the coordinator.
        self._adding: tuple[tuple[int, ...], ...] = ()
        #: Ids of the removals that failed with it.
        self._removing: tuple[int, ...] = ()
        #: Cells that run here, in order.
        self._cells: dict[str, None] = {}
        #: The last cells that have ended here, each with the line of its failure.
        self._ended: deque[tuple[str, str]] = deque(maxlen=ENDED_CELLS)

    # -- events ---------------------------------------------------------------------------------------------------

    def added(self, process_set: int, ranks: tuple[int, ...]) -> None:
        """Record that a process set was added, on all ranks."""
        self.sets[process_set] = ranks
        self._last_set = max(self._last_set, process_set)

    def dissolved(self, process_set: int) -> None:
        """Record that a process set was removed."""
        self.sets.pop(process_set, None)
        self._last_set = max(self._last_set, process_set)

    def cell_began(self, cell: str) -> None:
        """Record that a cell runs here."""
        self._cells[cell] = None

    def cell_ended(self, cell: str, error: str) -> None:
        """Record that a cell has ended here."""
        self._cells.pop(cell, None)
        self._ended.append((cell, error))

    def record_failed_additions(self, group: SetState) -> None:
        """Record the additions and removals that were pending in ``group`` when the coordinator was lost: they failed with it."""
        self._last_set = max(self._last_set, group.id)
        for entry in group.pending:
            request = entry.request
            # Added up until a successor has restored the world: one can die before that, and the next needs all of them.
            if request.kind is OpKind.ADD_PROCESS_SET:
                self._adding += (tuple(request.ranks),)
            elif request.kind is OpKind.REMOVE_PROCESS_SET:
                self._removing += (request.root,)

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the cells that run here."""
        return tuple(self._cells)

    # -- facts for the successor ----------------------------------------------------------------------------------

    def resume_message(
        self, groups: Mapping[int, SetState], alive: tuple[int, ...], *, elastic: bool, released: bool
    ) -> m.Resume:
        """Return the message from which a successor restores the world.

        Args:
            groups: Process sets that this rank is or was in, by id.
            alive: Ranks that lived, as far as this rank knows.
            elastic: Whether this rank is in elastic training.
            released: Whether this rank leaves where that lets the world change.
        """
        known = []
        world = groups.get(0)
        if world is not None and world.index >= 0:
            pids = tuple(member.pid for member in world.members)
            known.append(m.KnownSet(0, world.generation, world.ranks, pids))
        for id, ranks in self.sets.items():
            group = groups.get(id)
            mine = group is not None and group.index >= 0
            known.append(
                m.KnownSet(id, group.generation, group.ranks) if group and mine else m.KnownSet(id, 0, ranks)
            )
        return m.Resume(
            tuple(known),
            alive,
            self._last_set,
            self._adding,
            self._removing,
            self.cells,
            tuple(self._ended),
            # One that has regrouped is not in training any more: it sends its Regroup again behind this message.
            elastic and self.regroup is None,
            released,
        )

    def restored(self) -> None:
        """Forget the additions and removals that failed: the successor has undone or done them, and the world is complete again."""
        self._adding, self._removing = (), ()
