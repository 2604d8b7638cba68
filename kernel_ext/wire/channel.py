"""The base of all messages between a pool and its ranks, and the topics of those that have no struct."""

from __future__ import annotations

import msgspec


class Payload(msgspec.Struct, array_like=True, frozen=True, tag=True, gc=False):
    """Base of every payload."""


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
"""Both ways: messages between a widget of a rank and its view in the frontend (:mod:`hvdlab.kernel_ext.wire.comms`)."""
