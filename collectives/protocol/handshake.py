"""Handshake of a peer with the coordinator: addresses, Hello and Welcome, and versions, which must be alike, and encryption.

Ranks send each other functions and objects, and compute the same, so the coordinator refuses other versions of Python, hvdlab or PyTorch.

hvdlab encrypts the coordinator's connections between hosts. Data goes over Gloo or MPI, which encrypt nothing, and how ranks find
each other is up to their launcher. With ``HVDLAB_REQUIRE_ENCRYPTION`` a world in which data would travel between hosts in the clear
does not come about.
"""

from __future__ import annotations

import errno
import ipaddress
import platform
import socket
import ssl
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hvdlab.collectives.errors import InvalidRequestError, ProtocolError, StartError
from hvdlab.collectives.protocol.codec import HELLO_LIMIT, decode_to_peer, encode
from hvdlab.collectives.protocol.endpoint import Endpoint, client_context, require_same_certificate
from hvdlab.collectives.protocol.messages import Hello, Member, Refused, Welcome
from hvdlab.collectives.system import require_own_peer
from hvdlab.collectives.time_limits import Deadline

UNIX_PATH_LIMIT = 107
"""Longest path of a Unix socket on Linux, in bytes."""


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """Address of a coordinator on this host: the path of its Unix socket."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class TlsAddress:
    """Address of a coordinator that other hosts reach: a name or IP address, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tls:{host}:{self.port}"


Address = UnixAddress | TlsAddress


def parse_address(text: str) -> Address:
    """Return the address that a text stands for.

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


Opened = Callable[[socket.socket], None]

#: Errors that prove the absence of a listener: its host, or the file system, has answered.
_NOBODY = (errno.ECONNREFUSED, errno.ENOENT)
#: Errors of a network that can be repaired: another attempt can succeed.
_PASSING = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
_TRY_AGAIN_SECONDS = 0.2
"""Seconds between two attempts to reach another host: these errors can come at once, without a wait of the system's."""
_ANSWER_SECONDS = 5.0
"""Seconds for one attempt to reach another host. The system repeats unanswered packets ever more rarely: a new attempt finds a network
sooner that is back."""


class NobodyThereError(StartError):
    """No process has the listening socket: neither a coordinator nor a starter that could start one on it."""


class ForeignPeerError(StartError):
    """A process of another user listens there: it could pass itself off as the coordinator."""


class UnreachableError(StartError):
    """No sign of the coordinator's host: it is off, or the network between it and this one is."""


class RefusedError(StartError):
    """The coordinator has answered, and refuses this peer.

    Attributes:
        again: Whether it can accept the same peer in a moment.
    """

    def __init__(self, text: str, *, again: bool = False) -> None:
        self.again = again
        super().__init__(text)


def connect(
    address: str,
    hello: Hello,
    *,
    certificate: str | None = None,
    deadline: Deadline,
    dead_after: float = 30.0,
    opened: Opened | None = None,
) -> tuple[Endpoint, Welcome]:
    """Connect to the coordinator and introduce this peer.

    Args:
        address: ``unix:/path`` or ``tls:host:port``.
        hello: Introduction, with the token.
        certificate: PEM text; over TLS the coordinator must show exactly this certificate.
        deadline: Limit of all steps together.
        dead_after: Seconds without a sign of life of the other host after which the connection is lost (``tls`` only).
        opened: Gets each socket before this function waits on it; shutting it down from another thread ends the
            wait. May raise ``StartError`` to give up.

    Returns:
        The connection, on which nothing after ``Welcome`` was read yet, and the coordinator's answer.

    Raises:
        NobodyThereError: No process listens there.
        ForeignPeerError: A process of another user listens there.
        UnreachableError: The host did not answer in time.
        RefusedError: The coordinator refused Hello.
        StartError: The certificate is another one, or the coordinator did not answer in time. The base class of these.
        InvalidRequestError: The address can't be read.
    """
    where = parse_address(address)
    sock = _open(where, certificate, deadline, opened)
    if not isinstance(where, UnixAddress):
        _notice_silence(sock, dead_after)
    try:
        welcome = _introduce(sock, hello, str(where), deadline)
    except BaseException:
        sock.close()
        raise
    # Ranks alone get memory from the coordinator; of anything that came along to another peer the kernel closes the descriptors.
    return Endpoint(sock, descriptors=hello.role == "rank"), welcome


def _open(
    where: Address, certificate: str | None, deadline: Deadline, opened: Opened | None
) -> socket.socket:
    try:
        sock = _reach(where, deadline, opened)
    except OSError as error:
        kind = NobodyThereError if error.errno in _NOBODY else StartError
        if _passes(error) and not isinstance(where, UnixAddress):
            kind = UnreachableError
        raise kind(
            f"No coordinator answers at {where} ({error.strerror or error}); it has ended or the address is old."
        ) from error
    if not isinstance(where, UnixAddress):
        sock = _wrap(sock, str(where), certificate)
    try:
        sock.settimeout(deadline.remaining())
        # Once more: wrapping has moved the descriptor to another object, and a shutdown of the first one would not end the wait.
        if opened is not None:
            opened(sock)
        if isinstance(sock, ssl.SSLSocket):
            _shake(sock, str(where), certificate)
    except BaseException:
        sock.close()
        raise
    return sock


