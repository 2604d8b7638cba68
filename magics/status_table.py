"""``%hvd_pool status`` as a table."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hvdlab.collectives.visible import visible

WIDEST = 300
"""Characters of a cell that are shown."""

COLUMNS = ("rank", "host", "pid", "device", "state", "cell", "memory", "CPU", "plane")
_NUMBERS = {"rank", "pid", "memory", "CPU"}


class StatusTable:
    """One row for each rank; text in a terminal, HTML in a notebook.

    Args:
        rows: What :meth:`Pool.status` returned.
        labels: What users call cells, by their ids.

    Attributes:
        rows: What :meth:`Pool.status` returned.
    """

    def __init__(self, rows: Sequence[Any], labels: Mapping[str, str] | None = None) -> None:
        self.rows = list(rows)
        self._labels = dict(labels or {})

    def cells(self) -> list[tuple[str, ...]]:
        keys = {str(row.host or "") for row in self.rows}
        names = Counter(key.split("#")[0] for key in keys)
        # What follows the # tells apart hosts of the same name.
        hosts = {key: key if names[key.split("#")[0]] > 1 else key.split("#")[0] for key in keys}
        return [_row(row, hosts, self._labels) for row in self.rows]

    def __repr__(self) -> str:
        table = [COLUMNS, *self.cells()]
        widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
        return "\n".join(
            "  ".join(
                _pad(text, width, name) for text, width, name in zip(row, widths, COLUMNS, strict=True)
            ).rstrip()
            for row in table
        )

    def _repr_html_(self) -> str:
        head = "".join(f"<th{_align(name)}>{name}</th>" for name in COLUMNS)
        body = "".join(
            "<tr>"
            + "".join(f"<td{_align(n)}>{html.escape(t)}</td>" for t, n in zip(row, COLUMNS, strict=True))
            + "</tr>"
            for row in self.cells()
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _row(status: Any, hosts: Mapping[str, str], labels: Mapping[str, str]) -> tuple[str, ...]:
    found = (
        str(status.rank),
        hosts[str(status.host or "")],
        str(status.pid or ""),
        str(status.device or ""),
        str(status.state),
        labels.get(status.cell, str(status.cell or "")),
        memory(status.pss or status.rss),
        f"{status.cpu:.1f} s" if status.cpu is not None else "",
        str(status.plane or ""),
    )
    return tuple(visible(text, WIDEST) for text in found)


def memory(size: int | None) -> str:
    """Bytes in the largest fitting unit."""
    if not size:
        return ""
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _pad(text: str, width: int, name: str) -> str:
    return text.rjust(width) if name in _NUMBERS else text.ljust(width)


def _align(name: str) -> str:
    return ' style="text-align: right"' if name in _NUMBERS else ' style="text-align: left"'
