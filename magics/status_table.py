"""``%hvd_pool status`` as tables: of ranks and the parameter servers that they use, or of the coordinator's decisions."""

from __future__ import annotations

import html
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hvdlab.collectives.planes.links import planes_text
from hvdlab.collectives.text import visible
from hvdlab.kernel_ext.notebook.output.values import in_output

WIDEST = 300
"""Characters of a cell that are shown."""

COLUMNS = ("rank", "host", "pid", "device", "state", "cell", "memory", "CPU", "plane")
SERVER_COLUMNS = ("server", "host", "pid", "keys", "values", "memory")
STORY_COLUMNS = ("no", "time", "decision", "about", "facts", "cause")
_NUMBERS = {"no", "cause", "rank", "server", "pid", "memory", "CPU", "keys", "values"}


class StatusTable:
    """One row for each rank, and below one for each parameter server; text in a terminal, HTML in a notebook.

    Args:
        rows: What :meth:`Pool.status` returned.
        labels: Id to label of cells.

    Attributes:
        rows: What :meth:`Pool.status` returned.
    """

    def __init__(self, rows: Sequence[Any], labels: Mapping[str, str] | None = None) -> None:
        self.rows = list(rows)
        self._labels = dict(labels or {})

    def cells(self) -> list[tuple[str, ...]]:
        """The ranks' rows."""
        return [_row(row, self._hosts(), self._labels) for row in self.rows]

    def server_cells(self) -> list[tuple[str, ...]]:
        """The servers' rows. The number of keys is the largest that a rank knows: some may not have made the store yet."""
        found: dict[tuple[str, int], list[Any]] = {}
        for row in self.rows:
            for server in row.servers:
                found.setdefault((server.host, server.index), []).append(server)
        hosts = self._hosts()
        return [
            _server_row(hosts, max(seen, key=lambda server: (server.keys, server.pid)), seen)
            for _, seen in sorted(found.items(), key=lambda item: item[0][1])
        ]

    def _hosts(self) -> dict[str, str]:
        """Key of each host to the name that is shown."""
        keys = {str(row.host or "") for row in self.rows}
        names = Counter(key.split("#")[0] for key in keys)
        # What follows the # distinguishes hosts of the same name.
        return {key: key if names[key.split("#")[0]] > 1 else key.split("#")[0] for key in keys}

    def __repr__(self) -> str:
        servers = self.server_cells()
        text = _text(COLUMNS, self.cells())
        return f"{text}\n\n{_text(SERVER_COLUMNS, servers)}" if servers else text

    def _repr_html_(self) -> str:
        servers = self.server_cells()
        return in_output(_html(COLUMNS, self.cells()) + (_html(SERVER_COLUMNS, servers) if servers else ""))


class StoryTable:
    """Table of the coordinator's decisions and the events that led to them; text in a terminal, HTML in a notebook.

    Args:
        entries: Entries of the decision log, oldest first.
    """

    def __init__(self, entries: Sequence[Any]) -> None:
        self.entries = list(entries)

    def cells(self) -> list[tuple[str, ...]]:
        """Return the rows."""
        return [_story_row(entry) for entry in self.entries]

    def __repr__(self) -> str:
        return _text(STORY_COLUMNS, self.cells())

    def _repr_html_(self) -> str:
        return in_output(_html(STORY_COLUMNS, self.cells()))


def _story_row(entry: Any) -> tuple[str, ...]:
    from hvdlab.collectives.coordinator.decision_log import subject_of

    seconds = time.strftime("%H:%M:%S", time.localtime(entry.when))
    row = (
        str(entry.number),
        f"{seconds}.{int(entry.when * 1000) % 1000:03d}",
        entry.kind,
        subject_of(entry),
        ", ".join(f"{key}: {text}" for key, text in entry.facts.items()),
        str(entry.cause or ""),
    )
    return tuple(visible(text, WIDEST) for text in row)


def _text(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    table = [columns, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            _pad(text, width, name) for text, width, name in zip(row, widths, columns, strict=True)
        ).rstrip()
        for row in table
    )


def _html(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th{_align(name)}>{name}</th>" for name in columns)
    body = "".join(
        "<tr>"
        + "".join(f"<td{_align(n)}>{html.escape(t)}</td>" for t, n in zip(row, columns, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _server_row(hosts: Mapping[str, str], server: Any, seen: Sequence[Any]) -> tuple[str, ...]:
    host = str(server.host)
    found = (
        str(server.index),
        hosts.get(host, host.split("#")[0]),
        str(server.pid or ""),
        str(server.keys),
        memory(server.bytes),
        memory(max(one.pss for one in seen)),
    )
    return tuple(visible(text, WIDEST) for text in found)


def _row(status: Any, hosts: Mapping[str, str], labels: Mapping[str, str]) -> tuple[str, ...]:
    found = (
        str(status.rank),
        hosts[str(status.host or "")],
        str(status.pid or ""),
        _device(status),
        str(status.state),
        labels.get(status.cell, str(status.cell or "")),
        memory(status.pss or status.rss),
        f"{status.cpu:.1f} s" if status.cpu is not None else "",
        planes_text((str(status.plane or ""),), getattr(status, "links", {})),
    )
    return tuple(visible(text, WIDEST) for text in found)


def _device(status: Any) -> str:
    """The device, and what the rank holds of the GPUs' memory."""
    held = getattr(status, "device_memory", 0)
    return f"{status.device or ''}, {memory(held)}" if held else str(status.device or "")


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
