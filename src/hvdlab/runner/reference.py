"""Writes the table of flags into a page: ``python -m hvdlab.runner.reference docs/reference/command-line.md``."""

from __future__ import annotations

import sys
from pathlib import Path

from hvdlab.runner.flags import FLAGS, Flag, Kind

BEGIN, END = "<!-- flags -->\n", "<!-- end -->"
_TAKES = {
    Kind.TEXT: " TEXT",
    Kind.TEXTS: " TEXT",
    Kind.NUMBER: " N",
    Kind.REAL: " X",
    Kind.SWITCH: "",
    Kind.LEVEL: " LEVEL",
    Kind.TWO: " N N",
}


def tables() -> str:
    """A table for each group of flags."""
    parts = []
    for group in dict.fromkeys(flag.group for flag in FLAGS):
        rows = [_row(flag) for flag in FLAGS if flag.group == group]
        head = f"## {group}\n\n| flag | variable | in the file | meaning |\n|---|---|---|---|\n"
        parts.append(head + "\n".join(rows))
    return "\n\n".join(parts)


def _row(flag: Flag) -> str:
    names = ", ".join(f"`{name}{_TAKES[flag.kind]}`" for name in flag.names)
    if flag.off:
        names += "; " + ", ".join(f"`{name}`" for name in flag.off)
    meaning = f"**no effect here**: {flag.ineffective}" if flag.ineffective else flag.meaning
    variable = f"`{flag.variable}`" if flag.variable else ""
    place = f"`{flag.config}`" if flag.config else ""
    return f"| {names} | {variable} | {place} | {meaning} |"


def filled(page: str) -> str:
    """The page with its tables as they ought to be. Raises ``ValueError`` if it has no place for them."""
    before, found, rest = page.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not (found and closed):
        raise ValueError("the page has no place for the flags")
    return f"{before}{BEGIN}\n{tables()}\n\n{END}{after}"


def main(path: str) -> None:
    """Write the tables into a page."""
    page = Path(path)
    page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main(sys.argv[1])
