"""Which of this host's addresses others use to reach it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Iterator, Mapping

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.collectives.protocol.handshake import TlsAddress, parse_address

LOOPBACK = "127.0.0.1"
CHOICES = ("HVDLAB_ADDRESS", "HOROVOD_GLOO_IFACE", "GLOO_SOCKET_IFNAME")
"""Variables that choose, the first that is set. Each may hold an address, a network or names of interfaces."""
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # reserved for documentation: to ask which interface leads out


def chosen(environ: Mapping[str, str]) -> str | None:
    """The address that the environment chooses, or ``None`` if it does not.

    Raises:
        InvalidRequestError: This host has no such address; the text lists those it has.
    """
    for variable in CHOICES:
        text = environ.get(variable, "").strip()
        if text:
            return _resolve(variable, text)
    return None


def of_interfaces(names: Iterable[str]) -> str:
    """The address of the first of these interfaces that this host has. Raises ``InvalidRequestError``."""
    return _resolve("--network-interface", ",".join(names))


def _resolve(variable: str, text: str) -> str:
    if _is_address(text):
        return text
    own = list(_own())
    for piece in (piece.strip() for piece in text.split(",")):
        network = _network(piece)
        for interface, address in own:
            if interface == piece or (network is not None and ipaddress.ip_address(address) in network):
                return address
    have = ", ".join(f"{interface} {address}" for interface, address in own)
    raise InvalidRequestError(
        f"{variable}={text!r} names no address, network or interface of this host ({socket.gethostname()}), which "
        f"has: {have or 'none'}."
    )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    if "/" not in text:
        return None
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _own() -> Iterator[tuple[str, str]]:
    """Interfaces and addresses of this host, IPv4 first; link-local ones are left out."""
    import psutil

    found = psutil.net_if_addrs()
    for family in (socket.AF_INET, socket.AF_INET6):
        for interface, entries in found.items():
            for entry in entries:
                if (
                    entry.family == family
                    and not ipaddress.ip_address(entry.address.split("%")[0]).is_link_local
                ):
                    yield interface, entry.address


def towards(host: str) -> str | None:
    """The address of this host from which it reaches ``host``, and at which ``host`` reaches it; ``None`` if there is no way."""
    try:
        candidates = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in candidates:
        try:
            with socket.socket(family, kind, protocol) as sock:
                sock.connect(address)  # of a datagram socket: nothing is sent
                return str(sock.getsockname()[0])
        except OSError:
            continue
    return None


def outward(hints: Iterable[str] = ()) -> str:
    """An address of this host that other hosts can reach.

    Args:
        hints: Hosts in the network in question, which are tried first; then the host's own name, and an address outside.

    Raises:
        StartError: There is only the loopback interface.
    """
    for host in (*hints, socket.gethostname(), *_ELSEWHERE):
        address = towards(host) if host else None
        if address is not None and not is_loopback(address):
            return address
    for _, address in _own():
        if not is_loopback(address):
            return address
    raise StartError(
        f"This host ({socket.gethostname()}) has no address that other hosts could reach; set HVDLAB_ADDRESS to an "
        "address, a network such as 10.1.0.0/16, or an interface (`hvdlab run` has --network-interface)."
    )


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def own(environ: Mapping[str, str], coordinator: str) -> str:
    """The address that this rank's data plane binds to.

    The environment's choice; else the one from which a coordinator of another host (``tls:host:port``) is reached;
    else the loopback interface's.

    Raises:
        InvalidRequestError: The environment chooses what this host does not have.
    """
    return (
        chosen(environ)
        or (towards(_host(coordinator)) if coordinator.startswith("tls:") else None)
        or LOOPBACK
    )


def _host(coordinator: str) -> str:
    where = parse_address(coordinator)
    assert isinstance(where, TlsAddress)
    return where.host
