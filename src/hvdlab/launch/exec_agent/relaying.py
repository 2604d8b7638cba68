"""The relay of an agent's host: the agent starts it before the ranks, looks after it, and ends it after them."""

from __future__ import annotations

import os
import sys
import time

from hvdlab.collectives.environment import relay_variable
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.relay.process import RelayProcess
from hvdlab.launch.exec_agent import wire


class HostRelay:
    """A relay that runs; :func:`start` makes one.

    Attributes:
        pid: Its process.
        answers: Descriptor to watch.
    """

    def __init__(self, process: RelayProcess) -> None:
        self._process = process
        self.pid, self.answers = process.pid, process.answers

    def due(self) -> float:
        """Seconds until :meth:`look` has to be called."""
        return self._process.due(time.monotonic())

    def look(self) -> None:
        """Take in what it has answered, and kill it if it does not answer; its ranks connect by themselves then."""
        reason = self._process.look(time.monotonic())
        if reason:
            print(f"hvdlab: the relay of this host is killed: {reason}", file=sys.stderr, flush=True)

    def close(self, timeout: float) -> None:
        """End it, or clear away what is left of it. Ranks that are started later do not look for it."""
        for name in relay_variable("", ""):
            os.environ.pop(name, None)
        self._process.close(timeout)


def start(order: wire.Start) -> HostRelay | None:
    """Start the relay that an order asks for, and let the ranks know where it is; ``None`` if that is not possible."""
    wanted = order.relay
    assert wanted is not None
    try:
        process = RelayProcess(
            order.coordinator, wanted.token, wanted.certificate, wanted.host, dead_after=wanted.dead_after
        )
    except StartError as error:
        print(f"hvdlab: {error}. Ranks connect by themselves", file=sys.stderr, flush=True)
        return None
    os.environ.update(relay_variable(process.address, order.coordinator))
    return HostRelay(process)
