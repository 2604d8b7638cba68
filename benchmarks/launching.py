"""Costs of starting ranks: a function and a script by hvdlab, torchrun and multiprocessing, taking turns.

Run it as ``python benchmarks/launching.py``; it prints one JSON object with the median seconds of each.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import hvdlab

LINES = 20_000


def function(number: int) -> int:
    """Run as the ranks' function."""
    return number + int(os.environ.get("HVDLAB_RANK", "0"))


def by_hvdlab(np: int) -> None:
    hvdlab.run(function, (1,), np=np)


def by_multiprocessing(np: int) -> None:
    """A pool of new interpreters, the nearest thing in the standard library."""
    with multiprocessing.get_context("spawn").Pool(np) as pool:
        pool.map(function, range(np))


def by_command(*command: str) -> Callable[[int], None]:
    """Return a launcher that runs an empty script."""

    def launch(np: int) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
            filled = [word.format(np=np, script=script.name) for word in command]
            subprocess.run(filled, check=True, capture_output=True)

    return launch


def flood() -> float:
    """Return seconds that 80,000 lines of 4 ranks take, start and end included."""

    def speak() -> None:
        for number in range(LINES):
            print("line", number)

    out = io.StringIO()
    begin = time.perf_counter()
    hvdlab.run(speak, np=4, stdout=out)
    seconds = time.perf_counter() - begin
    assert out.getvalue().count("\n") == 4 * LINES
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    here = Path(sys.executable).parent
    ways: dict[str, Callable[[int], None]] = {
        "function, hvdlab.run": by_hvdlab,
        "function, multiprocessing spawn": by_multiprocessing,
        "script, hvdlab run": by_command(
            sys.executable, "-m", "hvdlab", "run", "-np", "{np}", sys.executable, "{script}"
        ),
        "script, torchrun": by_command(str(here / "torchrun"), "--nproc-per-node", "{np}", "{script}"),
        "script, mpiexec": by_command(str(here / "mpiexec"), "-np", "{np}", sys.executable, "{script}"),
    }
    seconds: dict[tuple[str, int], list[float]] = {}
    floods = []
    for _ in range(options.rounds):
        for name, launch in ways.items():
            for np in options.ranks:
                begin = time.perf_counter()
                launch(np)
                seconds.setdefault((name, np), []).append(time.perf_counter() - begin)
        floods.append(flood())
    found = {
        f"{name}, {np} ranks": round(statistics.median(times), 3) for (name, np), times in seconds.items()
    }
    found["80,000 lines of 4 ranks"] = round(statistics.median(floods), 3)
    print(
        json.dumps({"cores": os.cpu_count(), "python": platform.python_version(), "seconds": found}, indent=1)
    )


if __name__ == "__main__":
    main()
