"""Results of measurements: their files, and their tables in the documentation, which are written between two marks so
that figures are not copied by hand."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any


def marks(name: str) -> tuple[str, str]:
    """Return the lines around a table."""
    return f"<!-- figures: {name} -->", f"<!-- end of {name} -->"


def between(text: str, name: str) -> str:
    """Return a page's text in this place. Raises ``ValueError`` if it has no such place."""
    first, last = marks(name)
    return text[text.index(first) + len(first) : text.index(last)].strip()


def write(page: Path, name: str, table: str) -> None:
    """Put a table into its place."""
    first, last = marks(name)
    text = page.read_text()
    head, tail = text[: text.index(first)], text[text.index(last) :]
    page.write_text(f"{head}{first}\n\n{table}\n\n{tail}")


def conditions(benchmark: str, rounds: int) -> dict[str, Any]:
    """Return a result's conditions of a measurement that has just been made, beside its figures."""
    return {
        "benchmark": benchmark,
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[1], 1),
        "python": platform.python_version(),
        "rounds": rounds,
    }


def publish(
    result: dict[str, Any],
    table: Callable[[dict[str, Any]], str],
    *,
    json_file: Path | None,
    page: Path | None,
) -> None:
    """Print a result; write it into its file, and its table into the place on a page that has the benchmark's name, where they are given."""
    text = json.dumps(result, indent=1)
    print(text)
    if json_file:
        json_file.write_text(text + "\n")
    if page:
        write(page, result["benchmark"], table(result))
