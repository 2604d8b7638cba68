"""What the fork server of a kept pool does about its coordinator while no notebook is attached: what that would do.

It holds the coordinator's listening socket from the moment the pool is to be kept, so that ranks which lose the
coordinator wait there instead of leaving.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import msgspec

from hvdlab.collectives.coordinator.handover import server_of, take_over
from hvdlab.collectives.coordinator.launch import Launch
from hvdlab.collectives.coordinator.listeners import Listeners
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.errors import StartError
from hvdlab.launch.processes import readable

ANSWER_WITHIN = 1.0
"""Seconds that a coordinator has to hand over its socket."""
START_WITHIN = 20.0
"""Seconds that a successor has to come up."""
TRIES = 3
"""Successors that may fail to come up, or die before they have."""
UNKNOWN = 16
"""Generations that a coordinator may be ahead of what was heard of it: its notebook may have replaced it."""


class DetachedSupervisor:
    """Of the coordinator that has this directory.

    Attributes:
        process: Becomes readable when the coordinator ends, while it is looked after; else -1.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._launch: Launch | None = None
        self._listeners: Listeners | None = None
        self._successor: CoordinatorProcess | None = None
        self.process = -1
        self._learn()

    @property
    def successor(self) -> int:
        """The process of the coordinator that was started here; 0 if there is none."""
        return self._successor.pid if self._successor is not None else 0

    def begin(self, ranks: int) -> None:
        """Nobody else looks after it from now on. If it has ended, a successor is up, or can't be.

        Args:
            ranks: How many ranks a successor is to wait for.
        """
        pid = server_of(self._directory, ANSWER_WITHIN)
        if not self._learn() and self._launch is not None:
            self._launch = msgspec.structs.replace(self._launch, generation=self._launch.generation + UNKNOWN)
        if pid:
            self._watch(pid)
        else:
            self.replace(ranks)

    def replace(self, ranks: int) -> None:
        """It has ended: start a successor. Without one, the ranks end after a while."""
        self.end()
        if self._launch is None or self._listeners is None:
            return
        for _ in range(TRIES):
            launch = msgspec.structs.replace(self._launch, size=ranks)
            # Also of one that fails: ranks may have met it, and would take another of its number for the same.
            self._launch = msgspec.structs.replace(launch, generation=launch.generation + 1)
            try:
                self._successor = CoordinatorProcess.succeed(launch, self._listeners, START_WITHIN)
            except StartError as error:
                print(f"no other coordinator could be started: {error}", file=sys.stderr, flush=True)
                continue
            self._watch(self._successor.pid)
            return

    def end(self) -> None:
        """Somebody else looks after it from now on."""
        descriptor, self.process = self.process, -1
        if descriptor >= 0:
            os.close(descriptor)

    def forget(self) -> None:
        """In a forked child, or at the end: let go of everything. A successor that was started here stays by itself."""
        self.end()
        if self._listeners is not None:
            self._listeners.close()
        if self._successor is not None:
            self._successor.release(0)

    def _watch(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            self.process = os.pidfd_open(pid)

    def _learn(self) -> bool:
        """What a successor is to be started with. Returns whether the coordinator has told."""
        try:
            launch, listener = take_over(self._directory, ANSWER_WITHIN)
        except OSError:
            return False
        before = self._listeners
        self._launch, self._listeners = launch, Listeners(self._directory, "", listener)
        if before is not None:
            before.close()
        return True

    def has_ended(self) -> bool:
        """Whether the coordinator that is looked after has ended."""
        return self.process >= 0 and readable(self.process, 0)
