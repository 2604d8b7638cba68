"""A successor's first task: to restore the world of the coordinator that died, from what its ranks and its client tell.

The successor decides nothing before all ranks have come that lived when the other one died: collectives of some would else wait for
ranks that are on their way, or fail for their absence. A rank that has not come after a while counts as dead. Process sets keep their
ids; epochs go on above all that were, so that no message to or from the dead coordinator can be taken for a new one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdlab.collectives.coordinator.events import CloseConnection
from hvdlab.collectives.coordinator.membership import MembershipTable, RankPeer
from hvdlab.collectives.protocol import messages as m

if TYPE_CHECKING:
    from hvdlab.collectives.coordinator.state import CoordinatorState

EPOCHS = 1 << 20
"""Distance between the first epochs of two generations of the coordinator."""

REMEMBERED = 4096
"""Ends of cells that are remembered, in case the client tells that they still run."""


class Restoring:
    """Facts from ranks and the client so far, of which a successor restores its world.

    Args:
        generation: How many coordinators have died before this one.
        seconds: How long to wait for the ranks that lived then.

    Attributes:
        active: Whether the world is still being restored. Until it is, no process set has an epoch.
        due: When waiting is over at the latest; ``None`` until the first event.
        recalled: Whether a client has told what it knew.
        released: Ranks that are to be let go where elastic training lets the world change, once it is there.
    """

    def __init__(self, generation: int, seconds: float) -> None:
        self.generation = generation
        self.active = generation > 0
        self.due: float | None = None
        self.recalled = False
        self.released: set[int] = set()
        self.seconds = seconds
        self.resumed: dict[int, m.Resume] = {}
        self.alive: dict[int, int] = {}  # pid, or 0, of ranks that lived, as ranks and the client say
        self.cells: tuple[tuple[str, tuple[int, ...]], ...] = ()
        self.ran_in: dict[int, int] = {}  # the processes that the client knew then
        self.renewed: set[int] = set()  # ranks that another process has come for meanwhile
        self.ended: dict[
            tuple[str, int], None
        ] = {}  # the newest (cell, rank) of which the rank has said that the cell has ended

    def begin(self, now: float) -> None:
        """Start the clock at the first event."""
        if self.active and self.due is None:
            self.due = now + self.seconds

    def take(self, rank: int, said: m.Resume) -> None:
        """A rank has told what it knew."""
        self.resumed[rank] = said
        for other in said.alive:
            self.alive.setdefault(other, 0)

    def cell_ended(self, cell: str, rank: int) -> None:
        """A cell has ended on a rank. The client may not know that yet, even if it has told already what it knows.

        The coordinator may first read a connection that the client has given up, so the client can tell twice; and a connection that
        was lost while the coordinator lived may have taken the news of the end with it.
        """
        self.ended[cell, rank] = None
        if len(self.ended) > REMEMBERED:
            del self.ended[next(iter(self.ended))]

    def drop(self, rank: int) -> None:
        """A rank has come, and is gone again."""
        self.resumed.pop(rank, None)
        self.alive.pop(rank, None)

    def awaited(self, membership: MembershipTable) -> list[int]:
        """Ranks that lived and have not come, and that still have a place in the world."""
        known = self.resumed.keys() | membership.deaths.keys() | self.renewed
        expected = membership.expected
        return sorted(r for r in self.alive if r not in known and (expected is None or r in expected))


def on_resume(state: CoordinatorState, rank: RankPeer, message: m.Resume, now: float) -> None:
    """A rank that knew an earlier coordinator tells what it knows. If the world is there already, the rank is like any newcomer."""
    for cell, error in message.ended:
        if rank.tracked:
            state.restoring.cell_ended(cell, rank.rank)
            state.cells.end(cell, rank.rank, error)
    for cell in message.cells:
        if rank.tracked:
            state.cells.begin(cell, rank.rank)
    if message.elastic:
        state.elastic.training.add(rank.rank)
    state.admission.due = True
    if state.restoring.active:
        if message.released:
            state.restoring.released.add(rank.rank)
        state.restoring.take(rank.rank, message)
        return
    for known in message.sets:
        if known.id > 0:
            state.effects.send((rank.peer,), m.Dissolve(known.id))


def on_recall(state: CoordinatorState, peer: int, message: m.Recall, now: float) -> None:
    """The client tells what it knows from the coordinator before, or from this one over another connection."""
    for death in message.deaths:
        back = state.membership.ranks.get(death.rank)
        if back is not None and back.pid == death.pid:  # the others have gone on without it
            state.effects.add(CloseConnection(back.peer))
            state.peer_lost(back.peer, death.reason, now)
    state.admission.set_expected(message.expected)
    state.membership.restore_deaths(message.deaths)
    restoring = state.restoring
    restoring.recalled = True
    restoring.cells = message.cells
    restoring.ran_in = {member.rank: member.pid for member in message.members}
    if restoring.active:
        for member in message.members:
            restoring.alive[member.rank] = member.pid
    else:
        _begin_cells(state)
    state.admission.scale_down(message.released)
    state.admission.due = True


def end_wait(state: CoordinatorState, now: float) -> None:
    """Restore the world if all awaited ranks have come, or waiting has lasted long enough."""
    restoring, membership = state.restoring, state.membership
    missing = restoring.awaited(membership)
    if restoring.due is None or now < restoring.due:
        known = restoring.recalled or (state.options.size is not None and restoring.resumed)
        if missing or not known:
            return
    restoring.active = False
    for rank in missing:
        reason = (
            f"it did not come back within {restoring.seconds:g} s after the coordinator had died and a new one "
            "had taken over"
        )
        membership.record_death(rank, restoring.alive[rank], reason, now, explained=False, admitted=True)
    if membership.expected is None and state.elastic.active:
        # No client may come for long, if the notebook of a kept pool has ended together with the coordinator: the ranks train on.
        membership.set_expected({*membership.ranks, *membership.deaths})
        membership.awaited -= membership.deaths.keys()
    _restore_sets(state)
    _begin_cells(state)
    # A rank that has not resumed is dead, or another process than the one that was to be let go.
    state.admission.scale_down(tuple(restoring.resumed.keys() & restoring.released))
    membership.changed = membership.urgent = state.admission.due = True
    count = len(restoring.resumed)
    state.effects.note(f"took over from coordinator {restoring.generation - 1} with {count} ranks")
    restoring.resumed, restoring.alive = {}, {}


def _restore_sets(state: CoordinatorState) -> None:
    restoring = state.restoring
    newest: dict[int, m.KnownSet] = {}
    for said in restoring.resumed.values():
        for known in said.sets:
            if known.id not in newest or newest[known.id].epoch < known.epoch:
                newest[known.id] = known
    kept: dict[int, tuple[int, ...]] = {}
    for id, known in sorted(newest.items()):
        members = tuple(rank for rank in known.ranks if rank in restoring.resumed)
        if id == 0:
            members = _same_processes(state, known, members)
        if members and _stands(known, members, restoring):
            kept[id] = members
            # A rank that was cut off when the others went on without it is no member any more, and must not wait to be one.
            former = [r for r, said in restoring.resumed.items() if r not in members and _is_in(said, id, r)]
            state.effects.send(
                tuple(state.membership.ranks[r].peer for r in former if id > 0), m.Dissolve(id)
            )
            for rank in (state.membership.ranks[r] for r in former if id == 0):
                if rank.tracked or restoring.resumed[rank.rank].elastic:
                    state.admission.become_outdated(rank)
        else:
            knowing = [r for r, said in restoring.resumed.items() if any(k.id == id for k in said.sets)]
            state.effects.send(tuple(state.membership.ranks[r].peer for r in knowing), m.Dissolve(id))
    last_set = max((said.last_set for said in restoring.resumed.values()), default=0)
    state.sets.restore(kept, last_set, max((known.epoch for known in newest.values()), default=0) + 1)
    if newest and not restoring.recalled:
        # An expected rank that did not live when the coordinator died is not on its way.
        state.membership.awaited &= restoring.alive.keys()


def _same_processes(state: CoordinatorState, known: m.KnownSet, members: tuple[int, ...]) -> tuple[int, ...]:
    """Those of these members of the world that are the processes that they were in it.

    A process in the place of one that died may have come to a coordinator that died before it had restored the world: such a process resumes like
    the others, but is a newcomer. As a member it would have the place of the one that died, before ranks that have been there for longer.
    """
    processes = {*zip(known.ranks, known.pids, strict=False)}
    return tuple(rank for rank in members if (rank, state.membership.ranks[rank].pid) in processes)


def _is_in(said: m.Resume, id: int, rank: int) -> bool:
    return any(known.id == id and rank in known.ranks for known in said.sets)


def _stands(known: m.KnownSet, members: tuple[int, ...], restoring: Restoring) -> bool:
    """Whether all members of a process set have it, and no rank was about to add or remove it."""
    if known.id == 0:
        return True
    having = {rank for rank, said in restoring.resumed.items() if any(k.id == known.id for k in said.sets)}
    if not having.issuperset(members):
        return False
    return not any(
        known.id in said.removing or (known.ranks in said.adding and rank not in having)
        for rank, said in restoring.resumed.items()
    )


def _begin_cells(state: CoordinatorState) -> None:
    """Count the cells that the client knows to run as running, on the ranks that have not said that they ended."""
    restoring, ranks = state.restoring, state.membership.ranks
    for cell, on in restoring.cells:
        for rank in on:
            there = rank in ranks and ranks[rank].tracked and rank not in restoring.renewed
            # A connection that the client has given up may be read late, and name a process that has died since then.
            same = there and restoring.ran_in.get(rank, ranks[rank].pid) == ranks[rank].pid
            if same and (cell, rank) not in restoring.ended:
                state.cells.begin(cell, rank)
    restoring.cells = ()
