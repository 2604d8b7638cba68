"""The base of all messages between a pool and its ranks, the topics of those that have no struct, and the messages of comms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec


# Without the collector: messages hold no references to themselves, and are made often.
class Payload(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Base of every payload."""


class RankRequest(Payload, frozen=True):
    """Request to a rank, which answers by one :class:`RankReply` with its ticket.

    It may come twice: a pool that may have missed the answer sends it again.
    """

    ticket: int


class RankReply(Payload, frozen=True):
    """Answer of a rank to the request with this ticket."""

    ticket: int


Method = TypeVar("Method", bound=Callable[..., Any])


class HandlerTable:
    """Table of a class's methods that handle messages or events, by the exact class of each. It is filled in the class's body."""

    def __init__(self) -> None:
        self._methods: dict[type[object], Callable[..., Any]] = {}

    @property
    def kinds(self) -> frozenset[type[object]]:
        """Return the classes of messages that have a method."""
        return frozenset(self._methods)

    def handles(self, *kinds: type[object]) -> Callable[[Method], Method]:
        """Return a decorator that enters a method for messages of these classes."""

        def enter(method: Method) -> Method:
            for kind in kinds:
                assert kind not in self._methods, f"two methods handle {kind.__name__}"
                self._methods[kind] = method
            return method

        return enter

    def call(self, owner: object, message: object, *arguments: object) -> Any:
        """Call the method for a message, and return its result.

        Args:
            owner: The object whose method it is.
            message: The message or event.
            arguments: The method gets these after it.

        Raises:
            KeyError: No method handles this class.
        """
        return self._methods[type(message)](owner, message, *arguments)


READY = "hvdlab.pool.ready"
"""Rank to pool, no body: the rank's agent listens, cells may be sent."""

WHO = "hvdlab.pool.who"
"""Pool to rank, no body: say once more that you are ready, if you are; the pool may have missed it."""

JOIN = "hvdlab.pool.join"
"""Pool to rank: a line with the number of this request, then ipyparallel's connection information for engines, as JSON. The
rank registers when it is idle."""

JOINED = "hvdlab.pool.joined"
"""Rank to pool: it has registered, or failed to. The body is a line with the number of the request, then why it failed."""

ENVIRONMENT = "hvdlab.pool.environment"
"""Pool to rank: variables to set, a MessagePack map of strings, because the size of the pool changed."""

COMM = "hvdlab.pool.comm"
"""Both ways: messages between a widget of a rank and its view in the frontend (:mod:`hvdlab.kernel_ext.wire.channel`)."""


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
