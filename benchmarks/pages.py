"""Tables of measurements in the documentation: written between two marks, so that nobody copies figures by hand."""

from __future__ import annotations

from pathlib import Path


def marks(name: str) -> tuple[str, str]:
    """The lines around a table."""
    return f"<!-- figures: {name} -->", f"<!-- end of {name} -->"


def between(text: str, name: str) -> str:
    """What a page has in this place. Raises ``ValueError`` if it has no such place."""
    first, last = marks(name)
    return text[text.index(first) + len(first) : text.index(last)].strip()


def write(page: Path, name: str, table: str) -> None:
    """Put a table into its place."""
    first, last = marks(name)
    text = page.read_text()
    head, tail = text[: text.index(first)], text[text.index(last) :]
    page.write_text(f"{head}{first}\n\n{table}\n\n{tail}")
