"""Two checkouts of hvdlab beside each other: the same programs of ``benchmarks/`` in turn, and the change of their
figures.

    python benchmarks/versions.py --before ../old --after . --json benchmarks/results/versions.json

Each checkout needs its own ``.venv``, made by ``make install`` there. Every program runs as often in each, alternating, and writes
its medians; printed are the medians of these over all turns, and the ratio of after to before (below 1: less time, memory or load).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAMS: dict[str, tuple[str, ...]] = {
    "allreduce": ("allreduce.py", "--ranks", "2", "--ranks", "4", "--no-mpi", "--rounds", "{rounds}", "--out", "{file}"),
    "cells": ("cells.py", "--rounds", "{rounds}", "--json", "{file}"),
    "pool": ("pool.py", "--ranks", "4", "--rounds", "1", "--idle", "15", "--json", "{file}"),
}  # fmt: skip


def leaves(found: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers in a result, each with the path to it."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield from leaves(value, f"{name} {key}".strip())
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield name, float(found)


def run(checkout: Path, program: tuple[str, ...], rounds: int) -> dict[str, float]:
    """Return the figures of one run of a program in a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        words = [word.format(rounds=rounds, file=file) for word in program[1:]]
        command = [checkout / ".venv/bin/python", checkout / "benchmarks" / program[0], *words]
        subprocess.run(command, cwd=checkout, check=True, stdout=subprocess.DEVNULL)
        return dict(leaves(json.loads(file.read_text())))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="checkout of the older version")
    parser.add_argument("--after", type=Path, required=True, help="checkout of the newer one")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20, help="of each program")
    parser.add_argument("--only", choices=PROGRAMS, action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    checkouts = {"before": options.before.resolve(), "after": options.after.resolve()}
    result: dict[str, dict[str, dict[str, float]]] = {}
    for name in options.only or PROGRAMS:
        seen: dict[str, dict[str, list[float]]] = {which: defaultdict(list) for which in checkouts}
        for _ in range(options.turns):
            for which, checkout in checkouts.items():
                for figure, value in run(checkout, PROGRAMS[name], options.rounds).items():
                    seen[which][figure].append(value)
        result[name] = {}
        for figure in [one for one in seen["after"] if one in seen["before"]]:
            before, after = (statistics.median(seen[which][figure]) for which in checkouts)
            ratio = after / before if before else float("nan")
            result[name][figure] = {"before": before, "after": after, "ratio": round(ratio, 3)}
            print(f"{name:10} {figure:44} {before:12.3f} {after:12.3f} {ratio:7.2f}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
