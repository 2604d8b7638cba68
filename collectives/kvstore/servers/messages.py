"""Messages between workers and servers: msgspec structs in frames, never pickle.

A worker numbers its requests, and repeats unanswered ones when it had to connect again; a server carries out none twice.
Arrays are not in messages: they are in the worker's *outbox*, a file in memory that both sides have, or of which a server on
another host keeps a copy that :class:`Data` brings up to date.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.kvstore.keys import Key
from hvdlab.collectives.kvstore.state_format import OptimizerSpec
from hvdlab.collectives.protocol.codec import MALFORMED, encode_frame
from hvdlab.collectives.protocol.messages import Message

VERSION = 2

# -- from workers -----------------------------------------------------------------------------------------------------


class Attach(Message, frozen=True):
    """The first message of a connection. With ``shared`` an outbox comes along as a descriptor.

    ``repeats``: the requests up to this number may be repeated ones, which the server announces by :class:`Begun`.
    """

    version: int
    token: str
    rank: int
    pid: int
    shared: bool
    repeats: int = 0


class Bring(Message, frozen=True):
    """The memory of a store, as a descriptor: for a server that was started anew."""

    store: int


class Open(Message, frozen=True):
    """This worker uses a store, as all of ``workers`` do. The worker that makes the store's memory sends :class:`Bring` before."""

    sequence: int
    store: int
    workers: tuple[int, ...]


class Close(Message, frozen=True):
    """This worker uses a store no more. If this does not arrive, the server only keeps the memory for longer."""

    store: int


class Data(Message, frozen=True):
    """Bytes of an outbox that is not shared, to the server or from it."""

    offset: int
    data: bytes


class Init(Message, frozen=True):
    """The first value of a key, or of this server's part of it. The value of an existing key stays."""

    sequence: int
    store: int
    key: Key
    shape: tuple[int, ...]
    dtype: str
    offset: int


class Push(Message, frozen=True):
    """A gradient.

    ``seen`` is the version of the value that it was computed from: the one last pulled, plus this worker's pushes since. With
    ``rows`` >= 0 the outbox has as many row numbers (int64) before as many rows.
    """

    sequence: int
    store: int
    key: Key
    dtype: str
    offset: int
    seen: int = 0
    rows: int = -1


class Pull(Message, frozen=True):
    """Write a value to the outbox, as ``dtype``; with ``rows`` >= 0 those rows whose numbers (int64) are there, behind them."""

    sequence: int
    store: int
    key: Key
    dtype: str
    offset: int
    rows: int = -1


class SetOptimizer(Message, frozen=True):
    """Update the values of a store by this optimizer from now on.

    Its states begin anew, unless they are those of the optimizer before, of which this one is the same with other settings.
    """

    sequence: int
    store: int
    optimizer: OptimizerSpec
    keeps_states: bool = False


class StockRequest(Message, frozen=True):
    """How much of a store the server keeps."""

    sequence: int
    store: int


class Leave(Message, frozen=True):
    """This worker ends its connection on purpose."""


FromWorker = Bring | Open | Close | Data | Init | Push | Pull | SetOptimizer | StockRequest | Leave


# -- from servers -----------------------------------------------------------------------------------------------------


class Attached(Message, frozen=True):
    """The answer to :class:`Attach`."""

    pid: int


class Refused(Message, frozen=True):
    """The answer to an :class:`Attach` that is not accepted; the connection ends."""

    reason: str


class Begun(Message, frozen=True):
    """The server carries out a repeated request now; 0: it does not any more, also if the request is still to be answered.

    Should the server end between the two, the request may be the reason: the worker counts such ends.
    """

    sequence: int


class Share(Message, frozen=True):
    """The memory of a store, as a descriptor, for the worker to keep and to bring to a successor of this server."""

    store: int


class Done(Message, frozen=True):
    """A request was carried out, and its effect outlives the server.

    For a push: the version that it made; and as ``staleness`` how many pushes of others were applied between the version that it
    was computed from and this one. For a pull: the version that was read.
    ``began`` is when the server began with it, in ns of its monotonic clock, and ``took`` how long it took.
    """

    sequence: int
    version: int = 0
    staleness: int = 0
    began: int = 0
    took: int = 0


class Failed(Message, frozen=True):
    """A request was refused, or a store could not be opened because ``ranks`` have died."""

    sequence: int
    text: str
    ranks: tuple[int, ...] = ()


class Stock(Message, frozen=True):
    """The answer to :class:`StockRequest`: keys, and the bytes of their values."""

    sequence: int
    keys: int
    bytes: int


ToWorker = Attached | Refused | Begun | Share | Data | Done | Failed | Stock

_encoder = msgspec.msgpack.Encoder()
_attach = msgspec.msgpack.Decoder(Attach)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(cast("Any", FromWorker))
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(cast("Any", ToWorker))


def encode(message: Message) -> bytes:
    """The frame of a message. Raises ``ProtocolError`` if a number in it is too large, or a text is no Unicode."""
    try:
        return encode_frame(_encoder.encode(message))
    except (OverflowError, UnicodeEncodeError) as error:
        raise ProtocolError(f"a {type(message).__name__} can't be sent: {error}") from error


def decode_attach(payload: bytes | memoryview) -> Attach:
    """The first message of a connection. Raises ``ProtocolError`` if it is anything else."""
    try:
        return _attach.decode(payload)
    except MALFORMED as error:
        raise ProtocolError(f"no Attach: {error}") from error


def decode_from_worker(payload: bytes | memoryview) -> FromWorker:
    """A message of a worker. Raises ``ProtocolError`` if it is none."""
    try:
        return _from_worker.decode(payload)
    except MALFORMED as error:
        raise ProtocolError(f"no message of a worker: {error}") from error


def decode_to_worker(payload: bytes | memoryview) -> ToWorker:
    """A message of a server. Raises ``ProtocolError`` if it is none."""
    try:
        return _to_worker.decode(payload)
    except MALFORMED as error:
        raise ProtocolError(f"no message of a server: {error}") from error
