"""The loop around elastic training: when another attempt makes sense, and where the ranks meet before it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from hvdlab.collectives import context
from hvdlab.collectives.elastic.state import HostsUpdatedInterrupt, State, notification_manager
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
from hvdlab.collectives.types import OpKind

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)


def run_fn(func: Callable[Concatenate[S, P], R], reset: Callable[[], Any]) -> Callable[Concatenate[S, P], R]:
    """Make a training function elastic.

    The function that is returned synchronizes its first argument, a :class:`~hvdlab.collectives.elastic.State`, over
    the ranks and calls ``func``. If a collective fails in it (``HorovodInternalError``), for instance because a rank was lost,
    each rank that lives goes back to its last commit. They begin again with the ranks that are left, and call ``func``
    once more. If a rank comes back, ``state.commit()`` (or ``check_host_updates()``) raises
    :class:`~hvdlab.collectives.elastic.HostsUpdatedInterrupt` on all others; they let it in, give it their state, and
    call ``func`` once more without going back. Each time, ``state.on_reset()`` runs before the state is synchronized.

    Args:
        func: Trains. It continues from the state, and can be called any number of times.
        reset: Called before the ranks begin again. It may shut down and initialize.

    Returns:
        The elastic function. It returns ``func``'s result, once all ranks have come to its end, and raises

        * an exception of ``func``, if it is not one of the above,
        * the ``HorovodInternalError``, if trying again makes no sense: a rank's cell has failed or ended, it was
          interrupted, the coordinator is gone, the ranks disagree a second time without a commit in between, or the
          reset limit is reached,
        * ``SystemExit(0)``, if this rank was let go, since its host leaves the job: the others go on without it,
        * ``StartError``, if the ranks did not come together within ``HOROVOD_ELASTIC_TIMEOUT`` seconds.
    """

    @functools.wraps(func)
    def elastic(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        notification_manager.init()
        notification_manager.register_listener(state)
        attempts = Attempts(state)
        skip_sync = False
        try:
            attempts.begin()
            while True:
                try:
                    if attempts.again:
                        # One that came while the others agreed to let some go has to be given their state.
                        # `rejoin()` stands first, since it has to be called in any case.
                        skip_sync = not attempts.rejoin() and skip_sync
                        state.on_reset()
                        # After `on_reset()`, which drops news: ranks that wait already are not announced again.
                        notification_manager.remind(state)
                    if not skip_sync:
                        state.sync()
                    result = func(state, *args, **kwargs)
                    # Within the attempt: if another rank fails before it comes to its end, this one goes back with it.
                    attempts.meet()
                    return result
                except CollectiveError as error:
                    attempts.failed(error)
                    state.restore()
                    skip_sync = False
                except HostsUpdatedInterrupt as interrupt:
                    attempts.interrupted(interrupt)
                    skip_sync = interrupt.skip_sync
                reset()
        finally:
            try:
                notification_manager.remove_listener(state)
            finally:
                attempts.end()

    return cast("Callable[Concatenate[S, P], R]", elastic)


logger = logging.getLogger("hvdlab.elastic")

FINAL = frozenset(
    (
        CauseKind.CELL_FAILED,
        CauseKind.CELL_ENDED,
        CauseKind.INTERRUPTED,
        CauseKind.SHUTDOWN,
    )
)
"""Causes after which no other rank is left for another attempt, or the user has interrupted or ended the training."""

DISAGREEMENTS = frozenset((CauseKind.MISMATCH, CauseKind.DEADLOCK))
"""Causes that lie in the ranks' code, which is likely to do the same the next time."""


class Attempts:
    """Attempts of one call of an elastic function.

    Without ``hvd.init()`` there are no other ranks, and this only counts the attempts.

    Attributes:
        again: Whether an attempt was made before.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        #: The engine whose coordinator learns of the attempts; None without hvd.init().
        self._engine: Engine | None = None
        #: The last disagreement of the ranks, and the commits before it.
        self._disagreement: tuple[str, object] | None = None
        #: How often training has begun again.
        self._resets = 0
        #: The processes of the world in which this rank trained last.
        self._together: frozenset[object] = frozenset()
        self.again = False

    def begin(self) -> None:
        """Begin the first attempt."""
        if context.is_initialized():
            self._engine = context.engine()
            self._engine.elastic.begin(self)

    def end(self) -> None:
        """End elastic training on this rank: there is no further attempt."""
        engine = self._engine
        if engine is not None and not engine.closed:
            try:
                engine.elastic.end(self)
            except KeyboardInterrupt:
                # A second Ctrl-C: left in training, this rank would let newcomers wait for its next reset point for ever.
                engine.elastic.end(self)
                raise
        self._engine = None

    def meet(self) -> None:
        """Wait until training has ended well on all ranks, as it has on this one: others may still need this rank."""
        if self._engine is not None and not self._engine.closed and self._engine.size > 1:
            self._engine.run(Request(OpKind.BARRIER, "elastic.end"))

    def failed(self, error: CollectiveError) -> None:
        """Report a failed collective to the coordinator: this rank goes back to its last commit.

        Raises ``error`` if another attempt makes no sense.
        """
        if isinstance(error, AbortedError) and (error.cause.kind in FINAL or self._is_alone(error)):
            raise error
        if isinstance(error, MismatchError | JoinedRanksError) or (
            isinstance(error, AbortedError) and error.cause.kind in DISAGREEMENTS
        ):
            disagreement = (str(error), getattr(self._state, "_commits", None))
            # The same again, without a commit in between: another attempt would end alike.
            if disagreement == self._disagreement:
                raise error
            self._disagreement = disagreement
        text = str(error).partition("\n")[0]
        # Before the report: at the limit this raises, and the coordinator must not wait for a rank that makes no further attempt.
        self._count(error)
        logger.info("going back to the last commit: %s", text)
        self._stop(f"{type(error).__name__}: {text}" if text else type(error).__name__)

    def _is_alone(self, error: AbortedError) -> bool:
        """Return whether the coordinator is lost and this rank does not wait for a successor."""
        waits = self._engine is not None and self._engine.waits_for_successor
        return error.cause.kind is CauseKind.COORDINATOR_LOST and not waits

    def interrupted(self, interrupt: HostsUpdatedInterrupt) -> None:
        """Stop for a change of the world. Raises ``interrupt`` if the reset limit is reached."""
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
            # Before the stop: once the coordinator knows of it, the world can change at any time.
            self._together = frozenset(self._engine.processes()[1])
            self._engine.elastic.stop(reason, self._engine.settings.min_np)

    def _count(self, error: CollectiveError | HostsUpdatedInterrupt) -> None:
        limit = self._engine.settings.reset_limit if self._engine is not None else 0
        if limit and self._resets >= limit:
            error.add_note(f"Training has begun again {limit} times already (HVDLAB_RESET_LIMIT).")
            raise error
        self._resets += 1
