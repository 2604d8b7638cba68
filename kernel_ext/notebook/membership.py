"""Admission of a pool's new ranks to elastic cells that run, the record of ranks that come and go, and the state of both for views.

New ranks that an elastic cell admits first get the variables that the others have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvdlab.collectives.client import Client
from hvdlab.collectives.errors import HvdlabError
from hvdlab.collectives.text import compact_ranks, format_ranks
from hvdlab.collectives.types import LEAVES
from hvdlab.kernel_ext.notebook.cells.dispatch import CellDispatcher
from hvdlab.kernel_ext.notebook.elastic import Bounds, MembershipChange, MembershipHistory, UnsyncedRanks
from hvdlab.kernel_ext.notebook.rank_lifecycle import RankLifecycle
from hvdlab.kernel_ext.notebook.variables import transfer


@dataclass(frozen=True, slots=True)
class ElasticState:
    """State of elastic training in a pool, from :meth:`hvdlab.kernel_ext.notebook.pool.Pool.elastic`.

    Attributes:
        generation: Number of the world's generation; each rank that comes or goes, and each failure, begins a new one.
        cells: The elastic cells that run: their labels, how many ranks each may have, and the ranks that are in it.
        members: Rank to its state: ``ready``, ``waits to be let in``, ``starting``, ``leaves at the next commit``, or ``lost:`` and the reason.
        awaited: Ranks of the pool that are not ready.
        arrivals: Rank to how and when it came.
        history: All that is remembered, oldest first.
        newcomers: Ranks that came later than others and lack their variables.
    """

    generation: int
    cells: Sequence[tuple[str, Bounds, tuple[int, ...]]]
    members: Mapping[int, str]
    awaited: tuple[int, ...]
    arrivals: Mapping[int, MembershipChange]
    history: Sequence[MembershipChange]
    newcomers: tuple[int, ...] = ()


class ElasticAdmission:
    """Admission of a pool's new ranks, and the record of which ranks came and went.

    Args:
        client: The connection to the coordinator.
        group: The ranks.
        runs: The cells.
        newcomers: Ranks that were started after others and have none of their variables.
        history: Takes each change.
    """

    def __init__(
        self,
        client: Client,
        group: RankLifecycle,
        runs: CellDispatcher,
        newcomers: UnsyncedRanks,
        history: MembershipHistory,
    ) -> None:
        self._client, self._group, self._runs = client, group, runs
        self._newcomers, self._history = newcomers, history

    # -- record ---------------------------------------------------------------------------------------------------

    def ranks_added(self, how: str, ranks: Sequence[int]) -> None:
        """Record that these ranks are new; if the pool has no other rank, none of them counts as a newcomer.

        Args:
            how: ``resize``, ``repair`` or ``restart``.
            ranks: The ranks.
        """
        self.record_arrivals(how, ranks)
        self._newcomers.add(how, ranks, self._group.members.wanted)

    def record_arrivals(self, how: str, ranks: Iterable[int]) -> None:
        """Record that these ranks came, with their hosts and processes."""
        pids = self._group.pids()
        hosts = {member.rank: member.host for member in self._client.membership().members}
        for rank in ranks:
            self._history.add(MembershipChange(rank, "joined", how, hosts.get(rank, ""), pids.get(rank, 0)))

    def record_end(self, what: str, rank: int, reason: str) -> None:
        """Record the end of a rank, unless its arrival is forgotten.

        Args:
            what: ``died`` or ``left``.
            rank: The rank.
            reason: Why it ended.
        """
        came = self._history.arrival(rank)
        if came is not None:
            self._history.add(MembershipChange(rank, what, reason, came.host, came.pid))

    def state(self, newcomers: tuple[int, ...]) -> ElasticState:
        """Return the ranks that there are, since when and from where, those that are awaited, and the history of the others."""
        members, world, history = self._group.members, self._client.membership(), self._history
        runs = self._runs
        states: dict[int, str] = {}
        for rank in members.wanted:
            member = members.get(rank)
            if member is None:
                continue
            if member.reason:
                states[rank] = f"lost: {member.reason}"
            elif rank in world.waiting:
                states[rank] = "waits to be let in"
            else:
                states[rank] = member.state.value
        states |= dict.fromkeys((rank for rank in members.let_go if rank not in states), LEAVES)
        return ElasticState(
            generation=world.generation,
            cells=[(runs.label(cell), *found) for cell, found in runs.elastic().items()],
            members=states,
            awaited=tuple(rank for rank in members.wanted if rank not in members.ready),
            arrivals={rank: came for rank in states if (came := history.arrival(rank)) is not None},
            history=history.all(),
            newcomers=newcomers,
        )

    # -- admission ------------------------------------------------------------------------------------------------

    def check_size(self, size: int) -> None:
        """Raise ``InvalidRequestError`` if an elastic cell that runs can't have this many ranks."""
        for cell, (bounds, _) in self._runs.elastic().items():
            bounds.check_size(size, self._runs.label(cell))

    def admit_to_elastic_cells(self, ranks: Sequence[int], patience: float) -> None:
        """Let these new ranks take part in the elastic cells that run: they first get the variables of the others.

        If a rank can't take part, a line under the cell reports it, and the others go on without it.

        Args:
            ranks: The new ranks; one that has ended since is left out.
            patience: Seconds that a rank has for each answer and each piece.
        """
        new = tuple(rank for rank in ranks if rank in self._group.ready())
        loaded: tuple[int, ...] | None = None
        for cell, (_, running) in self._runs.elastic().items():
            # Not a new rank that is in the cell already: it may lack the variables as well.
            sources = [rank for rank in running if rank not in new and rank in self._group.ready()]
            if not new or not sources:
                continue
            if loaded is None:  # a rank keeps a snapshot until it begins a cell
                loaded = self._load_snapshot(sources, new, patience)
            if loaded:
                self._runs.join(cell, loaded)

    def _load_snapshot(self, sources: Sequence[int], new: Sequence[int], patience: float) -> tuple[int, ...]:
        """Send to ``new`` the variables of one of ``sources``; if that rank dies meanwhile, those of the next one.

        A snapshot that did not reach a rank, as where a coordinator died that was to pass it on, is sent once more.

        Returns those of ``new`` that have it.
        """
        again = True
        waiting = list(sources)
        while waiting:
            source = waiting.pop(0)
            try:
                near = self._group.ranks_on_this_host()
                brought = transfer.bring_known(self._runs.requests, source, new, patience, near=near)
            except HvdlabError as error:
                why = str(error)
                if self._group.loss_reason(source):
                    continue
                break
            if again and any(not self._group.loss_reason(rank) for rank in brought.missed):
                again = False
                waiting.insert(0, source)
                continue
            for name, reason in brought.failed.items():
                self._runs.notice(f"not brought to {format_ranks(new)}: {name} ({reason})")
            for rank, reason in brought.refused.items():
                if not self._group.loss_reason(rank):  # the end of a lost rank is reported anyway
                    self._report_excluded([rank], reason)
            return tuple(rank for rank in new if rank not in brought.refused)
        self._report_excluded(new, why)
        return ()

    def _report_excluded(self, ranks: Sequence[int], why: str) -> None:
        """Show that these ranks don't take part in the elastic cells that run."""
        self._runs.notice(
            f"{format_ranks(ranks)} can't take part: {why}; `%hvd_pool restart {compact_ranks(ranks)}` tries again"
        )
