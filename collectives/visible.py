"""Text from elsewhere, as it may be written to a terminal or a log.

Names of tensors, hosts and cells, and what peers and files say, can hold escape sequences that a terminal obeys: they change its
title, clear it, or hide what was written. Line ends forge lines of a log, and controls of the direction of writing show something
else than there is. What a user's own cell prints is not touched.
"""

from __future__ import annotations

import re

_CONTROLS = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # C0, DEL, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of writing
    "\u2028\u2029"  # line ends that not all know
    "\ud800-\udfff"  # halves of a character, which can't be written
    "]"
)
_HARMLESS = re.compile("(\x1b\\[[0-9;]*m|\t)")


def visible(text: str, most: int | None = None) -> str:
    """One line in which each control character stands as its escape, such as ``\\x1b``.

    Args:
        text: From elsewhere.
        most: Characters that are left of a longer line, the last of them ``…``; ``None`` cuts nothing.
    """
    if most is not None:
        text = text[: most + 1]  # before it grows
    if not text.isascii() or not text.isprintable():
        text = _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
    return text if most is None or len(text) <= most else f"{text[: most - 1]}…"


def visible_lines(text: str) -> str:
    """The same for a text of several lines, which stay lines."""
    return "\n".join(visible(line) for line in text.split("\n"))


def visible_coloured(text: str) -> str:
    """The same for lines that a program has coloured or indented by tabs, such as a traceback: colours and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        part if number % 2 else visible_lines(part) for number, part in enumerate(_HARMLESS.split(text))
    )
