"""Waiting for a handle on a user's thread: interruptible, and known to the coordinator when it takes long."""

from __future__ import annotations

from functools import partial

from hvdlab.collectives.engine.direct import Direct
from hvdlab.collectives.engine.executor import Executor
from hvdlab.collectives.engine.handles import Handle, Hooks
from hvdlab.collectives.engine.leading import Leader
from hvdlab.collectives.engine.locked_state import GuardedState
from hvdlab.collectives.engine.rank_state import RankState
from hvdlab.collectives.engine.requests import Limit
from hvdlab.collectives.errors import CauseKind

BLOCKED_AFTER = 0.5
"""Seconds of waiting after which the rank tells the coordinator that the user's thread is blocked."""


class Waiter:
    """Waits of one rank's user threads."""

    def __init__(
        self,
        rank: int,
        guarded: GuardedState,
        leader: Leader,
        executor: Executor,
        hooks: Hooks,
        direct: Direct,
    ) -> None:
        self._rank = rank
        self._guarded = guarded
        self._leader = leader
        self._executor = executor
        self._hooks = hooks
        self._direct = direct

    def wait_for(self, handle: Handle, timeout: float | None, limit: Limit | None = None) -> None:
        """Wait until the handle has ended, or withdraw it once the limit has passed; see :meth:`Handle.wait`.

        Raises ``InvalidRequestError`` in a completion hook.
        """
        self._hooks.refuse_to_wait()
        try:
            if handle.at_once:
                handle.at_once = False
                if timeout is None or limit is not None:
                    self._direct.run(handle, queued=True, limit=limit)
            if not handle.done():
                self._wait_indirectly(handle, timeout)
        except TimeoutError:
            if limit is None:
                raise
            self._guarded.withdraw(handle, CauseKind.TIMEOUT, limit.text)
        except KeyboardInterrupt:
            self._interrupted(handle)
            raise
        finally:
            if handle.done():
                handle.open()  # an interrupt may have come between acquire and release below; other threads may wait, too

    def _wait_indirectly(self, handle: Handle, timeout: float | None) -> None:
        if timeout is None:
            left = self._leader.lead(handle, BLOCKED_AFTER)
        else:
            # Not as a leader: that may find itself in the middle of an operation, which does not look at the clock.
            self._guarded.flush_direct()
            left = min(BLOCKED_AFTER, max(timeout, 0.0))
        if not handle.ended.acquire(timeout=left) and not self._wait_long(handle, timeout):
            raise TimeoutError(
                f"{handle.request.kind.label} `{handle.name}` ({handle.site}) is still in flight after {timeout:g} s"
            )
        handle.ended.release()

    def _wait_long(self, handle: Handle, timeout: float | None) -> bool:
        """Second part of a wait: let the coordinator know that this thread is blocked, so that it finds deadlocks."""
        if timeout is not None and timeout <= BLOCKED_AFTER:
            return False
        self._guarded.tell(lambda state: state.blocked(handle, BLOCKED_AFTER))
        try:
            return handle.ended.acquire(timeout=-1 if timeout is None else timeout - BLOCKED_AFTER)
        finally:
            self._guarded.tell(lambda state: state.unblocked(handle))

    def abandon(self, handle: Handle) -> None:
        """Withdraw a handle of :meth:`Engine.run` after an interrupt: only this thread knows it, so no thread will wait for it."""
        if not handle.given_up:
            self._interrupted(handle)

    def _interrupted(self, handle: Handle) -> None:
        self._leader.torn()
        text = f"rank {self._rank} was interrupted"
        self._guarded.withdraw(handle, CauseKind.INTERRUPTED, text)
        # This thread may have been executing an operation of another process set meanwhile.
        for set_id, epoch in self._executor.take_interrupted():
            self._guarded.tell(partial(_withdraw, set_id, epoch, text, handle.site))


def _withdraw(set_id: int, epoch: int, text: str, site: str, state: RankState) -> None:
    group = state.sets.get(set_id)
    if (
        group is not None and group.epoch == epoch
    ):  # else it has ended, perhaps because the handle was given up just before
        state.withdraw(set_id, CauseKind.INTERRUPTED, text, site)
