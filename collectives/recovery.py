"""What a client's owner does when its connection to the coordinator is lost: go on with it, or with a successor.

A connection may be lost without its coordinator: the client was too slow to read, or what came could not be read. Such
a coordinator has the world, the history and the cells, and is connected to again. Only one that has ended, is stopped,
or answers nobody is replaced.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hvdlab.collectives.client import CoordinatorLostError
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.linux import process_state
from hvdlab.collectives.membership import Membership

END_WITHIN = 1.0
"""Seconds that a process may take to end after its connections."""
ANSWER_WITHIN = 5.0
"""Seconds that a coordinator which lives has for its answer."""
OFTEN = 5
"""Times within a minute that a connection may be made again to the same coordinator, which must be the reason then."""

Cells = Mapping[str, Sequence[int]]


class Coordinator(Protocol):
    """What is needed of the coordinator's process."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    def ending(self) -> str:
        """How it ended; empty as long as it runs."""
        ...

    def respawn(self, timeout: float = ...) -> None:
        """Start a successor."""


class Connection(Protocol):
    """What is needed of the client."""

    def reconnect(self, cells: Cells | None = ..., timeout: float = ...) -> Membership:
        """As :meth:`Client.reconnect`."""
        ...


@dataclass(frozen=True, slots=True)
class Recovered:
    """How it went on.

    Attributes:
        membership: The world.
        replaced: Whether there is another coordinator.
        told: Cells that it knows of.
    """

    membership: Membership
    replaced: bool
    told: Cells


class Recovery:
    """Brings a client back to its coordinator, or to a successor of that.

    Args:
        coordinator: Its process.
        client: The connection.
        cells: Says which cells run, and on which ranks.
        respawn_within: Seconds that a successor has to come up.
        reconnect_within: Seconds that it has to have its world.

    Attributes:
        ending: How the coordinator has ended that was lost last; empty if it lived.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        client: Connection,
        *,
        cells: Callable[[], Cells] = dict,
        respawn_within: float = 10.0,
        reconnect_within: float = 30.0,
    ) -> None:
        self._coordinator, self._client, self._cells = coordinator, client, cells
        self._respawn_within, self._reconnect_within = respawn_within, reconnect_within
        self._returns: deque[float] = deque(maxlen=OFTEN)
        self.ending = ""

    def run(self) -> Recovered:
        """Do it. The client has lost its connection, or does in a moment.

        Raises:
            StartError, TimeoutError, InvalidRequestError, OSError: There is no successor, and why.
            CoordinatorLostError: The new connection was lost as well, or the client was closed. May be called again.
        """
        self.ending = self._find_ending()
        return self._return() or self._replace()

    def _find_ending(self) -> str:
        """A process ends a moment after its connections."""
        with contextlib.suppress(OSError):
            process = os.pidfd_open(self._coordinator.pid)
            try:
                select.select([process], [], [], END_WITHIN)
            finally:
                os.close(process)
        return self._coordinator.ending()

    def _return(self) -> Recovered | None:
        """Go on with the same coordinator, if it answers."""
        now = time.monotonic()
        if self.ending or process_state(self._coordinator.pid) in ("T", "t"):
            return None
        if len(self._returns) == OFTEN and now < self._returns[0] + 60:
            return None
        self._returns.append(now)
        told = self._cells()
        try:
            world = self._client.reconnect(told, ANSWER_WITHIN)
        except CoordinatorLostError:
            raise
        except (StartError, TimeoutError, OSError):
            return None
        return Recovered(world, False, told)

    def _replace(self) -> Recovered:
        self._coordinator.respawn(self._respawn_within)
        told = self._cells()
        return Recovered(self._client.reconnect(told, self._reconnect_within), True, told)
