"""The last expression's values of all ranks, as one mime bundle."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdlab.collectives.errors import compact_ranks, format_ranks

Groups = Sequence[tuple[tuple[int, ...], Mapping[str, Any]]]

_RICH = ("text/html", "image/svg+xml", "image/png", "image/jpeg", "text/markdown", "text/latex")
_LABEL = '<div class="hvd-output" style="opacity: 0.65; font-size: 0.85em; margin: 0.3em 0 0.1em">{}</div>'


MOST_LINES = 12
"""Lines that are shown of one value."""

MOST_LINES_IN_ALL = 120
"""Lines that are shown of all values together, if that leaves each at least :data:`FEWEST_LINES`."""

FEWEST_LINES = 3
LONGEST_LINE = 1000


@dataclass(frozen=True, slots=True)
class ValueNotSent:
    """A value that stayed on its rank.

    Attributes:
        why: The reason, with the remedy.
        large: Whether the value is too large, so that its text is mostly an abridged one.
    """

    why: str
    large: bool = False


def text_of(
    groups: Groups, width: int = 0, *, name: str = "_", unsent: Mapping[int, ValueNotSent] | None = None
) -> str:
    """Return one block for each group of equal values, labelled by rank; long ones are cut.

    Args:
        groups: The values, as mime bundles.
        width: Characters of the labels, at least.
        name: The variable that has the values whole.
        unsent: Rank to its value, for values that ``name`` lacks.
    """
    most = max(FEWEST_LINES, min(MOST_LINES, MOST_LINES_IN_ALL // max(1, len(groups))))
    rows = []
    for ranks, data in groups:
        hint, missing = _whereabouts(ranks, name, unsent or {})
        text = shortened(str(data.get("text/plain", "")), most, hint)
        if missing is not None and missing.large and not text.endswith(hint):
            text += f"\n({hint})"
        rows.append((f"[{compact_ranks(ranks)}]", text))
    width = max([width, *(len(label) + 1 for label, _ in rows)])
    return "\n".join(label.ljust(width) + text.replace("\n", "\n" + " " * width) for label, text in rows)


def _whereabouts(
    ranks: Sequence[int], name: str, unsent: Mapping[int, ValueNotSent]
) -> tuple[str, ValueNotSent | None]:
    """Return the words that say where a value of these ranks is whole, and why it is not in ``name`` if it is not."""
    sent = next((rank for rank in ranks if rank not in unsent), None)
    if sent is not None:
        return f"`{name}[{sent}]` has all", None
    missing = unsent[ranks[0]]
    return f"the value was not sent: {missing.why}", missing


def shortened(text: str, most: int, hint: str) -> str:
    """Return ``text`` with at most ``most`` lines, the last of which says how much is missing and ends in ``hint``."""
    lines = text.split("\n")
    cut = any(len(line) > LONGEST_LINE for line in lines[:most])
    if len(lines) <= most and not cut:
        return text
    kept = lines if len(lines) <= most else lines[: most - 1]
    shown = [line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]}…" for line in kept]
    left = len(lines) - len(kept)
    if left:
        shown.append(f"… {left} more lines; {hint}")
    else:
        shown.append(f"… cut; {hint}")
    return "\n".join(shown)


def html_of(groups: Groups, *, unsent: Mapping[int, ValueNotSent] | None = None) -> str | None:
    """Return the groups as HTML, with tables and pictures; None if no value has any.

    Args:
        groups: The values, as mime bundles.
        unsent: Rank to its value, for values that stayed on their ranks.
    """
    if not any(kind in data for _, data in groups for kind in _RICH):
        return None
    blocks = []
    for ranks, data in groups:
        hint, missing = _whereabouts(ranks, "_", unsent or {})
        below = _LABEL.format(html.escape(hint)) if missing is not None and missing.large else ""
        blocks.append(_LABEL.format(format_ranks(ranks)) + _block(data) + below)
    return in_output("\n".join(blocks))


def in_output(content: str) -> str:
    """Return HTML that JupyterLab aligns with the text output of cells: labextension/style/base.css knows the class."""
    return f'<div class="hvd-output">{content}</div>'


def label_html(ranks: Sequence[int]) -> str:
    """Return the small dim line above a rank's display."""
    return _LABEL.format(format_ranks(ranks))


def _block(data: Mapping[str, Any]) -> str:
    if "text/html" in data:
        return str(data["text/html"])
    if "image/svg+xml" in data:
        # As a picture, whose scripts no browser runs; it would run those of an element within the page.
        svg = data["image/svg+xml"]
        return _picture("image/svg+xml", svg if isinstance(svg, bytes) else str(svg).encode())
    for kind in ("image/png", "image/jpeg"):
        if kind in data:
            return _picture(kind, data[kind])
    return f"<pre>{html.escape(str(data.get('text/plain', '')))}</pre>"


def _picture(kind: str, content: str | bytes) -> str:
    """Return an element for bytes, or for a text in base64."""
    encoded = base64.b64encode(content).decode() if isinstance(content, bytes) else content.replace("\n", "")
    return f'<img src="data:{kind};base64,{html.escape(encoded)}">'
