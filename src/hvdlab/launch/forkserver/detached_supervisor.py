"""The fork server of a kept pool replaces the coordinator while no notebook is attached, as a notebook would.

It holds the coordinator's listening socket from the moment the pool is kept, so that ranks which lose the
coordinator wait there instead of leaving.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import msgspec

from hvdlab.collectives.coordinator.handover import server_of, take_over
from hvdlab.collectives.coordinator.process import CoordinatorLaunch, CoordinatorProcess, Listeners
from hvdlab.collectives.errors import StartError
from hvdlab.launch.processes import readable

ANSWER_WITHIN = 1.0
"""Seconds that a coordinator has to hand over its socket."""
START_WITHIN = 20.0
"""Seconds that a successor has to come up."""
TRIES = 3
"""How many successors are tried if they fail to come up."""
UNKNOWN = 16
"""How many generations a coordinator may be ahead of what is known here: its notebook may have replaced it."""


class DetachedSupervisor:
    """Supervises the coordinator that has this directory.

    Attributes:
        process: A descriptor that becomes readable when the coordinator ends, while this looks after it; else -1.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._launch: CoordinatorLaunch | None = None
        self._listeners: Listeners | None = None
        self._successor: CoordinatorProcess | None = None
        #: A descriptor of the last coordinator whose process this has found, or -1.
        self._known = -1
        self.process = -1
        self._remember(server_of(self._directory, ANSWER_WITHIN))
        self._learn()

    @property
    def successor(self) -> int:
        """The process of the coordinator that was started here; 0 if there is none."""
        return self._successor.pid if self._successor is not None else 0

    def begin(self, ranks: int) -> None:
        """Look after the coordinator from now on. If it has ended, a successor is started first.

        Args:
            ranks: How many ranks a successor has to wait for.
        """
        pid = server_of(self._directory, ANSWER_WITHIN)
        if not self._learn() and self._launch is not None:
            self._launch = msgspec.structs.replace(self._launch, generation=self._launch.generation + UNKNOWN)
        if pid:
            self._watch(pid)
        elif self._known >= 0 and not readable(self._known, 0):
            # No answer is no proof of its end: its socket's file may have been removed, or it is too busy to accept. A second
            # coordinator at the same listening socket would get the next notebook, while the ranks stay with the first one.
            self.process = os.dup(self._known)
        else:
            self.replace(ranks)

    def replace(self, ranks: int) -> None:
        """The coordinator has ended: start a successor. If that fails, the ranks end after a while."""
        self.end()
        if self._launch is None or self._listeners is None:
            return
        for _ in range(TRIES):
            launch = msgspec.structs.replace(self._launch, size=ranks)
            # A failed attempt uses its number up: ranks may have met that coordinator, and would take another one of the
            # same number for it.
            self._launch = msgspec.structs.replace(launch, generation=launch.generation + 1)
            try:
                self._successor = CoordinatorProcess.succeed(launch, self._listeners, START_WITHIN)
            except StartError as error:
                print(f"no other coordinator could be started: {error}", file=sys.stderr, flush=True)
                continue
            self._watch(self._successor.pid)
            return

    def end(self) -> None:
        """Another process looks after the coordinator from now on."""
        descriptor, self.process = self.process, -1
        if descriptor >= 0:
            os.close(descriptor)

    def forget(self) -> None:
        """In a forked child, or at the end: let go of everything. A successor that was started here stays by itself."""
        self.end()
        self._remember(0)
        if self._listeners is not None:
            self._listeners.close()
        if self._successor is not None:
            self._successor.release(0)

    def _watch(self, pid: int) -> None:
        self._remember(pid)
        if self._known >= 0:
            self.process = os.dup(self._known)

    def _remember(self, pid: int) -> None:
        """Keep a descriptor of this process in place of the one before; of none if ``pid`` is 0."""
        descriptor, self._known = self._known, -1
        if descriptor >= 0:
            os.close(descriptor)
        if pid:
            with contextlib.suppress(OSError):  # it has ended
                self._known = os.pidfd_open(pid)

    def _learn(self) -> bool:
        """Get from the coordinator what a successor is started with. Returns whether it has answered."""
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
