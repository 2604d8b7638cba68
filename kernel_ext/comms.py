"""Comms of ranks (widgets are made of them): what both sides send through the pool, and the pool's side.

For each comm that a rank opens there is one of the same id in the notebook's kernel, so that the frontend takes it for
one of the kernel's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hvdlab.collectives.client import Client
from hvdlab.kernel_ext.output.pieces import label
from hvdlab.kernel_ext.widgetstates import WidgetStates
from hvdlab.kernel_ext.wire.channel import COMM
from hvdlab.kernel_ext.wire.comms import CommMessage, as_bytes, decode, encode

Write = Callable[[str, str], None]


class CommRelay:
    """Opens comms for those of a pool's ranks. Lives as long as the pool's connection.

    Args:
        client: That connection.
        here: Called when a rank opens a comm; returns ``write(stream, text)``, which later shows what the comm's callbacks
            print.
        states: Gets all messages that pass.
    """

    def __init__(self, client: Client, here: Callable[[], Write], states: WidgetStates) -> None:
        self._client, self._here, self._states = client, here, states
        self._lock = threading.Lock()
        self._comms: dict[str, tuple[Any, Write]] = {}
        client.on_mail(COMM, self._from_rank)

    def _from_rank(self, rank: int, body: bytes) -> None:
        """Pass on a message of a rank. The client's thread."""
        message = decode(body)
        if message.kind == "comm_open":
            self._open(rank, message)
            return
        with self._lock:
            comm, write = self._comms.get(message.comm, (None, None))
        if comm is None or write is None:
            return
        if message.kind == "output":
            for name, text in message.data.items():
                write(name, "".join(label((rank,)) + line for line in str(text).splitlines(keepends=True)))
        elif message.kind == "comm_close":
            self._forget(message.comm)
            comm.close(message.data, message.metadata, list(message.buffers))
        else:
            self._states.message_passed(message.comm, message.data, message.buffers)
            comm.send(message.data, message.metadata, list(message.buffers))

    def _open(self, rank: int, message: CommMessage) -> None:
        from comm import create_comm

        comm = create_comm(
            target_name=message.target,
            target_module=message.module,
            data=message.data,
            metadata=message.metadata,
            buffers=list(message.buffers),
            comm_id=message.comm,
        )
        comm.on_msg(lambda content: self._to_rank(rank, "comm_msg", message.comm, content))
        comm.on_close(lambda content: self._to_rank(rank, "comm_close", message.comm, content))
        with self._lock:
            self._comms[message.comm] = comm, self._here()
        self._states.opened(message.comm, message.target, message.data, message.buffers)

    def _to_rank(self, rank: int, kind: str, comm: str, content: dict[str, Any]) -> None:
        """Pass on a message of the frontend. The thread that takes the kernel's comm messages."""
        if kind == "comm_close":
            self._forget(comm)
        data = content["content"].get("data", {})
        message = CommMessage(kind, comm, data, content.get("metadata", {}), as_bytes(content.get("buffers")))
        self._states.message_passed(comm, data, message.buffers)
        self._client.post(COMM, encode(message), (rank,))

    def _forget(self, comm: str) -> None:
        with self._lock:
            self._comms.pop(comm, None)
        self._states.closed(comm)
