"""Messages between workers and servers: msgspec structs in frames, never pickle.

A worker numbers its requests, and repeats unanswered ones over a new connection; a server carries out none twice. Arrays are not in
messages: they are in the worker's *transfer arena*, a file in memory. A server of the worker's host maps the file; a server of another
host keeps a copy, which :class:`Data` brings up to date.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.kvstore.base import Key
from hvdlab.collectives.kvstore.optimizer_state import OptimizerSpec
from hvdlab.collectives.protocol.codec import MALFORMED, encode_frame
from hvdlab.collectives.protocol.messages import Message

VERSION = 3

# -- from workers -----------------------------------------------------------------------------------------------------


class Attach(Message, frozen=True):
    """First message of a connection.

    Attributes:
        version: The worker's :data:`VERSION`.
        token: Secret of the server.
        rank, pid: The worker's rank in the world, and its process id.
        shared: The arena comes along as a descriptor; without, the server keeps a copy.
        repeats: Requests up to this number may be repeated ones, which the server announces by :class:`RequestBegun`.
    """

    version: int
    token: str
    rank: int
    pid: int
    shared: bool
    repeats: int = 0


class Bring(Message, frozen=True):
    """Memory of a store, as a descriptor: for a new server, or for the successor of one that has died."""

    store: int


class OpenStore(Message, frozen=True):
    """Request to use a store, as all of ``workers`` do. The worker that makes the store's memory sends :class:`Bring` before."""

    sequence: int
    store: int
    workers: tuple[int, ...]


class CloseStore(Message, frozen=True):
    """Notice that this worker uses a store no more. If it does not arrive, the server only keeps the memory for longer."""

    store: int


class Data(Message, frozen=True):
    """Bytes of an arena that is not shared, to the server or from it."""

    offset: int
    data: bytes


class Init(Message, frozen=True):
    """First value of a key, or of this server's shard of it. The value of an existing key stays."""

    sequence: int
    store: int
    key: Key
    shape: tuple[int, ...]
    dtype: str
    offset: int


class Push(Message, frozen=True):
    """Gradient of a key, or of this server's shard of it.

    Attributes:
        dtype, offset: Its element type, and where it is in the arena.
        seen: Version of the value from which it was computed: the one last pulled, plus this worker's pushes since.
        rows: With 0 or more, the arena has as many row numbers (int64) before as many rows; -1 for a dense gradient.
    """

    sequence: int
    store: int
    key: Key
    dtype: str
    offset: int
    seen: int = 0
    rows: int = -1


class Pull(Message, frozen=True):
    """Request to write a value to the arena.

    Attributes:
        dtype, offset: The element type to cast to, and where in the arena.
        rows: With 0 or more, the arena has as many row numbers (int64), and these rows are written behind them; -1 for all.
    """

    sequence: int
    store: int
    key: Key
    dtype: str
    offset: int
    rows: int = -1


class SetOptimizer(Message, frozen=True):
    """Request to update the values of a store by this optimizer from now on.

    Its states start from zero. With ``keeps_states`` it is the optimizer before with other settings, and goes on with its states.
    """

    sequence: int
    store: int
    optimizer: OptimizerSpec
    keeps_states: bool = False


class StockRequest(Message, frozen=True):
    """Question how much of a store the server keeps; also whether the server answers at all."""

    sequence: int
    store: int


class LeaveServer(Message, frozen=True):
    """Notice that this worker ends its connection on purpose."""


FromWorker = (
    Bring | OpenStore | CloseStore | Data | Init | Push | Pull | SetOptimizer | StockRequest | LeaveServer
)


# -- from servers -----------------------------------------------------------------------------------------------------


class Attached(Message, frozen=True):
    """Answer to :class:`Attach`."""

    pid: int


class AttachRefused(Message, frozen=True):
    """Answer to an :class:`Attach` that is not accepted; the connection ends."""

    reason: str


class RequestBegun(Message, frozen=True):
    """Notice that the server carries out a repeated request now; 0: it no longer does.

    If the server ends between the two, the request may be the reason: the worker counts such ends.
    """

    sequence: int


class SharedStoreMemory(Message, frozen=True):
    """Memory of a store, as a descriptor, which the worker keeps and brings to a successor of this server."""

    store: int


class RequestDone(Message, frozen=True):
    """Answer to a request that was carried out; its effect outlives the server.

    Attributes:
        version: The version that a push made, or that a pull read.
        staleness: Pushes of others that were applied between the version from which this push was computed and ``version``.
        began: When the server began with the request, in ns of its monotonic clock.
        took: How long it took, in ns.
    """

    sequence: int
    version: int = 0
    staleness: int = 0
    began: int = 0
    took: int = 0


class RequestFailed(Message, frozen=True):
    """Answer to a request that was refused, or that could not open a store because ``ranks`` have died."""

    sequence: int
    text: str
    ranks: tuple[int, ...] = ()


class Stock(Message, frozen=True):
    """Answer to :class:`StockRequest`: keys, and the bytes of their values."""

    sequence: int
    keys: int
    bytes: int


ToWorker = (
    Attached | AttachRefused | RequestBegun | SharedStoreMemory | Data | RequestDone | RequestFailed | Stock
)

_encoder = msgspec.msgpack.Encoder()
_attach = msgspec.msgpack.Decoder(Attach)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(cast("Any", FromWorker))
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(cast("Any", ToWorker))


def encode(message: Message) -> bytes:
    """Return the frame of a message. Raises ``ProtocolError`` if a number in it is too large, or a text is no Unicode."""
    try:
        return encode_frame(_encoder.encode(message))
    except (OverflowError, UnicodeEncodeError) as error:
        raise ProtocolError(f"a {type(message).__name__} can't be sent: {error}") from error


def decode_attach(payload: bytes | memoryview) -> Attach:
    """Decode the first message of a connection. Raises ``ProtocolError`` if it is another message."""
    try:
        return _attach.decode(payload)
    except MALFORMED as error:
        raise ProtocolError(f"no Attach: {error}") from error


def decode_from_worker(payload: bytes | memoryview) -> FromWorker:
    """Decode a message of a worker. Raises ``ProtocolError`` if it is none."""
    try:
        return _from_worker.decode(payload)
    except MALFORMED as error:
        raise ProtocolError(f"no message of a worker: {error}") from error


def decode_to_worker(payload: bytes | memoryview) -> ToWorker:
    """Decode a message of a server. Raises ``ProtocolError`` if it is none."""
    try:
        return _to_worker.decode(payload)
    except MALFORMED as error:
        raise ProtocolError(f"no message of a server: {error}") from error
