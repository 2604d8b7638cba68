"""The attempts of one elastic training on this rank: when the next one makes sense, and meeting the other ranks."""

from __future__ import annotations

import logging

from hvdlab.collectives import context
from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.elastic.interrupts import HostsUpdatedInterrupt
from hvdlab.collectives.elastic.notification import notification_manager
from hvdlab.collectives.elastic.state import State
from hvdlab.collectives.engine.engine import Engine
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import (
    AbortedError,
    CauseKind,
    CollectiveError,
    JoinedRanksError,
    MismatchError,
    ReleasedError,
)

logger = logging.getLogger("hvdlab.elastic")

FINAL = frozenset(
    (
        CauseKind.CELL_FAILED,
        CauseKind.CELL_ENDED,
        CauseKind.INTERRUPTED,
        CauseKind.SHUTDOWN,
    )
)
"""Causes after which no other rank is left to try again with, or the user does not want to."""

DISAGREEMENTS = frozenset((CauseKind.MISMATCH, CauseKind.DEADLOCK))
"""Causes that lie in what the ranks' code does, which is likely to do the same the next time."""


class Attempts:
    """Made for one call of an elastic function.

    Without ``hvd.init()`` there are no other ranks, and this only counts the attempts.

    Attributes:
        again: Whether an attempt was made before.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._engine: Engine | None = None
        self._disagreement: tuple[str, object] | None = None
        self._resets = 0
        #: The processes of the world in which this rank trained last.
        self._together: frozenset[object] = frozenset()
        self.again = False

    def begin(self) -> None:
        """The first attempt begins."""
        if context.is_initialized():
            self._engine = context.engine()
            self._engine.elastic.begin()

    def end(self) -> None:
        """There is no further attempt."""
        engine, self._engine = self._engine, None
        if engine is not None and not engine.closed:
            engine.elastic.end()

    def meet(self) -> None:
        """Training has ended well on this rank; wait until it has on all, since other ranks may still need this one."""
        if self._engine is not None and not self._engine.closed and self._engine.size > 1:
            self._engine.run(Request(OpKind.BARRIER, "elastic.end"))

    def failed(self, error: CollectiveError) -> None:
        """A collective has failed: tell the coordinator that this rank goes back to its last commit.

        Raises ``error`` if trying again makes no sense.
        """
        if isinstance(error, AbortedError) and (error.cause.kind in FINAL or self._is_alone(error)):
            raise error
        if isinstance(error, MismatchError | JoinedRanksError) or (
            isinstance(error, AbortedError) and error.cause.kind in DISAGREEMENTS
        ):
            disagreement = (str(error), getattr(self._state, "_commits", None))
            if disagreement == self._disagreement:
                raise error
            self._disagreement = disagreement
        text = str(error).partition("\n")[0]
        self._count(error)
        logger.info("going back to the last commit: %s", text)
        self._stop(f"{type(error).__name__}: {text}" if text else type(error).__name__)

    def _is_alone(self, error: AbortedError) -> bool:
        """Whether the coordinator is lost and this rank does not wait for a successor."""
        waits = self._engine is not None and self._engine.waits_for_successor
        return error.cause.kind is CauseKind.COORDINATOR_LOST and not waits

    def interrupted(self, interrupt: HostsUpdatedInterrupt) -> None:
        """The world is about to change. Raises ``interrupt`` if the reset limit is reached."""
        self._count(interrupt)
        self._stop("")

    def rejoin(self) -> bool:
        """Wait until all ranks have stopped, and begin again with those that are there.

        Returns:
            Whether there are ranks now that were not there before.
        """
        engine = context.engine() if context.is_initialized() else None
        if engine is not self._engine:  # shut down and initialized again: the ranks have met in init()
            self.end()
            self.begin()
            notification_manager.init()
        elif engine is not None:
            try:
                engine.elastic.wait(engine.settings.elastic_timeout)
            except ReleasedError as released:
                logger.info("leaving: %s", released)
                context.shutdown()
                raise SystemExit(0) from None
        if engine is None:
            return False
        logger.info("beginning again with %d ranks", engine.size)
        return not self._together.issuperset(engine.processes()[1])

    def _stop(self, reason: str) -> None:
        self.again = True
        if self._engine is not None and not self._engine.closed:
            self._engine.failed_cells += 1
            self._together = frozenset(self._engine.processes()[1])
            self._engine.elastic.stop(reason, self._engine.settings.min_np)

    def _count(self, error: CollectiveError | HostsUpdatedInterrupt) -> None:
        limit = self._engine.settings.reset_limit if self._engine is not None else 0
        if limit and self._resets >= limit:
            error.add_note(f"Training has begun again {limit} times already (HVDLAB_RESET_LIMIT).")
            raise error
        self._resets += 1
