"""``horovod.runner.elastic.discovery``: sources of hosts, and Horovod's record of which of them can be used.

``hvdlab run`` keeps that record itself (:mod:`hvdlab.launch.host_discovery`); the classes here are for programs that use
Horovod's, as some schedulers' adapters do.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from hvdlab.collectives.elastic import HostUpdateResult
from hvdlab.launch.host_discovery import Cooldown, FixedHosts, HostDiscovery, HostDiscoveryScript

__all__ = [
    "DEFAULT_COOLDOWN_LOWER_LIMIT_SECONDS",
    "DEFAULT_COOLDOWN_UPPER_LIMIT_SECONDS",
    "DiscoveredHosts",
    "FixedHosts",
    "HostDiscovery",
    "HostDiscoveryScript",
    "HostManager",
    "HostState",
]

DEFAULT_COOLDOWN_LOWER_LIMIT_SECONDS = 1
DEFAULT_COOLDOWN_UPPER_LIMIT_SECONDS = 1 * 60 * 60

logger = logging.getLogger("hvdlab.elastic")


class HostState:
    """State of a host: whether it is put aside, and an event that is set then.

    Args:
        cooldown_range: Seconds that the host is put aside after its first failure, and at most; without it, for ever.

    Raises:
        ValueError: The range is none, or goes beyond a second and an hour.
    """

    def __init__(self, cooldown_range: Sequence[int] | None = None) -> None:
        self._event = threading.Event()
        self._blacklisted = False
        self._cooldown = None if cooldown_range is None else Cooldown(*_within_limits(cooldown_range))
        #: When the cooldown ends, by ``time.time()``; ``None`` without one.
        self._ends: float | None = None

    def get_event(self) -> threading.Event:
        """Return the event; a new one if the last was set."""
        if self._event.is_set():
            self._event = threading.Event()
        return self._event

    def set_event(self) -> None:
        """Set the event."""
        self._event.set()

    def blacklist(self) -> None:
        """Put the host aside, and set the event. Does not prolong a cooldown that is running."""
        now = time.time()
        self._blacklisted = True
        if self._ends is not None and now < self._ends:
            return
        if self._cooldown is not None:
            self._ends = now + self._cooldown.begin(now)
        self.set_event()

    def whitelist(self) -> None:
        """Permit the use of the host again."""
        self._blacklisted, self._ends = False, None

    def is_blacklisted(self) -> bool:
        """Return whether the host was put aside, and not readmitted since."""
        return self._blacklisted

    def is_resurrected(self) -> bool:
        """Return whether its cooldown is over, so that it may be readmitted."""
        return self._ends is not None and time.time() > self._ends


def _within_limits(cooldown_range: Sequence[int]) -> tuple[float, float]:
    least, most = DEFAULT_COOLDOWN_LOWER_LIMIT_SECONDS, DEFAULT_COOLDOWN_UPPER_LIMIT_SECONDS
    lower, upper = cooldown_range
    if not least <= lower <= upper <= most:
        raise ValueError(
            f"a cooldown from {lower} to {upper} s: give two numbers from {least} to {most}, the smaller one first."
        )
    return lower, upper


class DiscoveredHosts:
    """Hosts that were found, and the order in which ranks are given to them.

    Args:
        host_slots: Slots by the host's name.
        host_assignment_order: Hosts that can be used, those that were there first before the others.
    """

    def __init__(self, host_slots: Mapping[str, int], host_assignment_order: Sequence[str]) -> None:
        self._host_slots = dict(host_slots)
        self._host_assignment_order = list(host_assignment_order)

    @property
    def host_slots(self) -> dict[str, int]:
        """Return the slots of every host that was found."""
        return self._host_slots

    @property
    def available_hosts(self) -> set[str]:
        """Return the hosts that can be used."""
        return set(self._host_assignment_order)

    @property
    def host_assignment_order(self) -> list[str]:
        """Return the hosts that can be used, in order."""
        return self._host_assignment_order

    def get_slots(self, host: str) -> int:
        """Return the slots of a host; 0 if it was not found."""
        return self._host_slots.get(host, 0)

    def count_available_slots(self) -> int:
        """Return the slots of all hosts that can be used."""
        return sum(self.get_slots(host) for host in self._host_assignment_order)

    def update(self, hosts_state: Mapping[str, HostState]) -> DiscoveredHosts:
        """Leave out hosts that were put aside since. Returns itself."""
        self._host_assignment_order = [
            host for host in self._host_assignment_order if not hosts_state[host].is_blacklisted()
        ]
        return self


class HostManager:
    """Manager of the hosts of a source: which of them can be used.

    Args:
        discovery: The source.
        cooldown_range: As of :class:`HostState`.
    """

    def __init__(self, discovery: HostDiscovery, cooldown_range: Sequence[int] | None = None) -> None:
        self._current_hosts = DiscoveredHosts({}, [])
        self._hosts_state: defaultdict[str, HostState] = defaultdict(lambda: HostState(cooldown_range))
        self._discovery = discovery
        #: Guards the hosts and their states: a failure can be reported while the source's answer is handled.
        self._lock = threading.Lock()

    def update_available_hosts(self) -> int:
        """Ask the source.

        Returns:
            The change: a :class:`~hvdlab.collectives.elastic.HostUpdateResult`, or several of them.
        """
        # Outside the lock: a discovery script can run for long, and a host that fails is put aside meanwhile.
        found = dict(self._discovery.find_available_hosts_and_slots())
        with self._lock:
            before = self._current_hosts
            returned = [host for host in found if self._is_back(host)]
            changed = _difference(before.host_slots, found)
            for host in returned:
                self._hosts_state[host].whitelist()
                changed |= int(HostUpdateResult.added)
            if changed:
                usable = [host for host in found if not self._hosts_state[host].is_blacklisted()]
                order = self.order_available_hosts(usable, before.host_assignment_order)
                self._current_hosts = DiscoveredHosts(found, order)
            return changed

    def _is_back(self, host: str) -> bool:
        state = self._hosts_state[host]
        return state.is_blacklisted() and state.is_resurrected()

    @property
    def current_hosts(self) -> DiscoveredHosts:
        """Return the hosts as of the last :meth:`update_available_hosts`, without those that were put aside since."""
        with self._lock:
            return self._current_hosts.update(self._hosts_state)

    def blacklist(self, host: str) -> None:
        """Put a host aside."""
        with self._lock:
            if not self._hosts_state[host].is_blacklisted():
                logger.info("%s is put aside", host)
            self._hosts_state[host].blacklist()

    def is_blacklisted(self, host: str) -> bool:
        """Return whether a host was put aside."""
        # A look at a host makes its state: two threads must not make one each, of which only one is kept.
        with self._lock:
            return self._hosts_state[host].is_blacklisted()

    def get_host_event(self, host: str) -> threading.Event:
        """Return the event that is set when the host is put aside."""
        with self._lock:
            return self._hosts_state[host].get_event()

    @staticmethod
    def order_available_hosts(
        available_hosts: Iterable[str], prev_host_assignment_order: Sequence[str]
    ) -> list[str]:
        """Return the available hosts: those that had ranks before first, in their old order."""
        available = list(available_hosts)
        old = [host for host in prev_host_assignment_order if host in available]
        return old + [host for host in available if host not in old]


def _difference(before: Mapping[str, int], now: Mapping[str, int]) -> int:
    """Return how the slots have changed, as a :class:`HostUpdateResult` or several."""
    grown = any(slots > before.get(host, 0) for host, slots in now.items())
    shrunk = any(slots > now.get(host, 0) for host, slots in before.items())
    return int(HostUpdateResult.added) * grown | int(HostUpdateResult.removed) * shrunk