def _reach(where: Address, deadline: Deadline, opened: Opened | None) -> socket.socket:
    """Return a connection. A host that has just come (back) to the network is not always reachable at once."""
    while True:
        try:
            return _connect_first(where, deadline, opened)
        except OSError as error:
            if not _passes(error) or deadline.expired:
                raise
        time.sleep(min(_TRY_AGAIN_SECONDS, deadline.remaining() or _TRY_AGAIN_SECONDS))


def _passes(error: OSError) -> bool:
    """Return whether this error means only that no answer has come from the other host yet."""
    return isinstance(error, TimeoutError) or error.errno in _PASSING


def _connect_first(where: Address, deadline: Deadline, opened: Opened | None) -> socket.socket:
    """Return a connection to the first address of ``where`` that answers."""
    limit = deadline.remaining()
    if isinstance(where, UnixAddress):
        found: list[tuple[int, Any]] = [(socket.AF_UNIX, where.path)]
    else:
        limit = _ANSWER_SECONDS if limit is None else min(limit, _ANSWER_SECONDS)
        names = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
        found = [(family, address) for family, _, _, _, address in names]
    failure: OSError | None = None
    # A name can have addresses of both families, of which the coordinator listens on one only.
    for family, address in found:
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(limit)
            if opened is not None:
                opened(sock)
            sock.connect(address)
            if isinstance(where, UnixAddress):
                _require_own(sock, where)
        except OSError as error:
            sock.close()
            failure = error
        # `opened` can raise to give up, and Ctrl-C can interrupt the wait: neither may leave the socket open.
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure or OSError(f"{where} has no address")


def _require_own(sock: socket.socket, where: UnixAddress) -> None:
    """Raise ``ForeignPeerError`` if another user listens there. Called before the token is sent."""
    try:
        require_own_peer(sock)
    except OSError as error:
        raise ForeignPeerError(
            f"The coordinator at {where} is not trusted, and was sent nothing: {error.strerror or error}. Take the "
            "address of a job of your own."
        ) from error


def _wrap(plain: socket.socket, where: str, certificate: str | None) -> ssl.SSLSocket:
    """Return the socket wrapped for TLS; :func:`_shake` makes it secure."""
    try:
        if certificate is None:
            raise StartError(f"{where} needs the coordinator's certificate; set HVDLAB_CERT.")
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return client_context(certificate).wrap_socket(plain, do_handshake_on_connect=False)
    except OSError as error:
        plain.close()
        raise StartError(f"No secure connection to {where}: {error}") from error
    except BaseException:
        plain.close()
        raise


def _shake(secure: ssl.SSLSocket, where: str, certificate: str | None) -> None:
    try:
        secure.do_handshake()
    except OSError as error:
        raise StartError(f"No secure connection to {where}: {error}") from error
    require_same_certificate(secure, certificate or "")


def _notice_silence(sock: socket.socket, seconds: float) -> None:
    """Set the seconds without a sign of life after which the system ends the connection: a host that is cut off can't close it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Three probes without an answer, so that one lost packet does not end the connection.
    probe = max(1, int(seconds / 3))
    for option, value in (
        ("TCP_KEEPIDLE", probe),
        ("TCP_KEEPINTVL", probe),
        ("TCP_KEEPCNT", 3),
        # Keepalive probes are not sent while data waits for its acknowledgement; this limit holds then.
        ("TCP_USER_TIMEOUT", max(1, int(seconds * 1000))),
    ):
        if hasattr(socket, option):  # not all systems have all
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _introduce(sock: socket.socket, hello: Hello, where: str, deadline: Deadline) -> Welcome:
    try:
        sock.settimeout(deadline.remaining())
        # Only now, after the check of the other side's user or certificate: Hello has the token in it.
        sock.sendall(encode(hello))
        # Exactly one frame is read, so that a descriptor that comes with a later one is not lost.
        (length,) = struct.unpack("<I", _read_exactly(sock, 4, deadline))
        if not 0 < length <= HELLO_LIMIT:
            raise ProtocolError(f"an answer of {length} bytes to Hello")
        answer = decode_to_peer(_read_exactly(sock, length, deadline))
    except TimeoutError as error:
        raise StartError(
            f"The coordinator at {where} did not answer within {deadline.seconds:g} s."
        ) from error
    except (OSError, ProtocolError) as error:
        raise StartError(f"{where} did not answer like a coordinator: {error}") from error
    if isinstance(answer, Refused):
        raise RefusedError(f"The coordinator at {where} refused: {answer.reason}", again=answer.again)
    if not isinstance(answer, Welcome):
        raise StartError(f"The coordinator at {where} answered Hello with {type(answer).__name__}.")
    return answer


def _read_exactly(sock: socket.socket, count: int, deadline: Deadline) -> bytes:
    pieces = bytearray()
    while len(pieces) < count:
        # The socket's limit begins again with each recv(): a peer that sends single bytes could prolong the whole.
        deadline.check("the answer to Hello")
        sock.settimeout(deadline.remaining())
        piece = sock.recv(count - len(pieces))
        if not piece:
            raise ConnectionError("the connection was closed")
        pieces += piece
    return bytes(pieces)


COMPARED = ("hvdlab", "torch")
"""Modules whose versions are compared, where a rank has loaded them."""


def own_versions() -> dict[str, str]:
    """Return the versions of this process: of Python ``3.11`` without its last part, of modules without that of their build (``+cpu``)."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in COMPARED:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version).partition("+")[0]
    return found


