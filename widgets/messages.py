"""Messages to the browser: rows as one buffer of column after column, and the rest as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdlab.collectives.tracing.columns import Rows, distance
from hvdlab.collectives.tracing.recording import Annotation

ROW_BYTES = 46


def pack_rows(rows: Rows, origin_ns: int) -> bytes:
    """The columns that ``readRows`` in ``ui/src/model/store.ts`` takes apart; wide ones first, so that all are aligned.

    Arrivals are ns since the origin, exact for 104 days; the later times are ns since the arrival with 24 bits.
    """
    columns = [
        (rows["arrival"] - origin_ns).astype("<f8"),
        rows["nbytes"].astype("<f8"),
        *(distance(rows, name).astype("<f4") for name in ("ready", "started", "finished", "wait")),
        rows["name"].astype("<u4"),
        rows["op"].astype("<u4"),
        rows["rank"].astype("<u2"),
        rows["size"].astype("<u2"),
        rows["kind"],
        rows["flags"],
    ]
    return b"".join(column.tobytes() for column in columns)


def pack_marks(marks: Sequence[tuple[int, Annotation]], origin_ns: int) -> list[tuple[int, dict[str, Any]]]:
    """Marks with their numbers; times in ns since the origin."""
    return [
        (
            number,
            {
                "kind": mark.kind,
                "rank": mark.rank,
                "begin": mark.begin_ns - origin_ns,
                "end": None if mark.end_ns is None else mark.end_ns - origin_ns,
                "text": mark.text,
                "ok": mark.ok,
            },
        )
        for number, mark in marks
    ]
