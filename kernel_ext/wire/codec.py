"""The messages of the pool's channel in both directions, and their codec.

The structs themselves are in the other modules of this folder, by subject. Each travels under the topic of its direction:
:data:`TO_RANK` from the pool, :data:`TO_POOL` from a rank. The coordinator relays the bytes without decoding them. No pickle is
decoded here: :class:`~hvdlab.kernel_ext.wire.values.Value` carries a pickle that the user asked for by pulling, and only the pool
that started the ranks unpickles it.
"""

from __future__ import annotations

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
