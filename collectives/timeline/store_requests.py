"""How a span describes a request to a parameter server: by its kind, and by numbers that mean something else in collectives.

=============== ==================================================================================================
process set     which store, which of its servers, and whether it is a pull; beyond all numbers of process sets
sequence        version of the value that a push made, or that a pull read: the low 32 bits
batch           of a push its staleness; of a pull a number that no other rank's pull has
=============== ==================================================================================================

A span's ``ready`` and ``started`` are when the server began to carry out the request, ``finished`` when the server had applied a push, or
when the worker had what it pulled; ``transfer`` is how long the server worked on the request.
"""

from __future__ import annotations

from typing import NamedTuple

from hvdlab.collectives.dtypes import OpKind
from hvdlab.collectives.timeline.events import Span

FIRST_GROUP = 1 << 31
_SERVER_BITS = 10
_MOST_STALE = 0xFFFF


class StoreRequest(NamedTuple):
    """What the numbers of a span mean.

    Attributes:
        store: Number of the store, equal on all workers.
        server: Number of the server.
        version: Version of the value that a push made or a pull read; the low 32 bits.
        staleness: Pushes of other workers that were applied after the value from which this push was computed; at most 65535.
    """

    store: int
    server: int
    version: int
    staleness: int


def group_of(store: int, server: int, kind: OpKind) -> int:
    """The number that stands in place of a process set's."""
    number = (store << _SERVER_BITS | server) << 1 | (kind is OpKind.PULL)
    return FIRST_GROUP | number & (FIRST_GROUP - 1)


def push_batch(staleness: int) -> int:
    """Return the number that stands in place of a batch's, for a push."""
    return min(staleness, _MOST_STALE)


def request_of(span: Span) -> StoreRequest:
    """What the numbers of a push's or pull's span mean."""
    number = span.process_set & (FIRST_GROUP - 1)
    server = number >> 1 & (1 << _SERVER_BITS) - 1
    staleness = span.batch & _MOST_STALE if span.kind is OpKind.PUSH else 0
    return StoreRequest(number >> _SERVER_BITS + 1, server, span.sequence, staleness)
