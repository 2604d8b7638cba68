"""Bridge from the magics to the kernel whose cells run on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from hvdlab.collectives.errors import HvdlabError
from hvdlab.kernel_ext.spmd.wishes import PoolDefaults
from hvdlab.magics.session import Session

if TYPE_CHECKING:
    from hvdlab.kernel_ext.notebook.pool import Pool
    from hvdlab.kernel_ext.wire.status import Completions, Inspection

A = TypeVar("A")

PATIENCE = 5.0
"""Seconds that an idle rank has to answer; its first completion imports jedi."""

BUSY_PATIENCE = 2.0
"""Seconds that a rank which runs a cell has; it answers at once, unless other code holds its interpreter."""


class KernelRanks:
    """The ranks of that kernel: its session's pool."""

    def __init__(self, session: Session) -> None:
        self._session = session
        session.ranks_by_default = True

    def begin(self, wishes: Callable[[], PoolDefaults]) -> None:
        """Begin to start ranks."""
        self._session.begin(wishes)

    def cell(self, code: str, *, store_history: bool) -> None:
        """The kernel is going to run this cell."""
        self._session.raw_cell = code
        self._session.store_history = store_history

    def complete(self, code: str, cursor: int) -> Completions | None:
        """Completions from the first rank."""
        return self._ask(lambda pool: pool.complete(code, cursor, timeout=_patience(pool)))

    def inspect(self, code: str, cursor: int, detail: int) -> Inspection | None:
        """Documentation from the first rank."""
        return self._ask(lambda pool: pool.inspect(code, cursor, detail, timeout=_patience(pool)))

    def evaluate(self, expressions: Mapping[str, str]) -> dict[str, Any]:
        """Values of a client's expressions, evaluated on the first rank."""
        found = self._ask(lambda pool: pool.express(expressions))
        if found is not None:
            return dict(found)
        why = {"ename": "NoAnswer", "evalue": "the first rank does not answer", "traceback": []}
        return {name: {"status": "error", **why} for name in expressions}

    def busy_with(self) -> str:
        """The label of the cell that runs; empty if none does."""
        pool = self._session.current
        return self._session.running_label if pool is not None and pool.state == "running" else ""

    def end(self) -> None:
        """The kernel ends: end the ranks, or leave them if they are kept."""
        self._session.end_pool()

    def _ask(self, ask: Callable[[Pool], A | None]) -> A | None:
        pool = self._session.current
        if pool is None or pool.state not in ("idle", "running"):
            return None
        try:
            return ask(pool)
        except HvdlabError:  # the pool broke down, or has no ranks; the next cell says so
            return None


def _patience(pool: Pool) -> float:
    return BUSY_PATIENCE if pool.state == "running" else PATIENCE
