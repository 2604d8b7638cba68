"""Rows: one tensor in one collective on one rank, in fixed columns of bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlab.collectives.tracing.record_format import (
    FLAG_FAILED,
    FLAG_NOT_READY,
    FLAG_NOT_STARTED,
    RECORD_BYTES,
    SHIFT_MASK,
)

Rows = NDArray[Any]
"""A structured array of ``ROW``."""

FAILED, NOT_READY, NOT_STARTED = 1, 2, 4

# A span as it travels; see hvdlab.collectives.tracing.record_format.
RECORD = np.dtype(
    [
        ("type", "u1"),
        ("kind", "u1"),
        ("dtype", "u1"),
        ("flags", "u1"),
        ("name", "<u4"),
        ("set", "<u4"),
        ("sequence", "<u4"),
        ("batch", "<u4"),
        ("nbytes", "<u8"),
        ("submitted", "<u8"),
        ("ready", "<u4"),
        ("started", "<u4"),
        ("finished", "<u4"),
        ("pack", "<u4"),
        ("transfer", "<u4"),
        ("wait", "<u4"),
        ("unpack", "<u4"),
    ]
)
assert RECORD.itemsize == RECORD_BYTES

DISTANCES = ("ready", "started", "finished", "pack", "transfer", "wait", "unpack")

ROW = np.dtype(
    [
        ("arrival", "<i8"),  # ns on the common axis
        ("nbytes", "<u8"),
        *((name, "<u4") for name in DISTANCES),  # ns >> shift
        ("name", "<u4"),  # number in Recording.names
        ("op", "<u4"),  # number of the tensor's collective on all ranks; 0 if it never became one
        ("set", "<u4"),
        ("epoch", "<u4"),
        ("sequence", "<u4"),
        ("batch", "<u4"),
        ("rank", "<u2"),
        ("size", "<u2"),  # members of the process set; 0 if not known
        ("kind", "u1"),
        ("dtype", "u1"),
        ("flags", "u1"),
        ("shift", "u1"),
    ]
)


_WHOLE = np.dtype((np.void, ROW.itemsize))


def joined(parts: Sequence[Rows]) -> Rows:
    """A copy of rows one after the other, as opaque bytes: otherwise numpy would handle each column by itself."""
    return np.concatenate([part.view(_WHOLE) for part in parts]).view(ROW) if parts else np.empty(0, ROW)


def rows_of(records: NDArray[Any], rank: int, offset_ns: int) -> Rows:
    """Make rows from records of spans. The caller still has to set the names and the numbers of operations."""
    rows = np.zeros(len(records), ROW)
    for name in ("nbytes", *DISTANCES, "name", "set", "sequence", "batch", "kind", "dtype"):
        rows[name] = records[name]
    rows["arrival"] = records["submitted"].astype(np.int64) + offset_ns
    rows["rank"] = rank
    flags = records["flags"]
    rows["shift"] = flags & SHIFT_MASK
    rows["flags"] = (
        (flags & FLAG_FAILED != 0) * FAILED
        + (flags & FLAG_NOT_READY != 0) * NOT_READY
        + (flags & FLAG_NOT_STARTED != 0) * NOT_STARTED
    )
    return rows


def distance(rows: Rows, name: str) -> NDArray[np.int64]:
    """One of ``DISTANCES`` in ns."""
    shifted: NDArray[np.int64] = rows[name].astype(np.int64) << rows["shift"]
    return shifted


class RowStore:
    """The newest rows, numbered from 0 since the beginning.

    Args:
        limit: How many to keep, give or take a chunk.

    Attributes:
        begin: Number of the oldest row that is kept: how many were dropped.
        end: Number of the next row.
    """

    CHUNK = 16384

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.begin = self.end = 0
        self._chunks: deque[Rows] = deque()
        self._spare: Rows | None = (
            None  # a dropped chunk, used again: memory that is freed and allocated anew gets fragmented
        )
        self._filled = 0

    def __len__(self) -> int:
        return self.end - self.begin

    def append(self, rows: Rows) -> None:
        """Add rows at the end; the oldest make room."""
        taken = 0
        while taken < len(rows):
            if not self._chunks or self._filled == self.CHUNK:
                self._chunks.append(np.empty(self.CHUNK, ROW) if self._spare is None else self._spare)
                self._spare, self._filled = None, 0
            count = min(self.CHUNK - self._filled, len(rows) - taken)
            self._chunks[-1][self._filled : self._filled + count] = rows[taken : taken + count]
            self._filled += count
            taken += count
        self.end += len(rows)
        while len(self) > self.limit and len(self._chunks) > 1:
            self._spare = self._chunks.popleft()
            self.begin += self.CHUNK

    def clear(self) -> int:
        """Drop all rows; the numbers go on. Returns how many there were."""
        count = len(self)
        self._chunks.clear()
        self._filled = 0
        self.begin = self.end
        return count

    def since(self, number: int, most: int | None = None) -> tuple[int, Rows]:
        """Rows from ``number`` on, or from the oldest that is kept: the number of the first one, and a copy."""
        first = min(max(number, self.begin), self.end)
        last = self.end if most is None else min(self.end, first + most)
        parts = []
        at = self.begin
        for chunk in self._chunks:
            lo, hi = max(first - at, 0), min(last - at, self.CHUNK)
            if lo < hi:
                parts.append(chunk[lo:hi])
            at += self.CHUNK
        return first, joined(parts)
