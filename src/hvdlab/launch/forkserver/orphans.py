"""Ranks whose fork server has died, for as long as there is no successor that looks after them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable

import msgspec

from hvdlab.collectives.deadline import Deadline
from hvdlab.launch.forkserver.messages import Exited, Forked
from hvdlab.launch.processes import exit_status, open_process, peak_memory, readable


class Orphans:
    """Holds a descriptor of each, which shows how it ended even long afterwards, and the memory that it had."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        self._peaks: dict[int, int] = {}

    def watch(self, children: Iterable[Forked]) -> None:
        """Hold those of these that live."""
        for child in tuple(
            children
        ):  # a copy: the reading thread takes a child out of the journal when it has ended
            if child.pid in self._held:
                continue
            with contextlib.suppress(OSError):  # no descriptor left: its end will be unknown
                descriptor = open_process(child.pid, child.started)
                if descriptor >= 0:
                    self._held[child.pid] = descriptor
                    self._peaks[child.pid] = peak_memory(child.pid)

    def complete(self, end: Exited) -> Exited:
        """The same end, completed by what is known here: how the rank ended, and the memory that it had."""
        if not end.max_rss and (peak := self._peaks.get(end.pid)):
            end = msgspec.structs.replace(end, max_rss=peak, seen=True)
        descriptor = self._held.get(end.pid)
        if descriptor is None or end.code != -1 or end.signal:
            return end
        status = exit_status(descriptor, end.pid)
        if status is None:
            return end
        code = os.waitstatus_to_exitcode(status)
        return msgspec.structs.replace(end, code=max(code, -1), signal=max(-code, 0))

    def terminate(self, grace: float) -> None:
        """Send SIGTERM to all, and wait this many seconds for their end."""
        for descriptor in self._held.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        self._wait(Deadline(grace))

    def release(self, timeout: float = 0.0) -> None:
        """Wait this many seconds for their end, and hold them no longer."""
        self._wait(Deadline(timeout))
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()
        self._peaks.clear()

    def _wait(self, deadline: Deadline) -> None:
        for descriptor in self._held.values():
            readable(descriptor, deadline.remaining())
