"""Which of a host's addresses others reach it by."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import psutil

from hvdlab.collectives.errors import InvalidRequestError

_INTERNET = (socket.AF_INET, socket.AF_INET6)


def of_interface(names: Sequence[str]) -> str:
    """The address of the first of these interfaces that there is here; IPv4 first.

    Raises:
        InvalidRequestError: There is none; the text names those there are.
    """
    interfaces = psutil.net_if_addrs()
    for name in names:
        found = [a for family in _INTERNET for a in interfaces.get(name, ()) if a.family == family]
        usable = [a.address for a in found if not a.address.startswith("fe80")]
        if usable:
            return str(usable[0])
    raise InvalidRequestError(
        f"the network interface {' or '.join(names)} has no address here; there are {', '.join(sorted(interfaces))}."
    )


def towards(host: str, port: int = 9) -> str | None:
    """The address that packets to ``host`` would leave from; ``None`` if it is unknown. Nothing is sent."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    except OSError:
        return None
    return None


def outward() -> str | None:
    """The address of any interface that leads off this host; ``None`` without one."""
    states = psutil.net_if_stats()
    for name, found in psutil.net_if_addrs().items():
        for address in found:
            up = name in states and states[name].isup
            if up and address.family == socket.AF_INET and not address.address.startswith("127."):
                return str(address.address)
    return None
