"""The settings that a server gets from its starter on standard input, and the place at which workers find it."""

from __future__ import annotations

import msgspec


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a server.

    Attributes:
        token: Secret that workers have to show.
        directory: A private directory with its socket.
        listener: Descriptor of the listening Unix socket.
        tls_listener: Descriptor of the listening socket for other hosts, or -1.
        certificate, key: PEM texts for that socket, or empty.
        coordinator, coordinator_token, coordinator_certificate: How to connect to the coordinator of the job, with which the server ends.
        reattach: A third of the seconds that the server waits for the coordinator's successor.
        optimizers: Modules to import, which register optimizers.
        path: Where the starter finds modules (``sys.path``), for these.
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
    optimizers: tuple[str, ...]
    path: tuple[str, ...]


class Place(msgspec.Struct, frozen=True):
    """How workers reach a server.

    Attributes:
        host: Host key of the server's host, which its ranks have in common.
        index: Number of the server among those of its host.
        directory: The server's private directory, which only ranks of its host reach.
        tls_address: Address at which workers of other hosts connect, or empty.
        certificate: PEM text that goes with ``tls_address``.
        token: Secret that workers have to show.
    """

    host: str
    index: int
    directory: str
    tls_address: str
    certificate: str
    token: str
