"""The last expression's values of all ranks, as one mime bundle."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from typing import Any

from hvdlab.collectives.errors import compact_ranks, format_ranks

Groups = Sequence[tuple[tuple[int, ...], Mapping[str, Any]]]

_RICH = ("text/html", "image/svg+xml", "image/png", "image/jpeg", "text/markdown", "text/latex")
_LABEL = '<div style="opacity: 0.65; font-size: 0.85em; margin: 0.3em 0 0.1em">{}</div>'


def text_of(groups: Groups, width: int = 0) -> str:
    """One block for each group of equal values, labelled by rank."""
    rows = [(f"[{compact_ranks(ranks)}]", str(data.get("text/plain", ""))) for ranks, data in groups]
    width = max([width, *(len(label) + 1 for label, _ in rows)])
    return "\n".join(label.ljust(width) + text.replace("\n", "\n" + " " * width) for label, text in rows)


def html_of(groups: Groups) -> str | None:
    """The same with tables and pictures, or None if no value has any."""
    if not any(kind in data for _, data in groups for kind in _RICH):
        return None
    return "\n".join(_LABEL.format(format_ranks(ranks)) + _block(data) for ranks, data in groups)


def label_html(ranks: Sequence[int]) -> str:
    """The small dim line above what a rank shows."""
    return _LABEL.format(format_ranks(ranks))


def _block(data: Mapping[str, Any]) -> str:
    if "text/html" in data:
        return str(data["text/html"])
    if "image/svg+xml" in data:
        return str(data["image/svg+xml"])
    for kind in ("image/png", "image/jpeg"):
        if kind in data:
            return f'<img src="data:{kind};base64,{_base64(data[kind])}">'
    return f"<pre>{html.escape(str(data.get('text/plain', '')))}</pre>"


def _base64(picture: str | bytes) -> str:
    return base64.b64encode(picture).decode() if isinstance(picture, bytes) else picture.replace("\n", "")
