"""Output kept apart by rank, in the notebook format's terms."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from typing import Any

from hvdlab.kernel_ext.output.lines import shown_lines
from hvdlab.kernel_ext.output.values import html_of
from hvdlab.kernel_ext.payloads import Chunk, Clear, Display, Stream

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Page:
    """What one rank wrote."""

    def __init__(self) -> None:
        self._entries: list[dict[str, Any]] = []
        self._text: list[str] = []  # of the last entry, if that is a stream
        self._clear_next = False

    def add(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            if isinstance(chunk, Clear):
                self._clear_next = True
                if not chunk.wait:
                    self._clear()
                continue
            if self._clear_next:
                self._clear()
            if isinstance(chunk, Stream):
                self._stream(chunk)
            else:
                self._display(chunk)

    def outputs(self) -> tuple[dict[str, Any], ...]:
        """The outputs, as a notebook file has them."""
        self._close_text()
        return tuple({k: v for k, v in entry.items() if k != "id"} for entry in self._entries)

    def _clear(self) -> None:
        self._entries, self._text, self._clear_next = [], [], False

    def _stream(self, chunk: Stream) -> None:
        last = self._entries[-1] if self._entries else None
        if last is None or last.get("name") != chunk.name:
            self._close_text()
            self._entries.append({"output_type": "stream", "name": chunk.name, "text": ""})
        self._text.append(chunk.text)

    def _close_text(self) -> None:
        if self._text:
            self._entries[-1]["text"] += "".join(self._text)
            self._text = []

    def _display(self, chunk: Display) -> None:
        self._close_text()
        entry = {
            "output_type": "display_data",
            "data": chunk.data,
            "metadata": chunk.metadata,
            "id": chunk.display_id,
        }
        if chunk.update:
            for old in self._entries:
                if chunk.display_id and old.get("id") == chunk.display_id:
                    old.update(entry)
        else:
            self._entries.append(entry)


def page_text(outputs: Iterable[Mapping[str, Any]]) -> str:
    """A page as text for a terminal, with the last state of each progress bar."""
    parts = []
    for entry in outputs:
        if "text" not in entry:
            parts.append(str(entry["data"].get("text/plain", "")) + "\n")
        elif lines := shown_lines(entry["text"]):
            parts.append("\n".join(lines) + ("\n" if entry["text"].endswith("\n") else ""))
    return "".join(parts)


def page_html(rank: int, outputs: Iterable[Mapping[str, Any]], *, opened: bool) -> str:
    """A page as HTML that can be folded, for notebooks without ipywidgets."""
    body = []
    for entry in outputs:
        if "text" in entry:
            body.append(f"<pre>{html.escape(_ANSI.sub('', page_text([entry])))}</pre>")
        else:
            rich = html_of([((rank,), entry["data"])])
            body.append(rich or f"<pre>{html.escape(str(entry['data'].get('text/plain', '')))}</pre>")
    state = " open" if opened else ""
    return f"<details{state}><summary>rank {rank}</summary>{''.join(body)}</details>"
