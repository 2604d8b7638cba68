"""The table as the documentation shows it: ``python -m hvdlab.collectives.knobs.markdown docs/reference/settings.md``."""

from __future__ import annotations

import sys
from pathlib import Path

from hvdlab.collectives.knobs.table import KNOBS, Reader

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
    """The variables that do something."""
    rows = ["| variable | unit | default | read by | meaning |", "|---|---|---|---|---|"]
    for knob in KNOBS:
        if knob.reader is not Reader.NOBODY:
            rows.append(
                f"| `{knob.variable}` | {knob.kind.unit} | {knob.default} | {_READERS[knob.reader]} | {knob.meaning} |"
            )
    return "\n".join(rows)


def ineffective() -> str:
    """The variables that are accepted and change nothing."""
    rows = ["| variable | why it changes nothing |", "|---|---|"]
    rows += [f"| `{knob.variable}` | {knob.meaning} |" for knob in KNOBS if knob.reader is Reader.NOBODY]
    return "\n".join(rows)


def filled(page: str) -> str:
    """The page with its tables as they ought to be. Raises ``ValueError`` if it has no place for one."""
    for name, table in ((EFFECTIVE, effective()), (INEFFECTIVE, ineffective())):
        begin, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"the page has no place for the table {name}")
        page = before + begin + "\n" + table + "\n\n" + end + after
    return page


def main(path: str) -> None:
    """Write the tables into a page."""
    page = Path(path)
    page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main(sys.argv[1])