class AgreedVersions:
    """Versions of the ranks in the world.

    Each rank was let in because its versions equal those of the others. So a newcomer need not be compared with every one of them:
    a world of n ranks comes about with n comparisons.
    """

    def __init__(self) -> None:
        #: Number of ranks that have reported this version, by name and version. Each name has one version.
        self._having: Counter[tuple[str, str]] = Counter()
        #: The version of each name that at least one rank has reported.
        self._agreed: dict[str, str] = {}

    def add(self, versions: Mapping[str, str]) -> None:
        """Add the versions of a rank that was let in."""
        self._having.update(versions.items())
        self._agreed.update(versions)

    def remove(self, versions: Mapping[str, str]) -> None:
        """Remove the versions of a rank that is gone."""
        for name, version in versions.items():
            self._having[name, version] -= 1
            if not self._having[name, version]:
                # The last rank with a version is gone: the next world can agree on another one.
                del self._having[name, version], self._agreed[name]

    def fit(self, versions: Mapping[str, str]) -> bool:
        """Return whether these are the versions of all ranks in the world, as far as both have reported them."""
        return all(self._agreed.get(name, version) == version for name, version in versions.items())


def version_mismatch(
    rank: int, versions: Mapping[str, str], others: Iterable[tuple[str, Mapping[str, str]]]
) -> str:
    """Return why a rank may not join these, or an empty text.

    Args:
        rank: Number of the newcomer.
        versions: Its versions, by name; a name that is not among them is not compared.
        others: Name, such as ``rank 0``, and versions of each present peer.
    """
    for other, theirs in others:
        for name, version in versions.items():
            if theirs.get(name, version) != version:
                return (
                    f"rank {rank} has {name} {version}, but {other} has {name} {theirs[name]}; all ranks need the same, so "
                    f"install {name} {theirs[name]} where rank {rank} runs"
                )
    return ""


ENCRYPTION_VARIABLE = "HVDLAB_REQUIRE_ENCRYPTION"
"""The variable, as errors name it."""
NO_ENCRYPTED_NETWORK = "1"
"""The value with which no network counts as encrypted."""


def is_encrypted(required: str, address: str) -> bool:
    """Return whether this address is in one of the networks that the user has declared as encrypted."""
    if required == NO_ENCRYPTED_NETWORK:
        return False
    where = ipaddress.ip_address(address.split("%")[0])
    networks = map(ipaddress.ip_network, required.split(","))
    return any(where.version == network.version and where in network for network in networks)


def encryption_refusal(
    required: str, rank: int, hello: Hello, members: Iterable[Member], hosts: Collection[str]
) -> str:
    """Return why a rank may not join these, or an empty text.

    Args:
        required: The value of the variable; empty if encryption is not required.
        rank: Number of the newcomer.
        hello: Its introduction.
        members: The ranks that are there.
        hosts: The hosts that they run on.
    """
    if not required or all(host == hello.host for host in hosts):
        return ""
    if len(hosts) > 1 and is_encrypted(required, hello.address):
        return ""  # the members were let in beside members on other hosts, so their addresses are encrypted
    for member in members:
        if member.host == hello.host:
            continue
        # Both ends: data is in the clear if one of them is outside the tunnel.
        for whose, address in ((rank, hello.address), (member.rank, member.address)):
            if not is_encrypted(required, address):
                return (
                    f"data between rank {rank} ({hello.host}) and rank {member.rank} ({member.host}) would travel unencrypted, "
                    f"since rank {whose} uses the address {address}; {ENCRYPTION_VARIABLE}={required} forbids that. Lead it through a "
                    "tunnel (WireGuard, IPsec) and name the tunnel's network twice, as in "
                    f"{ENCRYPTION_VARIABLE}=10.8.0.0/24 HVDLAB_ADDRESS=10.8.0.0/24, or run all ranks on one host"
                )
    return ""


def require_sealed_rendezvous(required: str, secret: str, launcher: str) -> None:
    """Raise ``StartError`` if ranks of several hosts would send each other the token in the clear."""
    if required and not secret:
        raise StartError(
            f"Ranks that {launcher} has started on several hosts tell each other how to join over connections, or in files, "
            f"that others may read; {ENCRYPTION_VARIABLE}={required} forbids that. Give all ranks the same secret in HVDLAB_TOKEN, or a "
            "file of it in HVDLAB_TOKEN_FILE: then what they tell each other holds none. Or start them by `hvdlab run`."
        )
