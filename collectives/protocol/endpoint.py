"""One end of a control connection: frames over a Unix or TLS socket, with file descriptors over the former, and contexts for TLS.

The coordinator, the ranks' engines and clients use the same class. After set-up the socket is non-blocking; the
owner's selector decides when to :meth:`Endpoint.receive` and :meth:`Endpoint.flush`.

Over TLS one self-signed certificate is pinned: only a peer that shows it is the coordinator.
"""

from __future__ import annotations

import array
import contextlib
import datetime
import ipaddress
import os
import socket
import ssl
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvdlab.collectives.errors import ProtocolError, StartError
from hvdlab.collectives.protocol.codec import FRAME_LIMIT, FrameDecoder, encode
from hvdlab.collectives.protocol.messages import Message

Frame = tuple[memoryview, int]
"""The rest of a frame, and a descriptor that goes with it, or -1."""


class Backlog:
    """Queue of frames that a socket has not accepted yet. ``bulk`` frames wait for all others. Within each kind the order stays.

    A frame of which sending was begun, or only tried, is finished first: TLS requires a second call with the bytes that it refused.

    Attributes:
        nbytes: Bytes that wait.
    """

    __slots__ = ("_begun", "_bulk", "_first", "nbytes")

    def __init__(self) -> None:
        self.nbytes = 0
        #: The rest of the frame whose sending was begun or tried.
        self._begun: Frame | None = None
        #: Other frames that wait: those that go first, and those in bulk.
        self._first: deque[Frame] = deque()
        self._bulk: deque[Frame] = deque()

    def begin(self, view: memoryview, descriptor: int) -> None:
        """Keep the rest of a frame that was tried while nothing waited."""
        assert not self.nbytes
        self._begun = (view, descriptor)
        self.nbytes = len(view)

    def add(self, view: memoryview, descriptor: int, *, bulk: bool) -> None:
        """Keep a frame that has to wait."""
        (self._bulk if bulk else self._first).append((view, descriptor))
        self.nbytes += len(view)

    def next(self) -> Frame | None:
        """Return the frame to send now; ``None`` if none waits."""
        if self._begun is None:
            if self._first:
                self._begun = self._first.popleft()
            elif self._bulk:
                self._begun = self._bulk.popleft()
        return self._begun

    def sent(self, count: int) -> None:
        """Remove ``count`` bytes of :meth:`next`, which were sent; at least one. Its descriptor went with them."""
        assert self._begun is not None
        view, _ = self._begun
        self.nbytes -= count
        self._begun = None if count == len(view) else (view[count:], -1)

    def clear(self) -> list[int]:
        """Drop all frames. Return the descriptors that were kept with them."""
        kept = [descriptor for _, descriptor in self._all() if descriptor >= 0]
        self._begun, self.nbytes = None, 0
        self._first.clear()
        self._bulk.clear()
        return kept

    def _all(self) -> Iterator[Frame]:
        if self._begun is not None:
            yield self._begun
        yield from self._first
        yield from self._bulk


RECEIVE_SIZE = 64 * 1024
"""Bytes of one read."""
JOINED_SIZE = 16 * 1024
"""Bytes of several frames that :meth:`Endpoint.send_all` copies together at most, to send them at once."""
TLS_AT_ONCE = 4 * RECEIVE_SIZE
"""Bytes that :meth:`Endpoint.receive` reads over TLS before it decodes them."""
DESCRIPTOR_LIMIT = 8
"""Descriptors that one read accepts, and that wait for :meth:`Endpoint.take_descriptor`; a peer can't exhaust those of this process."""
LOST = -1
"""Place of a descriptor that could not be received, since this process had no number left for it."""
_ANCILLARY = socket.CMSG_SPACE(4 * DESCRIPTOR_LIMIT)
_FLAGS = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_TRUNCATED = int(socket.MSG_CTRUNC)
"""Both as plain integers: operators of :class:`socket.MsgFlag` are functions in Python, for each message that comes."""
_TLS_WANTS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


class ConnectionLost(ConnectionError):
    """The connection was ended by the other side or by the network."""


