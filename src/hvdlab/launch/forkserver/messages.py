"""The messages between the pool and its fork server: msgspec structs in frames over a socketpair. No pickle."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from typing import Self, cast

import msgspec

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.protocol.codec import MALFORMED, encode_frame

CONTROLLER = -1
"""Number of the child that is ipyparallel's controller, where ranks are counted from 0."""
PORTS_TAKEN = errno.EADDRINUSE
"""Exit code of a controller whose ports another program has."""

LAUNCHER = -2
"""Number of an adopted process that is the program which starts and ends the ranks (``mpiexec``)."""


class ForkServerMessage(
    msgspec.Struct, array_like=True, frozen=True, tag=True, forbid_unknown_fields=True, gc=False
):
    """Base of every message."""


# -- pool to fork server ---------------------------------------------------------------------------------------------


class Fork(ForkServerMessage, frozen=True):
    """Order to fork child ``number``: a rank, or the controller if it is :data:`CONTROLLER`. Made by :meth:`of`.

    Strings of the operating system are in bytes: it need not be UTF-8.

    Attributes:
        environment: The whole environment of the child.
        directory: Its working directory.
        path: Its ``sys.path``.
        argv: Arguments of its main program (ipyparallel's options).
    """

    number: int
    environment: dict[bytes, bytes]
    directory: bytes
    path: tuple[bytes, ...]
    argv: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        number: int,
        environment: Mapping[str, str],
        directory: str,
        path: Iterable[str],
        argv: tuple[str, ...] = (),
    ) -> Self:
        """Make one from text as ``os.environ``, ``os.getcwd`` and ``sys.path`` have it."""
        variables = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
        return cls(number, variables, os.fsencode(directory), tuple(map(os.fsencode, path)), argv)


class Signal(ForkServerMessage, frozen=True):
    """Order to send a signal to child ``number``; to its whole process group if ``group``. Ignored if it is gone."""

    number: int
    signal: int
    group: bool = False


class Guard(ForkServerMessage, frozen=True):
    """Order to remove these files when the fork server ends, however the pool ended. Replaces the list so far."""

    paths: tuple[str, ...]


class ReportEngine(ForkServerMessage, frozen=True, tag="Engine"):
    """Order to report to the controller that a rank has become an engine of ipyparallel's, or (not ``joined``) has ended.

    The fork server reports its own children's ends to it by itself.
    """

    rank: int
    joined: bool


class Shutdown(ForkServerMessage, frozen=True):
    """Order to end: terminate every child, after ``grace`` seconds kill the rest, remove guarded files, exit."""

    grace: float = 1.0


class Forked(ForkServerMessage, frozen=True):
    """Report that child ``number`` runs as ``pid``.

    Attributes:
        started: When it started, as in field 22 of its ``/proc/<pid>/stat``: distinguishes it from a later process with
            the same number.
        log, err, out: The child's own descriptors of the reading ends of its log and of its captured output.
        unsent: The child's own descriptor of the memory for output that it has not sent.
    """

    number: int
    pid: int
    started: int = 0
    log: int = -1
    err: int = -1
    out: int = -1
    unsent: int = -1


class Adopt(ForkServerMessage, frozen=True):
    """Order to supervise these processes, which an earlier fork server forked, as children.

    How one of them ends may remain unknown (see :class:`Exited`). The fork server reports those that have ended already at once.
    """

    children: tuple[Forked, ...]


class Keep(ForkServerMessage, frozen=True):
    """Order to stay when the pool's process ends, and let a successor connect at ``path``; answered by :class:`Kept`.

    An empty path revokes that.
    """

    path: str


# -- fork server to pool ---------------------------------------------------------------------------------------------


class Loaded(ForkServerMessage, frozen=True):
    """The imports are done.

    Attributes:
        modules: Names that were imported.
        failed: Name to the import error's text.
        seconds: Duration of the imports, in seconds.
    """

    modules: tuple[str, ...]
    failed: dict[str, str]
    seconds: float


class ForkFailed(ForkServerMessage, frozen=True):
    """Report that child ``number`` could not be forked."""

    number: int
    text: str


class Exited(ForkServerMessage, frozen=True):
    """Report that a child ended.

    Attributes:
        code: Exit code; -1 if a signal ended it, or if that is unknown.
        signal: The signal, or 0. With ``code`` -1, 0 means that it is unknown how it ended.
        max_rss: The most memory that it had resident, in bytes.
        out_of_memory: Whether the kernel killed it for lack of memory.
        tail: The last lines of its standard error.
        seen: Whether ``max_rss`` was seen up to a second before the end, since the fork server was not its parent.
        left: Output that it wrote and perhaps has not sent, as its program encodes it; ``None`` without any.
    """

    number: int
    pid: int
    code: int
    signal: int
    max_rss: int
    out_of_memory: bool = False
    tail: str = ""
    seen: bool = False
    left: bytes | None = None


class ControllerUp(ForkServerMessage, frozen=True):
    """Report that ipyparallel's controller listens and has written its connection files."""

    pid: int


class Kept(ForkServerMessage, frozen=True):
    """Answer to :class:`Keep`; ``error`` is the reason of a refusal."""

    path: str
    error: str = ""


class Children(ForkServerMessage, frozen=True):
    """Living children, for a successor after ``Loaded``. The ends of others follow as :class:`Exited`.

    The frame brings the death pipe's writing end along.

    Attributes:
        children: The children that live.
        guarded: The files of the last :class:`Guard`.
    """

    children: tuple[Forked, ...]
    guarded: tuple[str, ...] = ()


class SuccessorRefused(ForkServerMessage, frozen=True, tag="Refused"):
    """Refusal of a successor while the pool's process, ``pid``, lives. The connection ends then."""

    pid: int


ToServer = Fork | Signal | Guard | ReportEngine | Shutdown | Adopt | Keep
FromServer = Loaded | Forked | ForkFailed | Exited | ControllerUp | Kept | Children | SuccessorRefused

_encoder = msgspec.msgpack.Encoder()
_to_warm: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(cast("type[ToServer]", ToServer))
_from_warm: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(
    cast("type[FromServer]", FromServer)
)


def encode(message: ForkServerMessage) -> bytes:
    """Return the whole frame of a message."""
    return encode_frame(_encoder.encode(message))


def decode_to_server(payload: bytes | memoryview) -> ToServer:
    """Return a message to the fork server. Raises ``ProtocolError`` if it is malformed."""
    try:
        return _to_warm.decode(payload)
    except MALFORMED as error:
        raise ProtocolError(f"not a message to the fork server: {error}") from error


def decode_from_server(payload: bytes | memoryview) -> FromServer:
    """Return a message of the fork server. Raises ``ProtocolError`` if it is malformed."""
    try:
        return _from_warm.decode(payload)
    except MALFORMED as error:
        raise ProtocolError(f"not a message of the fork server: {error}") from error
