"""News of the world that interrupts elastic training."""

from __future__ import annotations

from enum import IntFlag


class HostUpdateResult(IntFlag):
    """What has changed about the ranks."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class HostsUpdatedInterrupt(RuntimeError):
    """The world is about to change; raised by ``state.commit()`` and ``state.check_host_updates()`` on all ranks at once.

    Attributes:
        skip_sync: Whether the ranks that stay can go on without synchronizing their states, unless a rank comes meanwhile.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the world is about to change")
        self.skip_sync = skip_sync
