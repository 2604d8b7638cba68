"""What a relay's starter and its process say to each other on pipes."""

from __future__ import annotations

import msgspec


class RelayLaunch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings, from the starter.

    Attributes:
        coordinator: The coordinator's address.
        token: Secret that relays have to show the coordinator.
        certificate: PEM text that goes with the address (``tls`` only), or empty.
        host: What the coordinator calls this host in its lines.
        directory: The private directory of the relay's socket; the relay removes it at its end.
        listener: Descriptor of the listening Unix socket, passed on by the starter.
        dead_after: Seconds of silence after which a coordinator of another host counts as lost.
    """

    coordinator: str
    token: str
    certificate: str
    host: str
    directory: str
    listener: int
    dead_after: float = 30.0
