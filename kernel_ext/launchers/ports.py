"""Ports for ipyparallel's controller, outside the range that the system gives to any program that connects to somewhere.

Ranks and clients go on connecting to a controller that has died. On a port of that range they could reach another program, or
themselves: TCP connects a socket to itself if the system gives it the port that it connects to. A port outside that range only
gets another owner if a program names it.
"""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

TAKEN = errno.EADDRINUSE
"""Exit code of a controller that could not have its ports."""

LOWEST = 10000
"""Below it there are many programs' usual ports."""
HIGHEST = 30000
"""Clusters forward ports from here on, though no program listens there."""
ENOUGH = 1000
"""With this many ports to choose from, two controllers that choose at the same time are unlikely to take the same one."""

SYSTEM = Path("/proc/sys/net/ipv4")


def outgoing(system: Path = SYSTEM) -> range:
    """The ports that the system gives away by itself; empty if it does not say."""
    try:
        low, high = map(int, (system / "ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        return range(0)
    return range(low, high + 1)


def candidates(given_away: range) -> range:
    """The ports to choose from; empty if there are too few that the system does not give away."""
    if not given_away:
        return range(0)
    below, above = range(LOWEST, min(HIGHEST, given_away.start)), range(given_away.stop, 65536)
    return max((ports for ports in (below, above) if len(ports) >= ENOUGH), key=len, default=range(0))


def choose(count: int, among: range | None = None) -> list[int]:
    """Choose free ports that the system does not give away. There may be fewer than ``count``, or none.

    Args:
        count: How many are wanted.
        among: The ports to choose from; by default :func:`candidates` of this system.
    """
    among = candidates(outgoing()) if among is None else among
    found: list[int] = []
    for port in random.SystemRandom().sample(among, min(len(among), 20 * count)):
        if len(found) == count:
            break
        if _is_free(port):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    """Whether no program has the port, on any address. It is bound for a moment, but does not listen."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