class Endpoint:
    """Connection that carries frames both ways.

    ``send``, ``send_frame`` and ``flush`` can be called from any thread. ``receive``, ``take_descriptor`` and
    ``close`` belong to the thread that owns the connection.

    Args:
        sock: A connected socket (for TLS after the handshake); the endpoint owns it from now on, and makes it non-blocking.
        descriptors: Whether file descriptors that come along are kept; if not, the kernel drops them.
        limit: Largest payload that is accepted, in bytes.

    Attributes:
        early: Results of ``recvmsg()`` that are not decoded yet; see :meth:`read_ahead`.
    """

    def __init__(self, sock: socket.socket, *, descriptors: bool = False, limit: int = FRAME_LIMIT) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)
        #: Descriptors that came along and have no owner yet, in order; ``None`` where none are expected.
        self._descriptors: deque[int] | None = deque() if descriptors and not self._tls else None
        self._decoder = FrameDecoder(limit)
        # Held while anything is sent: frames of two threads must not mix, and the backlog's order is that of the calls.
        self._lock = threading.Lock()
        self._backlog = Backlog()
        self._closed = False
        self.early: deque[tuple[bytes, list[tuple[int, int, bytes]], int, object]] = deque()

    # -- state ----------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def secure(self) -> bool:
        """Return whether this is TLS, which can hold data that the socket does not show."""
        return self._tls

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def backlog(self) -> int:
        """Return the bytes that the socket has not accepted yet. While there are some, watch for writability and call :meth:`flush`."""
        return self._backlog.nbytes

    @property
    def unfinished(self) -> int:
        """Return the bytes received of a frame that is not complete yet."""
        return self._decoder.unfinished

    @property
    def limit(self) -> int:
        return self._decoder.limit

    @limit.setter
    def limit(self, value: int) -> None:
        self._decoder.limit = value

    # -- sending --------------------------------------------------------------------------------------------------

    def send(self, message: Message, descriptor: int = -1) -> bool:
        """Send a message. Return ``False`` if a part of it waits in the backlog.

        Raises:
            ConnectionLost: The connection is closed, on this side or the other.
            ProtocolError: The message is too large.
        """
        return self.send_frame(encode(message), descriptor)

    def send_all(self, messages: Sequence[Message]) -> bool:
        """Send messages in order, small ones in one system call. Return ``False`` if a part of them waits in the backlog.

        Raises:
            ConnectionLost: The connection is closed, on this side or the other.
            ProtocolError: A message is too large; all others are sent.
        """
        frames: list[bytes] = []
        refused: ProtocolError | None = None
        for message in messages:
            try:
                frames.append(encode(message))
            except (
                ProtocolError
            ) as error:  # the others are perhaps of other threads, which do not send them again
                refused = refused or error
        complete = self._send_frames(frames)
        if refused is not None:
            raise refused
        return complete

    def _send_frames(self, frames: list[bytes]) -> bool:
        if len(frames) > 1 and sum(map(len, frames)) <= JOINED_SIZE:
            return self.send_frame(b"".join(frames))
        complete = True
        for frame in frames:
            complete = self.send_frame(frame)
        return complete

    def send_frame(self, frame: bytes, descriptor: int = -1, *, bulk: bool = False) -> bool:
        """Send a frame that is encoded already, as :meth:`send` does. The descriptor is duplicated if it has to wait.

        Other frames overtake one in ``bulk`` that waits.
        """
        with self._lock:
            if self._closed:
                raise ConnectionLost("the connection is closed")
            if self._backlog.nbytes:
                # Even if the socket would accept bytes again: a frame that overtook the backlog would land in the middle of another
                # one.
                self._backlog.add(memoryview(frame), _copy(descriptor), bulk=bulk)
                return False
            sent = self._write(frame, descriptor)
            if sent == len(frame):
                return True
            # The kernel passes the descriptor with the first byte: it must go along again only if none was sent.
            self._backlog.begin(memoryview(frame)[sent:], _copy(descriptor) if sent == 0 else -1)
            return False

    def flush(self) -> bool:
        """Send frames of the backlog as far as the socket accepts them. Return ``True`` if none is left."""
        with self._lock:
            if self._closed:
                raise ConnectionLost("the connection is closed")
            while (waiting := self._backlog.next()) is not None:
                view, descriptor = waiting
                sent = self._write(view, descriptor)
                if sent == 0:
                    return False
                if descriptor >= 0:
                    os.close(descriptor)
                self._backlog.sent(sent)
            return True

    def _write(self, data: bytes | memoryview, descriptor: int) -> int:
        """Write, and return how many bytes the socket accepted; the descriptor went with them if there are any."""
        try:
            if descriptor < 0:
                return self._sock.send(data)
            rights = array.array("i", [descriptor])
            return self._sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        except (BlockingIOError, *_TLS_WANTS):
            return 0
        except OSError as error:
            raise ConnectionLost(f"sending failed: {error.strerror or error}") from error

    # -- receiving ------------------------------------------------------------------------------------------------

    def receive(self) -> list[memoryview]:
        """Return the payloads that have arrived; never blocks.

        Call it when the socket is readable, and once before the first wait (a TLS socket can hold data already).

        Raises:
            ConnectionLost: End of file or a failed connection; everything before it was returned by earlier calls.
            ProtocolError: The bytes that arrived are no frame.
        """
        # Bytes that were read ahead come before those that are still in the socket.
        if self.early:
            return self._receive_early()
        try:
            if self._tls:
                return self._decoder.feed(self._read_tls())
            data = (
                self._sock.recv(RECEIVE_SIZE) if self._descriptors is None else self._read_with_descriptors()
            )
        except (BlockingIOError, *_TLS_WANTS):
            return []
        except ConnectionLost:
            raise
        except OSError as error:
            raise ConnectionLost(f"receiving failed: {error.strerror or error}") from error
        if not data:
            raise ConnectionLost(self._end_of_file())
        return self._decoder.feed(data)

    def read_ahead(self) -> None:
        """Move bytes from the socket to ``early``, for :meth:`receive` to decode. Not for TLS; never blocks.

        It is for a thread that can be interrupted between any two instructions (the main thread, by Ctrl-C): reading and
        keeping are one step of the interpreter, so that no byte is ever lost.
        """
        # map() and extend() run in C: Python raises an interrupt before or after them, never between recvmsg() and the deque.
        self.early.extend(map(self._sock.recvmsg, (RECEIVE_SIZE,), (_ANCILLARY,), (_FLAGS,)))

    def early_frame(self) -> bytes | None:
        """Return the payload that was read ahead if it is exactly one without descriptors, and nothing came before it."""
        if self._decoder.unfinished or len(self.early) != 1:
            return None
        data, ancillary, _, _ = self.early[0]
        if ancillary or len(data) < 5 or int.from_bytes(data[:4], "little") != len(data) - 4:
            return None
        return data[4:]

    def _receive_early(self) -> list[memoryview]:
        payloads: list[memoryview] = []
        while self.early:
            data, ancillary, flags, _ = self.early.popleft()
            if self._descriptors is not None:
                self._keep_descriptors(ancillary, flags)
            if data:
                payloads += self._decoder.feed(data)
            elif not payloads:  # otherwise the next call meets the end of the file again
                raise ConnectionLost(self._end_of_file())
        return payloads

    def take_descriptor(self) -> int:
        """Return the oldest file descriptor that came along; the caller owns it.

        It is :data:`LOST` if it could not be received, because this process has reached its limit of descriptors.

        Raises:
            ProtocolError: None came, though a message has announced one.
        """
        if not self._descriptors:
            raise ProtocolError("a message announces a file descriptor that did not come")
        return self._descriptors.popleft()

    def _read_tls(self) -> bytes:
        """Read the bytes that can be read now: up to :data:`TLS_AT_ONCE`, and then those that are left inside the TLS layer.

        Bytes inside the TLS layer do not make the socket readable again, those that are still in the socket do. So a peer that sends
        faster than this reads can neither fill memory nor keep the thread here.
        """
        assert isinstance(self._sock, ssl.SSLSocket)
        pieces: list[bytes] = []
        size = 0
        while True:
            try:
                # OpenSSL does not allow reading and writing at the same time.
                with self._lock:
                    if size >= TLS_AT_ONCE and not self._sock.pending():
                        return b"".join(pieces)
                    data = self._sock.recv(RECEIVE_SIZE)
            except _TLS_WANTS:
                return b"".join(pieces)
            except OSError:
                if pieces:  # the next call meets the error again
                    return b"".join(pieces)
                raise
            if not data:
                if pieces:
                    return b"".join(pieces)
                raise ConnectionLost(self._end_of_file())
            pieces.append(data)
            size += len(data)

    def _read_with_descriptors(self) -> bytes:
        data, ancillary, flags, _address = self._sock.recvmsg(RECEIVE_SIZE, _ANCILLARY, _FLAGS)
        if ancillary or flags & _TRUNCATED:
            self._keep_descriptors(ancillary, flags)
        return data

    def _keep_descriptors(self, ancillary: list[tuple[int, int, bytes]], flags: int) -> None:
        assert self._descriptors is not None
        if flags & _TRUNCATED and not ancillary:
            # This process has no number left for the descriptor. One comes with each such message, so exactly one is lost.
            self._descriptors.append(LOST)
        for level, kind, content in ancillary:
            if level != socket.SOL_SOCKET or kind != socket.SCM_RIGHTS:
                continue
            numbers = array.array("i")
            numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
            for number in numbers:
                if len(self._descriptors) < DESCRIPTOR_LIMIT:
                    self._descriptors.append(number)
                else:  # more than any peer sends in order; unclosed they would stay open for ever
                    os.close(number)

    def _end_of_file(self) -> str:
        if self._decoder.unfinished:
            return "the other side closed the connection in the middle of a message"
        return "the other side closed the connection"

    # -- end ------------------------------------------------------------------------------------------------------

    def renew(self, other: Endpoint) -> None:
        """Continue with the connection of ``other``, which must not be used any more then; nothing of the old one is left.

        Called by the owning thread, while no other thread reads ahead.
        """
        # The object stays the same, since threads keep a reference to it and to its methods.
        self.close()
        with self._lock:
            self._sock, self._tls, self._decoder = other._sock, other._tls, other._decoder
            self._descriptors = other._descriptors
            # These bytes came over the old connection: decoded now they would land in the middle of the new stream.
            self.early.clear()
            self._closed = False

    def forget(self) -> None:
        """Close a forked child's copy of the socket, without a message to the other side."""
        self._lock = threading.Lock()  # the parent's thread that held it does not exist here
        self._closed = True
        # Not shutdown(), nor TLS's farewell: both would end the parent's connection.
        number = self._sock.detach()
        if number >= 0:
            os.close(number)

    def close(self) -> None:
        """Close the socket and every descriptor without an owner. Idempotent; frames in the backlog are lost."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            # Under the lock: a thread that is sending finishes first, and later ones find the connection closed, not another file
            # under its number.
            waiting = self._backlog.clear()
        for descriptor in (*waiting, *(self._descriptors or ())):
            if descriptor != LOST:
                os.close(descriptor)
        if self._descriptors:
            self._descriptors.clear()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # a thread that still waits on it notices
        self._sock.close()


def _copy(descriptor: int) -> int:
    # A copy, as the caller closes its own as soon as the call returns.
    return os.dup(descriptor) if descriptor >= 0 else -1


VALID_FOR = datetime.timedelta(days=365)
"""Validity of a coordinator's certificate, which must outlast the job."""


