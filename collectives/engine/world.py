"""Membership of the world as a rank sees it, and waiting for it to be complete."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hvdlab.collectives.errors import StartError, format_ranks
from hvdlab.collectives.protocol import messages as m


class WorldView:
    """Which ranks are expected, and which are there. Written by the control thread, read by any."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._members: frozenset[int] = frozenset()
        self._lost: str | None = None
        self.last: m.World | None = None

    def update(self, message: m.Message) -> None:
        assert isinstance(message, m.World)
        with self._changed:
            self.last = message
            self._changed.notify_all()

    def configured(self, ranks: Sequence[int]) -> None:
        """Set 0 has these members now."""
        with self._changed:
            self._members = frozenset(ranks)
            self._changed.notify_all()

    def lost(self, reason: str) -> None:
        with self._changed:
            self._lost = reason
            self._changed.notify_all()

    def _missing(self) -> frozenset[int]:
        if self.last is None:
            return frozenset()
        # A world that lost a rank goes on without it, also when it is made anew.
        lost = {death.rank for death in self.last.deaths if death.admitted}
        return frozenset(self.last.expected) - self._members - lost

    def _dead(self) -> list[m.Death]:
        """Deaths of ranks that are missing and never were there: nobody else will come for them."""
        if self.last is None:
            return []
        missing = self._missing()
        return [death for death in self.last.deaths if death.rank in missing]

    def wait_complete(self, timeout: float, rank: int) -> None:
        """Wait until every expected rank is a member. Raises ``StartError`` that names the missing or the dead."""

        def complete() -> bool:
            return bool(self._members) and not self._missing()

        with self._changed:
            self._changed.wait_for(
                lambda: complete() or self._lost is not None or bool(self._dead()), timeout
            )
            came, missing, dead = complete(), sorted(self._missing()), self._dead()
        if self._lost is not None:
            raise StartError(self._lost)
        if dead:
            told = "; ".join(
                f"rank {death.rank} ended before the world was complete: {death.reason}" for death in dead
            )
            raise StartError(f"{told}. Look at its output, then start the group again.")
        if not came:
            who = format_ranks(missing) if missing else "the coordinator's go-ahead"
            raise StartError(
                f"rank {rank} waited {timeout:g} s for the world: {who} did not come. Look at the output of the "
                "missing ranks, or raise HVDLAB_START_TIMEOUT."
            )
