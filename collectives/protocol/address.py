"""Addresses of the coordinator: ``unix:/path`` or ``tls:host:port``."""

from __future__ import annotations

from dataclasses import dataclass

from hvdlab.collectives.errors import InvalidRequestError

UNIX_PATH_LIMIT = 107
"""Longest path of a Unix socket on Linux, in bytes."""


@dataclass(frozen=True, slots=True)
class UnixAddress:
    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TlsAddress:
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tls:{host}:{self.port}"


Address = UnixAddress | TlsAddress


def parse_address(text: str) -> Address:
    """Read an address.

    Raises:
        InvalidRequestError: It is neither ``unix:/path`` nor ``tls:host:port``.
    """
    scheme, _, rest = text.partition(":")
    if scheme == "unix" and rest.startswith("/") and "\0" not in rest:
        if len(rest.encode()) > UNIX_PATH_LIMIT:
            raise InvalidRequestError(f"the socket path {rest} is longer than {UNIX_PATH_LIMIT} bytes")
        return UnixAddress(rest)
    if scheme == "tls":
        host, _, port = rest.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if host and port.isascii() and port.isdigit() and 0 < int(port) < 65536:
            return TlsAddress(host, int(port))
    raise InvalidRequestError(f"{text!r} is no coordinator address; give unix:/path or tls:host:port")
