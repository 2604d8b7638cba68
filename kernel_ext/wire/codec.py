"""The messages of the pool's channel in both directions, and their codec.

The structs themselves are in the other modules of this folder, by subject. Each travels under the topic of its direction:
:data:`TO_RANK` from the pool, :data:`TO_POOL` from a rank. The coordinator relays the bytes without decoding them. No pickle is
decoded here: :class:`~hvdlab.kernel_ext.wire.values.Value` carries a pickle that the user asked for by pulling, and only the pool
that started the ranks unpickles it.

The encoder refuses some texts and values of users' objects: :func:`wire_text` and :func:`wire_value` return what it takes.
"""

from __future__ import annotations

import base64
import numbers
from typing import Any

import msgspec

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.protocol.codec import MALFORMED
from hvdlab.kernel_ext.wire.cells import (
    Acknowledge,
    AcknowledgeLate,
    CellDone,
    DiscardCell,
    JoinedCell,
    Late,
    ListRetainedCells,
    Output,
    PromptReply,
    PromptRequest,
    PromptWithdrawn,
    ResendFrom,
    RetainedCells,
    RunCell,
    SetOwner,
)
from hvdlab.kernel_ext.wire.compare import (
    AskBlocks,
    AskLeaves,
    AskTensors,
    AskVariables,
    AskView,
    Blocks,
    Compare,
    Compared,
    ComparisonOpened,
    Gather,
    LeafList,
    OpenComparison,
    Tensors,
    Variables,
    VariableView,
)
from hvdlab.kernel_ext.wire.status import (
    AskNames,
    AskStack,
    AskStatus,
    Complete,
    Completions,
    EvaluateExpressions,
    ExpressionValues,
    Inspect,
    Inspection,
    Stack,
    Status,
    UserNames,
)
from hvdlab.kernel_ext.wire.values import (
    Acked,
    LoadSnapshot,
    PullValue,
    PushValue,
    ReadChunk,
    ReleaseTransfer,
    Snapshot,
    SnapshotLoaded,
    TakeSnapshot,
    TransferChunk,
    Value,
    WriteChunk,
)

TO_RANK = "hvdlab.pool.to_rank"
TO_POOL = "hvdlab.pool.to_pool"


ToRank = (
    RunCell
    | SetOwner
    | ListRetainedCells
    | Acknowledge
    | AcknowledgeLate
    | ResendFrom
    | DiscardCell
    | PushValue
    | WriteChunk
    | PullValue
    | TakeSnapshot
    | LoadSnapshot
    | ReadChunk
    | ReleaseTransfer
    | AskStatus
    | Complete
    | Inspect
    | EvaluateExpressions
    | AskStack
    | AskNames
    | PromptReply
    | OpenComparison
    | AskLeaves
    | AskBlocks
    | Gather
    | Compare
    | AskView
    | AskVariables
    | AskTensors
)
ToPool = (
    Output
    | Late
    | JoinedCell
    | RetainedCells
    | CellDone
    | Acked
    | Snapshot
    | SnapshotLoaded
    | Value
    | TransferChunk
    | Status
    | Completions
    | Inspection
    | ExpressionValues
    | Stack
    | UserNames
    | PromptRequest
    | PromptWithdrawn
    | ComparisonOpened
    | LeafList
    | Blocks
    | Compared
    | VariableView
    | Variables
    | Tensors
)

encode = msgspec.msgpack.Encoder().encode

_to_rank: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToRank)
_to_pool: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToPool)


def decode_to_rank(body: bytes) -> Any:
    """Decode a message of the pool to a rank, one of ``ToRank``. Raises ``ProtocolError`` if it is malformed."""
    try:
        return _to_rank.decode(body)
    except MALFORMED as error:
        raise ProtocolError(f"no message of a pool: {error}") from error


def decode_to_pool(body: bytes) -> Any:
    """Decode a message of a rank to the pool, one of ``ToPool``. Raises ``ProtocolError`` if it is malformed."""
    try:
        return _to_pool.decode(body)
    except MALFORMED as error:
        raise ProtocolError(f"no message of a rank: {error}") from error


def wire_text(text: str) -> str:
    """Return the text as a plain ``str``, since the encoder of messages refuses subclasses; lone surrogates escaped.

    ``str(error)`` and ``_repr_html_`` may well return a subclass, such as ``numpy.str_``, ``markupsafe.Markup`` or the
    text that a data loader of torch makes of a ``KeyError``.
    """
    exact = str.__str__(text)
    return exact if exact.isascii() else exact.encode("utf-8", "backslashreplace").decode()


DEEPEST = 100
"""How deep dictionaries and lists may lie within each other; messages can't carry any depth."""


_INT64 = range(-(1 << 63), 1 << 64)


def wire_value(value: Any, depth: int = 0) -> Any:
    """Return the value itself if it can be sent, else what comes nearest to it."""
    if isinstance(value, str):
        return wire_text(value)
    if depth > DEEPEST:
        raise RecursionError(f"it is nested more than {DEEPEST} deep")
    # Before the integers, of which a bool is one: it would be sent as 0 or 1.
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):  # numpy's as well, as in a kernel
        return int(value) if int(value) in _INT64 else str(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, dict):
        return {wire_text(str(key)): wire_value(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [wire_value(item, depth + 1) for item in value]
    return wire_text(str(value))
