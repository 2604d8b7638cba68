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
    AskCells,
    CellDone,
    Cells,
    Credit,
    Entered,
    Late,
    LateCredit,
    Output,
    Owner,
    PromptRequest,
    PromptWithdrawn,
    Reply,
    Resync,
    RunCell,
    Settled,
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
    Examine,
    Examined,
    Gather,
    Leaves,
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
    Express,
    Expressed,
    Inspect,
    Inspection,
    Names,
    Stack,
    Status,
)
from hvdlab.kernel_ext.wire.values import (
    AskKnown,
    Done,
    Fetch,
    Known,
    Learn,
    Learnt,
    Piece,
    PullValue,
    PushPart,
    PushValue,
    Release,
    Value,
)

TO_RANK = "hvdlab.pool.to_rank"
TO_POOL = "hvdlab.pool.to_pool"


ToRank = (
    RunCell
    | Owner
    | AskCells
    | Credit
    | LateCredit
    | Resync
    | Settled
    | PushValue
    | PushPart
    | PullValue
    | AskKnown
    | Learn
    | Fetch
    | Release
    | AskStatus
    | Complete
    | Inspect
    | Express
    | AskStack
    | AskNames
    | Reply
    | Examine
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
    | Entered
    | Cells
    | CellDone
    | Done
    | Known
    | Learnt
    | Value
    | Piece
    | Status
    | Completions
    | Inspection
    | Expressed
    | Stack
    | Names
    | PromptRequest
    | PromptWithdrawn
    | Examined
    | Leaves
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
    """What the pool says to a rank, one of ``ToRank``. Raises ``ProtocolError`` if it is malformed."""
    try:
        return _to_rank.decode(body)
    except MALFORMED as error:
        raise ProtocolError(f"no message of a pool: {error}") from error


def decode_to_pool(body: bytes) -> Any:
    """What a rank says to the pool, one of ``ToPool``. Raises ``ProtocolError`` if it is malformed."""
    try:
        return _to_pool.decode(body)
    except MALFORMED as error:
        raise ProtocolError(f"no message of a rank: {error}") from error
