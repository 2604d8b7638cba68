from __future__ import annotations

import pytest

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.protocol.handshake import TlsAddress, UnixAddress, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/tmp/x/coordinator", UnixAddress("/tmp/x/coordinator")),
        ("tls:10.0.0.1:4000", TlsAddress("10.0.0.1", 4000)),
        ("tls:node-1.example:65535", TlsAddress("node-1.example", 65535)),
        ("tls:[fd00::1]:4000", TlsAddress("fd00::1", 4000)),
    ],
)
def test_addresses_are_read_and_written_alike(text: str, address: object) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "unix:",
        "unix:relative",
        "tls:host",
        "tls::1",
        "tls:host:0",
        "tls:host:70000",
        "tcp:host:1",
        "tls:h:x",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"unix:/path or tls:host:port"):
        parse_address(text)


def test_a_path_too_long_for_a_socket_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="107"):
        parse_address("unix:/" + "x" * 107)
