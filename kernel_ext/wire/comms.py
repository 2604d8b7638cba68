"""Messages of comms, of which widgets are made, between a rank and the notebook."""

from __future__ import annotations

from typing import Any

import msgspec

from hvdlab.kernel_ext.wire.channel import Payload


class CommMessage(Payload, frozen=True):
    """A message of a comm.

    Attributes:
        kind: ``comm_open``, ``comm_msg`` or ``comm_close``; ``output`` for what a callback has printed (``data``: text by
            stream).
        comm: The comm's id.
        data, metadata, buffers: As in Jupyter's protocol.
        target, module: The frontend's side, of ``comm_open``.
    """

    kind: str
    comm: str
    data: dict[str, Any]
    metadata: dict[str, Any]
    buffers: tuple[bytes, ...]
    target: str = ""
    module: str | None = None


encode_comm = msgspec.msgpack.Encoder().encode


decode_comm = msgspec.msgpack.Decoder(CommMessage).decode


def as_bytes(buffers: Any) -> tuple[bytes, ...]:
    """Buffers as they are sent."""
    return tuple(bytes(buffer) for buffer in buffers or ())
