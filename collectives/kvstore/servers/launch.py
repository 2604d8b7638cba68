"""What the starter of a server tells it on standard input, and where workers find it."""

from __future__ import annotations

import msgspec


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a server.

    Attributes:
        token: Secret that workers have to show.
        directory: A private directory with its socket.
        listener: Descriptor of the listening Unix socket.
        tls_listener: Descriptor of the listening socket for other hosts, or -1.
        certificate, key: PEM texts for that, or empty.
        coordinator, coordinator_token, coordinator_certificate: The job that the server belongs to, and ends with.
        reattach: Seconds that a coordinator's successor has to come.
        generation: How many servers there have been before in this place.
    """

    token: str
    directory: str
    listener: int
    tls_listener: int
    certificate: str
    key: str
    coordinator: str
    coordinator_token: str
    coordinator_certificate: str
    reattach: float
    generation: int


class Place(msgspec.Struct, frozen=True):
    """Where a server is.

    Attributes:
        host: What the ranks of its host have in common.
        index: Its number among those of its host.
        directory: Its private directory, which only ranks of its host reach.
        tls_address: Where workers of other hosts connect, or empty.
        certificate: PEM text that goes with it.
        token: Secret that workers have to show.
    """

    host: str
    index: int
    directory: str
    tls_address: str
    certificate: str
    token: str
