"""The card that rank 0 shows to the other ranks: the coordinator's addresses, and the secret that it asks for."""

from __future__ import annotations

import hmac
import socket

import msgspec

from hvdlab.collectives.engine.hosts import host_key
from hvdlab.collectives.errors import HvdlabError, InvalidRequestError, StartError
from hvdlab.collectives.linux import require_own_peer
from hvdlab.collectives.protocol.codec import MALFORMED
from hvdlab.collectives.protocol.endpoint import client_context, require_same_certificate
from hvdlab.collectives.protocol.handshake import TlsAddress, UnixAddress, parse_address

PROBE_SECONDS = 5.0


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The coordinator of a job.

    Attributes:
        size: Number of ranks of the job.
        host: The coordinator's host, as :func:`~hvdlab.collectives.engine.hosts.host_key` has it.
        local: Its address for ranks of that host (``unix:/path``).
        remote: Its address for all others (``tls:host:port``), or empty.
        certificate: PEM text that goes with ``remote``.
        token: Its secret for ranks; empty if the user has given them one.
        error: Why rank 0 could not start it, or empty.
        file: Name of the file in the user's private directory that has the whole card, for ranks of this host; empty if this is it.
        seal: Proves that the process that wrote the card knows the user's secret; empty if the user has given none.
    """

    size: int
    host: str = ""
    local: str = ""
    remote: str = ""
    certificate: str = ""
    token: str = ""
    error: str = ""
    file: str = ""
    seal: str = ""

    def encode(self, secret: str = "") -> bytes:
        """The card as it is shown, sealed if the user has given a secret."""
        return msgspec.json.encode(msgspec.structs.replace(self, seal=self._seal(secret) if secret else ""))

    def _seal(self, secret: str) -> str:
        bare = msgspec.json.encode(msgspec.structs.replace(self, seal=""))
        return hmac.digest(secret.encode(), b"hvdlab card\0" + bare, "sha256").hex()

    @classmethod
    def decode(cls, data: bytes, secret: str = "") -> Card:
        """Read a card. Raises ``StartError`` if this is none, or not sealed with the secret that the user has given."""
        try:
            card = msgspec.json.decode(data, type=cls)
        except MALFORMED as error:
            raise StartError(f"Rank 0 has announced something that can't be read: {error}") from error
        if secret and not hmac.compare_digest(card.seal.encode(), card._seal(secret).encode()):
            raise StartError(
                "What is announced as the coordinator is not sealed with this rank's HVDLAB_TOKEN: rank 0 was given another "
                "one or none, or somebody else has written it."
            )
        if card.seal and not secret:
            raise StartError(
                "Rank 0 was given HVDLAB_TOKEN, and this rank was not; give all of them the same."
            )
        return card

    @property
    def address(self) -> str:
        """The coordinator's address for this process.

        Raises:
            StartError: It can't be reached from this host.
        """
        if self.host == host_key():
            return self.local
        if not self.remote:
            raise StartError(
                f"Rank 0 runs on {self.host} and expects all ranks there, but this one runs on {host_key()}: the "
                "launcher's variables say that there is one host only. If these are containers of one machine, let "
                "them share it, or unset the launcher's count of ranks per host."
            )
        return self.remote

    def answers(self, timeout: float) -> bool:
        """Whether this coordinator runs, and is not one of a job that has ended."""
        try:
            _probe(self.address, self.certificate, min(timeout, PROBE_SECONDS))
        except (OSError, HvdlabError) as error:
            if isinstance(error, InvalidRequestError):
                raise
            return False
        return True


def _probe(address: str, certificate: str, timeout: float) -> None:
    where = parse_address(address)
    if isinstance(where, UnixAddress):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(timeout)
            sock.connect(where.path)
            require_own_peer(sock)
        return
    assert isinstance(where, TlsAddress)
    with (
        socket.create_connection((where.host, where.port), timeout) as plain,
        client_context(certificate).wrap_socket(plain) as secure,
    ):
        require_same_certificate(secure, certificate)
