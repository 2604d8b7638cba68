"""Lets a successor take the coordinator's place when it dies, and connects again to one that lives."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic

from hvdlab.collectives.client import Client, CoordinatorLostError
from hvdlab.collectives.coordinator.process import CoordinatorProcess
from hvdlab.collectives.errors import StartError
from hvdlab.collectives.recovery import Recovery

_OFTEN = 5
"""Deaths within a minute after which no other coordinator is started: whatever ends them would end it as well."""


class Keeper:
    """Watches the coordinator of a job.

    Args:
        coordinator: Its process, started with ``keep``.
        client: The launcher's connection to it.
        say: Takes a line when another coordinator has taken over, or the old one was connected to again.
        lost: Called with the reason if neither was possible.
    """

    def __init__(
        self,
        coordinator: CoordinatorProcess,
        client: Client,
        say: Callable[[str], None],
        lost: Callable[[str], None],
    ) -> None:
        self._client = client
        self._recovery = Recovery(coordinator, client)
        self._say, self._lost = say, lost
        self._deaths: deque[float] = deque(maxlen=_OFTEN)
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._closing = False
        self._thread: threading.Thread | None = None
        client.on_lost(self._begin)

    def close(self) -> None:
        """Let no successor take over any more, and wait for an attempt under way.

        Call it after the coordinator was closed: then no attempt has anything to wait for.
        """
        with self._lock:
            self._closing = True
        if self._thread is not None:
            self._thread.join()

    def _begin(self, reason: str) -> None:
        """Begin the recovery of a lost connection. On the client's thread, which must not wait for it."""
        with self._lock:
            if not self._closing:
                self._thread = threading.Thread(target=self._replace, args=(reason,), name="hvdlab-keeper")
                self._thread.start()

    def _replace(self, reason: str) -> None:
        with self._one_at_a_time:
            if self._client.closed and not self._closing:
                self._recover(reason)

    def _recover(self, reason: str) -> None:
        began = monotonic()
        if len(self._deaths) == _OFTEN and began < self._deaths[0] + 60:
            self._lost(f"{reason}; it has ended {_OFTEN} times within a minute")
            return
        self._deaths.append(began)
        try:
            recovered = self._recovery.run()
        except CoordinatorLostError:
            return  # the connection was lost again: _begin() was called for that, too
        except (StartError, TimeoutError, OSError) as error:
            if not self._closing:
                self._lost(f"{reason}; no other one could take over: {error}")
        else:
            seconds = monotonic() - began
            if recovered.replaced:
                self._say(
                    f"{reason}; another coordinator took over within {seconds:.1f} s. What ranks were doing together at "
                    "that moment has failed; those that can, go on"
                )
            else:
                self._deaths.pop()  # the coordinator lives, so this was no death
                self._say(
                    f"{reason}; it lives, and was connected to again within {seconds:.1f} s. The ranks did not notice"
                )
