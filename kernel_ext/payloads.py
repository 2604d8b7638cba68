"""What the pool and its ranks say to each other, as msgspec structs in the body of mail: all of it, and its codec.

The structs themselves are in ``messages``, ``inspect.messages`` and ``prompts.messages``, by what they are about.

Every struct travels under the topic of its direction: :data:`TO_RANK` from the pool, :data:`TO_POOL` from a rank.
The coordinator relays the bytes without looking at them. No pickle here: :class:`Value` carries a pickle that the
user asked for by pulling, and only the pool that started the ranks unpickles it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hvdlab.collectives.errors import ProtocolError
from hvdlab.collectives.protocol.codec import MALFORMED
from hvdlab.kernel_ext.inspect.messages import (
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
    Shared,
    Tensors,
    Variables,
    View,
)
from hvdlab.kernel_ext.messages.cells import (
    AskCells,
    CellDone,
    CellError,
    Cells,
    Chunk,
    Clear,
    Credit,
    Display,
    Entered,
    HeldCell,
    Late,
    LateCredit,
    Left,
    Output,
    Owner,
    Resync,
    RunCell,
    Settled,
    Stream,
)
from hvdlab.kernel_ext.messages.state import (
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
    PendingNow,
    ServerNow,
    Stack,
    StackFrame,
    Status,
)
from hvdlab.kernel_ext.messages.values import (
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
from hvdlab.kernel_ext.payload import Payload
from hvdlab.kernel_ext.prompts.messages import PromptRequest, PromptWithdrawn, Reply

__all__ = [
    "TO_POOL",
    "TO_RANK",
    "AskBlocks",
    "AskCells",
    "AskKnown",
    "AskLeaves",
    "AskNames",
    "AskStack",
    "AskStatus",
    "AskTensors",
    "AskVariables",
    "AskView",
    "Blocks",
    "CellDone",
    "CellError",
    "Cells",
    "Chunk",
    "Clear",
    "Compare",
    "Compared",
    "Complete",
    "Completions",
    "Credit",
    "Display",
    "Done",
    "Entered",
    "Examine",
    "Examined",
    "Express",
    "Expressed",
    "Fetch",
    "Gather",
    "HeldCell",
    "Inspect",
    "Inspection",
    "Known",
    "Late",
    "LateCredit",
    "Learn",
    "Learnt",
    "Leaves",
    "Left",
    "Names",
    "Output",
    "Owner",
    "Payload",
    "PendingNow",
    "Piece",
    "PromptRequest",
    "PromptWithdrawn",
    "PullValue",
    "PushPart",
    "PushValue",
    "Release",
    "Reply",
    "Resync",
    "RunCell",
    "ServerNow",
    "Settled",
    "Shared",
    "Stack",
    "StackFrame",
    "Status",
    "Stream",
    "Tensors",
    "ToPool",
    "ToRank",
    "Value",
    "Variables",
    "View",
    "decode_to_pool",
    "decode_to_rank",
    "encode",
]

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
    | View
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
