"""What the starter and the coordinator's process say to each other on pipes."""

from __future__ import annotations

import msgspec

from hvdlab.collectives.coordinator.fusion import FUSION_THRESHOLD


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings, from the starter.

    Attributes:
        token: Secret that peers have to show.
        directory: A private directory for the socket; the coordinator removes it at its end.
        starter: Process id of the starter.
        size: Number of ranks, or ``None`` to wait for a client's word.
        tcp_host: Address to listen on for ranks of other hosts, or empty.
        fusion_threshold, stall_seconds, ping_after, dead_after: See ``ServerOptions`` and ``CoordinatorOptions``.
    """

    token: str
    directory: str
    starter: int
    size: int | None = None
    tcp_host: str = ""
    fusion_threshold: int = FUSION_THRESHOLD
    stall_seconds: float = 10.0
    ping_after: float = 5.0
    dead_after: float = 30.0


class Ready(msgspec.Struct, frozen=True):
    """The answer: addresses, or why it could not start."""

    address: str = ""
    tls_address: str = ""
    certificate: str = ""
    error: str = ""
