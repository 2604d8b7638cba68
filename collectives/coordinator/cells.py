"""Which cells run on which ranks, and what that says about a collective that a rank has not submitted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvdlab.collectives.errors import CauseKind, format_ranks


@dataclass(frozen=True, slots=True)
class Absence:
    """Why ranks will not submit what others wait for."""

    kind: CauseKind
    ranks: tuple[int, ...]
    text: str


class Cells:
    """Cells of the ranks that are tracked.

    Attributes:
        idle: Living tracked ranks that run no cell.
    """

    def __init__(self) -> None:
        self.idle: set[int] = set()
        self._active: dict[int, dict[str, None]] = {}
        self._last: dict[int, tuple[str, str]] = {}

    def join(self, rank: int) -> None:
        """A tracked rank is there; it runs the cells that were announced for it before."""
        if not self._active.get(rank):
            self.idle.add(rank)

    def drop(self, rank: int) -> None:
        """A rank is gone."""
        self.idle.discard(rank)
        self._active.pop(rank, None)
        self._last.pop(rank, None)

    def keep(self, ranks: Iterable[int]) -> None:
        """Forget cells that were announced for ranks other than these."""
        kept = set(ranks)
        for rank in [rank for rank in self._active if rank not in kept]:
            del self._active[rank]

    def begin(self, cell: str, rank: int) -> None:
        """A cell is on its way to a rank, or runs there."""
        self._active.setdefault(rank, {})[cell] = None
        self.idle.discard(rank)

    def end(self, cell: str, rank: int, error: str) -> bool:
        """A cell ended on a rank. Returns whether the rank is idle now."""
        active = self._active.get(rank)
        if active is not None:
            active.pop(cell, None)
        self._last[rank] = (cell, error)
        if active:
            return False
        self._active.pop(rank, None)
        self.idle.add(rank)
        return True

    def active(self, rank: int) -> bool:
        return rank in self._active

    def absence(self, missing: Sequence[int], waiting: Iterable[int]) -> Absence:
        """Why the idle ranks ``missing`` do not take part in the collective that the ranks ``waiting`` wait for."""
        cells = {cell for rank in waiting for cell in self._active.get(rank, ())}
        last = {rank: self._last.get(rank, ("", "")) for rank in missing}
        failed = [rank for rank in missing if last[rank][1] and (last[rank][0] in cells or not cells)]
        if failed:
            text = "; ".join(f"rank {rank} failed: {last[rank][1]}" for rank in failed[:3])
            more = f"; and {len(failed) - 3} more ranks" if len(failed) > 3 else ""
            return Absence(CauseKind.CELL_FAILED, tuple(failed), text + more)
        ended = [rank for rank in missing if last[rank][0] in cells]
        if ended:
            its = "its cell" if len(ended) == 1 else "their cells"
            return Absence(
                CauseKind.CELL_ENDED, tuple(ended), f"{format_ranks(ended)} finished {its} without it"
            )
        runs = "runs" if len(missing) == 1 else "run"
        return Absence(CauseKind.CELL_ENDED, tuple(missing), f"{format_ranks(missing)} {runs} no cell")

    def validate(self, tracked: Iterable[int]) -> None:
        """Assert what must hold between rounds."""
        assert all(self._active.values())
        assert self.idle == {rank for rank in tracked if rank not in self._active}
