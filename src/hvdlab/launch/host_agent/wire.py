"""The messages between the launcher and the agent of a host: msgspec structs in frames, over the agent's stdin and
stdout. The launcher skips all output before :data:`GREETING`, since a shell's profile may print."""

from __future__ import annotations

from typing import cast

import msgspec

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.protocol.codec import MALFORMED, encode_frame

GREETING = b"\x00hvdlab-agent-1\x00"
"""First bytes of an agent; the launcher skips all output before them."""
PIECE = 1 << 20
"""Bytes of output or of a result in one message, at most."""


class AgentMessage(
    msgspec.Struct, array_like=True, frozen=True, tag=True, forbid_unknown_fields=True, gc=False
):
    """Base of every message."""


class AgentStruct(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """Base of the parts of messages."""


class RankSpec(AgentStruct, frozen=True):
    """A rank to start: its number, and the variables that only it gets."""

    rank: int
    environment: dict[str, str]


# -- launcher to agent ------------------------------------------------------------------------------------------------


class Start(AgentMessage, frozen=True):
    """Program to run; ranks are started by :class:`Spawn`.

    Attributes:
        command: Program and arguments; in bytes, like the following, since they need not be UTF-8.
        directory: Working directory; ignored if it does not exist.
        environment: Variables added to the agent's own.
        removed: Variables that are removed from it.
        function: A pickled call, or empty. The command then gets two more arguments: descriptors of anonymous memory with
            the call, and for its outcome.
        threads: How many ranks share the host's cores: ``OMP_NUM_THREADS`` becomes a rank's share, unless the environment
            has it. 0 leaves it alone.
        stdin_rank: The rank that reads the launcher's standard input, or -1.
        coordinator: The coordinator's address; if it is on the network, the host's address towards it becomes the ranks'
            ``HVDLAB_ADDRESS``.
        interfaces: Network interfaces of which that address is chosen, or empty.
        forked: The program that a fork server of the host forks ranks to run, instead of the command; or empty.
        preload: Modules that are imported on the host before ranks are forked to run the command, which starts Python then;
            if empty, each rank's command is executed.
    """

    command: tuple[bytes, ...]
    directory: bytes
    environment: dict[bytes, bytes]
    removed: tuple[str, ...] = ()
    function: bytes = b""
    threads: int = 0
    stdin_rank: int = -1
    coordinator: str = ""
    interfaces: tuple[str, ...] = ()
    forked: str = ""
    preload: tuple[str, ...] = ()


class Spawn(AgentMessage, frozen=True):
    """Order to start these ranks."""

    ranks: tuple[RankSpec, ...]


class SignalRanks(AgentMessage, frozen=True):
    """Order to send a signal to the process groups of these ranks; those that have ended are left out."""

    ranks: tuple[int, ...]
    number: int


# -- agent to launcher ------------------------------------------------------------------------------------------------


class RankStarted(AgentMessage, frozen=True):
    """Report that a rank runs."""

    rank: int
    pid: int


class RankNotStarted(AgentMessage, frozen=True):
    """The command can't be run: exit code as of a shell (127 not found, 126 not allowed), and why."""

    rank: int
    code: int
    text: str


class RankOutput(AgentMessage, frozen=True, tag="Output"):
    """Output of a rank to stdout (1) or stderr (2)."""

    rank: int
    stream: int
    data: bytes


class ResultPiece(AgentMessage, frozen=True):
    """Next part of the result of a rank's function; comes before :class:`RankExited`."""

    rank: int
    data: bytes


class RankExited(AgentMessage, frozen=True):
    """Report that a rank has ended; all its output was sent before.

    Attributes:
        code: Its exit code; -1 if it is unknown.
        signal: The signal that ended it, or 0.
        reason, tail, detail, left: For a forked rank, as in :class:`~hvdlab.launch.starter.Ended`.
    """

    rank: int
    code: int
    signal: int
    reason: str = ""
    tail: str = ""
    detail: str = ""
    left: bytes | None = None


class OrderFailed(AgentMessage, frozen=True):
    """The agent could not carry out an order as a whole, and goes on without it.

    Attributes:
        text: Why.
        unread: Whether the order could not be read, so that nothing more is reported of ranks that it may have been for.
    """

    text: str
    unread: bool


# -- between the agent and a zygote, which also gets Spawn, and answers with RankStarted and RankNotStarted -----------


class Preloaded(AgentMessage, frozen=True):
    """The zygote's imports are done.

    Attributes:
        failed: Module to why it could not be imported.
    """

    failed: dict[str, str]


ToAgent = Start | Spawn | SignalRanks
FromAgent = RankStarted | RankNotStarted | RankOutput | ResultPiece | RankExited | OrderFailed
FromZygote = Preloaded | RankStarted | RankNotStarted

_encoder = msgspec.msgpack.Encoder()
_to_agent: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(cast("type[ToAgent]", ToAgent))
_from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(cast("type[FromAgent]", FromAgent))
_to_zygote = msgspec.msgpack.Decoder(Spawn)
_from_zygote: msgspec.msgpack.Decoder[FromZygote] = msgspec.msgpack.Decoder(
    cast("type[FromZygote]", FromZygote)
)


def encode(message: AgentMessage) -> bytes:
    """Return the whole frame of a message."""
    return encode_frame(_encoder.encode(message))


def encode_payload(message: AgentMessage) -> bytes:
    """Return a message without a frame, for sockets that keep messages apart."""
    return _encoder.encode(message)


def decode_to_agent(payload: bytes | memoryview) -> ToAgent:
    """Return a message to the agent. Raises ``ProtocolError``."""
    try:
        return _to_agent.decode(payload)
    except MALFORMED as error:
        raise ProtocolError(f"not a message to an agent: {error}") from error


def decode_from_agent(payload: bytes | memoryview) -> FromAgent:
    """Return a message of an agent. Raises ``ProtocolError``."""
    try:
        return _from_agent.decode(payload)
    except MALFORMED as error:
        raise ProtocolError(f"not a message of an agent: {error}") from error


def decode_to_zygote(payload: bytes) -> Spawn:
    """Return a message to a zygote. Raises ``ProtocolError``."""
    try:
        return _to_zygote.decode(payload)
    except MALFORMED as error:
        raise ProtocolError(f"not a message to a zygote: {error}") from error


def decode_from_zygote(payload: bytes) -> FromZygote:
    """Return a message of a zygote. Raises ``ProtocolError``."""
    try:
        return _from_zygote.decode(payload)
    except MALFORMED as error:
        raise ProtocolError(f"not a message of a zygote: {error}") from error
