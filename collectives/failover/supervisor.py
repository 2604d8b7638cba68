"""Supervision by rank 0 of the coordinator that it has started: when that dies, a thread starts a successor."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time

from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.logs import LOG
from hvdlab.collectives.time_limits import RestartLimit

_POLL = 1.0
"""Seconds between two checks of a process whose end can't be waited for."""


class Keeper:
    """Supervisor of a coordinator that was started with ``keep``.

    The other ranks wait at the coordinator's sockets until the successor serves them. If there can be no successor, this closes the
    sockets, so that no rank waits for one; the end of this process closes them, too.

    Args:
        coordinator: The coordinator; it stays the caller's.
    """

    def __init__(self, coordinator: CoordinatorProcess) -> None:
        self._coordinator = coordinator
        #: Eventfd that ends the thread; -1 after :meth:`close`.
        self._end = os.eventfd(0)
        #: Limit on successors: a fault that ends each of them must not be repeated for ever.
        self._restarts = RestartLimit()
        #: The thread that waits for the coordinator's end.
        self._thread = threading.Thread(target=self._run, name="hvdlab-keeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the supervision. Call it before the coordinator is released. Idempotent."""
        if self._end >= 0:
            os.eventfd_write(self._end, 1)
            self._thread.join()
            os.close(self._end)
            self._end = -1

    def _run(self) -> None:
        while self._died():
            how = self._coordinator.ending()
            began = time.monotonic()
            if self._restarts.reached:
                self._give_up(how, f"it has ended {self._restarts.most} times within a minute")
                return
            self._restarts.add()  # before the attempt: one that hangs or fails counts as well
            try:
                self._coordinator.respawn()
            except (StartError, OSError) as error:
                self._give_up(how, str(error))
                return
            LOG.warning(
                "the coordinator ended (%s), and rank 0 has started another within %.1f s. What ranks were doing "
                "together at that moment has failed; those that can, go on",
                how,
                time.monotonic() - began,
            )

    def _died(self) -> bool:
        """Wait for the coordinator's end. Return False if :meth:`close` was called."""
        process = -1
        with contextlib.suppress(OSError):  # it was waited for already; or no descriptor is left
            process = os.pidfd_open(self._coordinator.pid)
        watched, seconds = ([self._end, process], None) if process >= 0 else ([self._end], _POLL)
        try:
            while not self._coordinator.ending():
                ready, _, _ = select.select(watched, [], [], seconds)
                if self._end in ready:
                    return False
            return True
        finally:
            if process >= 0:
                os.close(process)

    def _give_up(self, how: str, why: str) -> None:
        LOG.error("the coordinator ended (%s), and no other one can take its place: %s", how, why)
        self._coordinator.close()