def client_context(certificate: str) -> ssl.SSLContext:
    """Return the settings of a client that trusts exactly this certificate (PEM text), under any name.

    Raises:
        StartError: The text is no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The certificate itself is pinned; its names prove nothing, since ranks can reach the coordinator under any address.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=certificate)
    except (ssl.SSLError, ValueError) as error:
        raise StartError(f"HVDLAB_CERT is no PEM certificate: {error}") from error
    return context


def require_same_certificate(sock: ssl.SSLSocket, certificate: str) -> None:
    """Raise ``StartError`` unless the other side showed exactly ``certificate`` (PEM text)."""
    if sock.getpeercert(binary_form=True) != ssl.PEM_cert_to_DER_cert(certificate.strip() + "\n"):
        raise StartError("The coordinator shows another certificate than the one in HVDLAB_CERT.")


def new_certificate(host: str) -> tuple[str, str]:
    """Return a new self-signed certificate for ``host``, and its key, as PEM texts.

    Raises:
        StartError: ``cryptography`` is not installed.
    """
    certificate, key = _self_signed(host)
    return certificate.decode(), key.decode()


def server_context(directory: Path, certificate: str, key: str) -> ssl.SSLContext:
    """Return the settings of a listener with this certificate (PEM texts).

    The key is written to ``directory`` (which must be private) and removed before this returns.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    path = directory / "key.pem"
    path.touch(mode=0o600)
    try:
        path.write_text(certificate + key)
        context.load_cert_chain(path)
    finally:
        path.unlink()
    return context


def _self_signed(host: str) -> tuple[bytes, bytes]:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise StartError(
            "Ranks on other hosts reach the coordinator over TLS, which needs the package cryptography: "
            "pip install hvdlab[tls]"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hvdlab coordinator")])
    try:
        alternative: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        alternative = x509.DNSName(host)
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks of hosts differ
        .not_valid_after(now + VALID_FOR)
        .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(pem), secret
