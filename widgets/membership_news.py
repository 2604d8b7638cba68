"""Tells a view which ranks there are whenever that has changed."""

from __future__ import annotations

import time
from typing import Any

from hvdlab.collectives.errors import HvdlabError
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.widgets.membership_actions import ChangeablePool, MembershipActions
from hvdlab.widgets.membership_rows import MembershipState, membership_message

INTERVAL = 0.5
"""Seconds between two questions to a pool that has not announced a change: cells begin and end, and ranks get ready."""


class MembershipNews:
    """Messages to a view of a pool's ranks, whenever these have changed.

    Args:
        pool: The pool.
        actions: The actions that change it.
        recording: Announces changes of the pool to threads that wait for news of the recording.

    Attributes:
        state: What the pool answered last; None if it had ended before it was asked.
        asks_later: Whether :meth:`take` has not asked the pool, since it had done so just before: call it again soon.
    """

    def __init__(self, pool: ChangeablePool, actions: MembershipActions, recording: Recording) -> None:
        self._pool, self._actions, self._recording = pool, actions, recording
        self._unlisten = pool.on_membership_change(self._changed)
        #: Whether the pool has announced a change since it was asked.
        self._is_due = True
        self._asked = 0.0
        #: What :meth:`take` returned last: the pool's state, whether it had ended, and which action was running.
        self._given: tuple[MembershipState | None, bool, str] = (None, False, "")
        self.state: MembershipState | None = None
        self.asks_later = False

    def _changed(self) -> None:
        self._is_due = True
        self._recording.notify()

    def forget(self) -> None:
        """Have the next :meth:`take` return everything again."""
        self._is_due, self._given = True, (None, False, "")

    def take(self) -> dict[str, Any] | None:
        """All that is shown, or None if nothing has changed."""
        pool, busy, now = self._pool, self._actions.busy, time.monotonic()
        self.asks_later = not self._is_due and now < self._asked + INTERVAL and busy == self._given[2]
        if self.asks_later:
            return None
        self._is_due, self._asked = False, now
        ended = pool.state == "stopped"
        if not ended:
            try:
                self.state = pool.elastic()
            except HvdlabError:  # the pool has ended, or broken down, just now
                ended = True
        given = self.state, ended, busy
        if self.state is None or given == self._given:
            return None
        self._given = given
        return membership_message(self.state) | {
            "ended": ended,
            "busy": busy,
            "replaceable": pool.replaceable,
            "now": time.time(),
        }

    def close(self) -> None:
        """Listen no more. Idempotent."""
        self._unlisten()
