"""Waiting for a handle on a user's thread: interruptible, and known to the coordinator when it takes long."""

from __future__ import annotations

from hvdlab.collectives.engine.entry import ENDED
from hvdlab.collectives.engine.guarded import GuardedState
from hvdlab.collectives.engine.handle import Handle
from hvdlab.collectives.engine.state import RankState
from hvdlab.collectives.errors import CauseKind

BLOCKED_AFTER = 0.5
"""Seconds of waiting after which the coordinator is told that the user's thread is blocked."""


class Waiter:
    """Waits of one rank's user threads."""

    def __init__(self, rank: int, guarded: GuardedState) -> None:
        self._rank = rank
        self._guarded = guarded

    def wait_for(self, handle: Handle, timeout: float | None) -> None:
        """Wait until the handle has ended; see :meth:`Handle.wait`."""
        try:
            self._guarded.flush_direct()
            first = BLOCKED_AFTER if timeout is None or timeout > BLOCKED_AFTER else max(timeout, 0.0)
            if not handle.ended.acquire(timeout=first) and not self._wait_long(handle, timeout):
                raise TimeoutError(
                    f"{handle.request.kind.label} `{handle.name}` ({handle.site}) is still in flight after "
                    f"{timeout:g} s"
                )
            handle.ended.release()
        except KeyboardInterrupt:
            self._interrupted(handle)
            raise
        finally:
            if handle.done():
                handle.open()  # an exception may have come between the two steps; others may wait, too

    def _wait_long(self, handle: Handle, timeout: float | None) -> bool:
        """Second part of a wait: the coordinator knows that this thread is blocked, to find deadlocks."""
        if timeout is not None and timeout <= BLOCKED_AFTER:
            return False
        self._guarded.tell(lambda state: state.blocked(handle, BLOCKED_AFTER))
        try:
            return handle.ended.acquire(timeout=-1 if timeout is None else timeout - BLOCKED_AFTER)
        finally:
            self._guarded.tell(lambda state: state.unblocked(handle))

    def _interrupted(self, handle: Handle) -> None:
        self.withdraw(handle, CauseKind.INTERRUPTED, f"rank {self._rank} was interrupted")

    def withdraw(self, handle: Handle, kind: CauseKind, text: str) -> None:
        """Give the handle's epoch up on all ranks, unless it has ended by now."""

        def withdraw(state: RankState) -> None:
            if handle.phase != ENDED:
                state.withdraw(handle.request.process_set, kind, text, handle.site)

        self._guarded.tell(withdraw)
