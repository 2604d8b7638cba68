"""Writes the tables of ``docs/reference/settings.md`` from the variables that the code declares.

::

    python docs/reference/settings_table.py
"""

from __future__ import annotations

from pathlib import Path

from hvdlab.collectives.settings import VARIABLES, Reader

PAGE = Path(__file__).with_name("settings.md")
EFFECTIVE = "variables"
INEFFECTIVE = "accepted"
_READERS = {
    Reader.COORDINATOR: "coordinator",
    Reader.RANK: "ranks",
    Reader.BOTH: "both",
    Reader.POOL: "pool",
    Reader.KERNEL: "kernel",
}


def effective() -> str:
    """Return the table of the variables that do something."""
    rows = ["| variable | unit | default | read by | meaning |", "|---|---|---|---|---|"]
    for variable in VARIABLES:
        if variable.reader is not Reader.NONE:
            rows.append(
                f"| `{variable.name}` | {variable.kind.unit} | {variable.default} | {_READERS[variable.reader]} | {variable.meaning} |"
            )
    return "\n".join(rows)


def ineffective() -> str:
    """Return the table of the variables that are accepted and change nothing."""
    rows = ["| variable | why it changes nothing |", "|---|---|"]
    rows += [
        f"| `{variable.name}` | {variable.meaning} |"
        for variable in VARIABLES
        if variable.reader is Reader.NONE
    ]
    return "\n".join(rows)


def filled(page: str) -> str:
    """Return the page with the present tables. Raises ``ValueError`` if it has no place for one."""
    for name, table in ((EFFECTIVE, effective()), (INEFFECTIVE, ineffective())):
        begin, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"the page has no place for the table {name}")
        page = before + begin + "\n" + table + "\n\n" + end + after
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
