"""The header of a batch, for code that passes batches on without reading their records."""

from __future__ import annotations

import struct

HEADER = struct.Struct("<4sHHIIIQQQ")
"""Its fields are described in :mod:`hvdlab.collectives.timeline.records`."""

_COUNT, _LOST = 5, 7


def count_of(batch: bytes) -> int:
    """How many records it has, as its header says; 0 if it has none."""
    return int(HEADER.unpack_from(batch)[_COUNT]) if len(batch) >= HEADER.size else 0


def with_lost(batch: bytes, more: int) -> bytes:
    """The batch of a rank of which ``more`` records did not get this far. One without a header stays as it is."""
    if len(batch) < HEADER.size:
        return batch
    fields = list(HEADER.unpack_from(batch))
    fields[_LOST] += more
    return HEADER.pack(*fields) + batch[HEADER.size :]
