"""Writing of the pages about Horovod's names and attributes, and the check that they are not stale."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


class Stale(Exception):
    """Rows without the verdict or the reason that they need, or with one that is not true."""


def write_or_check(path: Path, make: Callable[[], str], description: str | None) -> int:
    """Write a page, or with ``--check`` on the command line compare it with what would be written; returns the exit status.

    Args:
        path: The page.
        make: Makes its text. Raises :class:`Stale`.
        description: Text of ``--help``.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    chosen = parser.parse_args()
    try:
        text = make()
    except Stale as problems:
        print(problems, file=sys.stderr)
        return 1
    if not chosen.check:
        path.write_text(text)
    elif not path.is_file() or path.read_text() != text:
        print(f"{path.name} is stale; run `make tables`", file=sys.stderr)
        return 1
    return 0
