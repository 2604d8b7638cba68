"""Oracle of losses: each program gets an error for a lost member before it goes on in the smaller world."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdlab.collectives.errors import AbortedError
from hvdlab.collectives.protocol import messages as m
from support.simulation.joint_ranks import Scope, SimEntry, SimRank

if TYPE_CHECKING:
    from support.simulation.joint_simulation import Simulation

_BEGINNING = -1.0  # before every generation


class Losses:
    """Losses of members, and the programs that have raised them.

    A program is a cell, or all that a rank does if its collectives belong to no cells.

    Args:
        simulation: The job.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        #: For each generation that lacks dead members of the one before: the number of that, and the processes of these and of the others.
        self._before: dict[Scope, tuple[int, frozenset[int], frozenset[int]]] = {}
        #: By process and set: the newest generation whose end the program knows of; half a generation earlier, whose beginning.
        self._known: dict[tuple[int, int], float] = {}

    def generation_begins(self, message: m.Configure, before: int) -> None:
        """Record which members of the last generation are missing because they have died."""
        id, there = message.process_set, {member.pid for member in message.members}
        ranks = self._simulation.by_pid
        former = [ranks[pid] for pid in self._simulation.generations.get((id, before), ())]
        lost = frozenset(
            me.pid for me in former if me.pid not in there and (me.killed or me.cut) and self._stays(me)
        )
        if lost:
            # The lost ranks themselves are left out: one that was cut off and comes back raises the loss of the coordinator.
            self._before[id, message.generation] = before, lost, frozenset(me.pid for me in former) - lost

    def _stays(self, me: SimRank) -> bool:
        """Whether no change in order has left this rank out."""
        expected = self._simulation.coordinator.membership.expected
        return expected is None or me.rank in expected

    def _heard_of(self, me: SimRank, id: int, generation: int) -> frozenset[int]:
        """Return the members of the newest generation, up to this one, that has come to a rank."""
        came = max((each for of, each in me.members if of == id and each <= generation), default=None)
        return frozenset() if came is None else frozenset(me.members[id, came])

    def program_begins(self, me: SimRank) -> None:
        """Record that a program begins on a rank, in the generations of now."""
        for id, group in me.state.sets.items():
            self._known[me.pid, id] = group.generation - 0.5 if group.configured else group.generation

    def ended(self, me: SimRank, entry: SimEntry, outcome: object) -> None:
        """Check, at the end of a collective, that the program knows of all losses before it."""
        id = entry.request.process_set
        known = self._known.get((me.pid, id), _BEGINNING)
        if isinstance(outcome, AbortedError):
            group = me.state.sets.get(id)
            if outcome.cause.kind.is_loss and group is not None:
                now = group.generation - 0.5 if group.configured else group.generation
                self._known[me.pid, id] = max(known, now)
        elif isinstance(outcome, tuple) and outcome[0] in ("done", "agreed") and not me.state.elastic:
            there = self._simulation.generations.get((id, entry.generation), ())
            for (of, generation), (before, lost, others) in self._before.items():
                if of != id or me.pid not in others or not known < before < generation <= entry.generation:
                    continue
                if (lost - {*there}) & self._heard_of(me, id, before):
                    raise AssertionError(
                        f"rank {me.rank} goes on with {entry.name} in generation {entry.generation} of {id}, and has not raised "
                        f"the loss after generation {before}"
                    )
