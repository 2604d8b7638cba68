"""All figures of the views and of inspection, one after the other: on an otherwise idle machine, a quarter of an hour.

    python benchmarks/quiet.py                    # all; results go to benchmarks/results
    python benchmarks/quiet.py cost drawing       # some
    python benchmarks/quiet.py --list

A measurement that takes too long is ended and reported, and the others continue. The soak of an hour is not among them.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent


class Figure(NamedTuple):
    """One measurement.

    Attributes:
        command: Script and arguments; where the result goes is added.
        seconds: When it is ended.
    """

    command: str
    seconds: float


# By the name of the file with the result, those first that a reader asks for first.
FIGURES = {
    "timeline_drawing": Figure("timeline_drawing.py", 180),
    "watching_cost": Figure("watching.py cost --seconds 100 --browser", 330),
    "event_to_pixels": Figure("watching.py latency", 240),
    "feeding": Figure("feeding.py", 90),
    "tracing": Figure("tracing.py", 120),
    "traces": Figure("traces.py", 240),
    "diff": Figure("diff.py", 150),
    "metrics": Figure("metrics.py", 180),
    "recording": Figure("recording.py", 90),
    "strangers": Figure("strangers.py", 300),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", nargs="*", metavar="figure", help="parts of names; all by default")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    wanted = [name for name in FIGURES if not options.figures or any(one in name for one in options.figures)]
    if options.list or not wanted:
        print(*(f"{name}: {FIGURES[name].command}" for name in wanted or FIGURES), sep="\n")
        sys.exit(not wanted)
    failed = [name for name in wanted if not measured(name, options.results.absolute())]
    sys.exit(f"not measured: {', '.join(failed)}" if failed else 0)


def measured(name: str, results: Path) -> bool:
    """Whether a result was written; a file that was there stays otherwise."""
    command, seconds = FIGURES[name]
    target, unfinished = results / f"{name}.json", results / f".{name}.json"
    words = [sys.executable, str(HERE / command.split()[0]), *command.split()[1:], "--json", str(unfinished)]
    begun = time.monotonic()
    print(f"== {name} (load {os.getloadavg()[0]:.1f})", flush=True)
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    done = process.returncode == 0 and unfinished.exists()
    if done:
        unfinished.replace(target)
    unfinished.unlink(missing_ok=True)
    print(f"   {'written' if done else 'failed'} after {time.monotonic() - begun:.0f} s", flush=True)
    return done


if __name__ == "__main__":
    main()
