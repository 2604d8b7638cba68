"""Recovery of a client's lost connection to the coordinator: to the same one, or to a successor.

A connection can be lost although its coordinator lives: the client was too slow to read, or could not decode a message. Such
a coordinator has the world, the history and the cells, so the client connects to it again. Only a coordinator that has ended, is
stopped, or does not answer is replaced.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hvdlab.collectives.client import CoordinatorLostError
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.system import process_state
from hvdlab.collectives.time_limits import RestartLimit
from hvdlab.collectives.types import Membership

END_WITHIN = 1.0
"""Seconds that a process has to end after its connections."""
ANSWER_WITHIN = 5.0
"""Seconds that a coordinator which lives has for its answer."""
SUCCESSORS = 5
"""Successors that are started one after the other if each dies before it answers. More would die of the same cause."""

Cells = Mapping[str, Sequence[int]]


class RespawningCoordinator(Protocol):
    """Process of a coordinator that can be replaced, as far as :class:`ClientRecovery` uses it."""

    @property
    def pid(self) -> int:
        """Return its process id."""
        ...

    def ending(self) -> str:
        """Return how it ended; empty as long as it runs."""
        ...

    def respawn(self, timeout: float = ...) -> None:
        """Start a successor."""


class ReconnectingClient(Protocol):
    """Client that can connect again, as far as :class:`ClientRecovery` uses it."""

    def reconnect(self, cells: Cells | None = ..., timeout: float = ..., *, process: int = ...) -> Membership:
        """Connect again, as :meth:`Client.reconnect` does."""
        ...


class CellRuns(Protocol):
    """Runs of cells, as far as :class:`ClientRecovery` uses them."""

    def running(self) -> Cells:
        """Return the cells that run, each with its ranks."""
        ...


@dataclass(frozen=True, slots=True)
class Recovered:
    """Outcome of a recovery.

    Attributes:
        membership: The world.
        replaced: Whether a successor has replaced the coordinator.
        cells: The cells that the client has reported to the coordinator.
    """

    membership: Membership
    replaced: bool
    cells: Cells


class ClientRecovery:
    """Recovery of a client's connection to its coordinator, or to a successor.

    Args:
        coordinator: The coordinator's process.
        client: The connection.
        runs: The cells that run; ``None`` where there are none.
        respawn_within: Seconds that a successor has to come up.
        reconnect_within: Seconds that it has to restore its world.

    Attributes:
        ending: How the coordinator that was lost last has ended; empty if it lived.
    """

    def __init__(
        self,
        coordinator: RespawningCoordinator,
        client: ReconnectingClient,
        *,
        runs: CellRuns | None = None,
        respawn_within: float = 10.0,
        reconnect_within: float = 30.0,
    ) -> None:
        self._coordinator, self._client, self._runs = coordinator, client, runs
        self._respawn_within, self._reconnect_within = respawn_within, reconnect_within
        #: Limit on returns to the same coordinator: the fault that ends the connection would end the next one as well.
        self._returns = RestartLimit()
        self.ending = ""

    def run(self) -> Recovered:
        """Recover the connection, which the client has lost, or is about to lose.

        Raises:
            StartError, TimeoutError, InvalidRequestError, OSError: There is no successor, and why.
            CoordinatorLostError: The new connection was lost as well, or the client was closed. Can be called again.
        """
        # The ending first: it decides between a return to the same coordinator and a successor.
        self.ending = self._find_ending()
        return self._return() or self._replace()

    def _find_ending(self) -> str:
        """Return how the coordinator has ended. Wait a moment for that: a process ends a moment after its connections."""
        # It was waited for already, or no descriptor is left: then its present state is the answer.
        with contextlib.suppress(OSError):
            process = os.pidfd_open(self._coordinator.pid)
            try:
                # Not by select(), which refuses descriptors from 1024 on.
                end = select.poll()
                end.register(process, select.POLLIN)
                end.poll(END_WITHIN * 1000)
            finally:
                os.close(process)
        return self._coordinator.ending()

    def _running(self) -> Cells:
        return {} if self._runs is None else self._runs.running()

    def _return(self) -> Recovered | None:
        """Connect to the same coordinator, if it answers."""
        if self.ending or process_state(self._coordinator.pid) in ("T", "t"):
            return None
        if self._returns.reached:
            return None
        # Before the attempt: also one that fails halfway counts, otherwise a coordinator that hangs up on each Hello would be tried
        # for ever.
        self._returns.add()
        cells = self._running()
        try:
            world = self._client.reconnect(cells, ANSWER_WITHIN)
        except CoordinatorLostError:  # a ConnectionError, hence an OSError: it must not count as no answer
            raise
        # It does not answer, so a successor takes its place.
        except (StartError, TimeoutError, OSError):
            return None
        return Recovered(world, False, cells)

    def _replace(self) -> Recovered:
        """Start successors until one answers: a new one can be killed before it has answered this client."""
        for attempt in range(SUCCESSORS):
            self._coordinator.respawn(self._respawn_within)
            # Read after the start, which takes a while: cells that have ended meanwhile must not be reported as running.
            cells = self._running()
            try:
                world = self._client.reconnect(cells, self._reconnect_within, process=self._coordinator.pid)
            # As in `_return()`: it is an OSError, and the caller can start the recovery again.
            except CoordinatorLostError:
                raise
            except (StartError, TimeoutError, OSError):
                # One that lives and does not answer is no reason for another: the first could still serve ranks.
                ending = self._find_ending()
                if not ending or attempt == SUCCESSORS - 1:
                    raise
                self.ending = ending
            else:
                return Recovered(world, True, cells)
        raise AssertionError
