"""The loop around elastic training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from hvdlab.collectives.elastic.attempts import Attempts
from hvdlab.collectives.elastic.interrupts import HostsUpdatedInterrupt
from hvdlab.collectives.elastic.notification import notification_manager
from hvdlab.collectives.elastic.state import State
from hvdlab.collectives.errors import CollectiveError

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)


def run_fn(func: Callable[Concatenate[S, P], R], reset: Callable[[], Any]) -> Callable[Concatenate[S, P], R]:
    """Make a training function elastic.

    The function that is returned synchronizes its first argument, a :class:`~hvdlab.collectives.elastic.State`, over
    the ranks and calls ``func``. If a collective fails in it (``HorovodInternalError``), because a rank was lost, say,
    each rank that lives goes back to its last commit, they begin again with those that are there now, and call ``func``
    once more. If a rank comes back, ``state.commit()`` (or ``check_host_updates()``) raises
    :class:`~hvdlab.collectives.elastic.HostsUpdatedInterrupt` on all others; they let it in, give it their state, and
    call ``func`` once more without going back. Each time, ``state.on_reset()`` runs before the state is synchronized.

    Args:
        func: Trains. It takes up where the state is, and can be called any number of times.
        reset: Called before the ranks begin again. It may shut down and initialize.

    Returns:
        The elastic function. It returns what ``func`` does, once all ranks have come to its end, and raises

        * what ``func`` raises, if it is not one of the above,
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
                        skip_sync = not attempts.rejoin() and skip_sync
                        state.on_reset()
                        notification_manager.remind(state)
                    if not skip_sync:
                        state.sync()
                    result = func(state, *args, **kwargs)
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
            notification_manager.remove_listener(state)
            attempts.end()

    return cast("Callable[Concatenate[S, P], R]", elastic)
