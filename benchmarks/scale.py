"""Costs of agreement with up to 16,384 ranks: frames, bytes, time and memory, of the real state machines on a modelled
network.

    python benchmarks/scale.py --ranks 8 --ranks 1024        # some seconds, and a table
    python benchmarks/scale.py --write                       # 8 to 4,096: the table and plot of docs/design/scale.md
    python benchmarks/scale.py --watched --write             # the same sizes with one watched group: the second table

The model is ``tests/support/simulation/timed_job.py``: nothing is timed, so that the figures are the same on every machine, busy or not. 4,096 ranks take half
a minute of a core, 16,384 two and a half minutes and some gigabytes; those are only simulated if they are asked for. With ``--write``, figures
of the sizes that are not asked for stay.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from pages import write

from support.simulation.timed_job import Network, Passage, TimedJob, Traffic, memory_of_root

SIZES = (8, 64, 128, 1024, 4096)
RESULT, WATCHED, PAGE, PLOT = (
    ROOT / "benchmarks/results/scale.json",
    ROOT / "benchmarks/results/scale_watched.json",
    ROOT / "docs/design/scale.md",
    ROOT / "docs/images/scale.png",
)
GRADIENTS = tuple(f"layer{number // 3}.conv{number % 3}.weight" for number in range(161))
"""As many as ResNet-50 has, with names as long."""


def figures(passage: Passage) -> dict[str, float]:
    root, leaf = passage.root, passage.leaf
    return {
        "seconds": passage.seconds,
        "root_frames": root.frames,
        "root_bytes": root.bytes,
        "leaf_frames": leaf.frames,
        "leaf_bytes": leaf.bytes,
    }


def simulate(size: int) -> dict[str, Any]:
    """Return the figures of one size."""
    found: dict[str, Any] = {"root_memory": memory_of_root(size, GRADIENTS)}
    job = TimedJob(size)
    found["form"] = figures(job.form())
    for what, names in (("tensor", GRADIENTS[:1]), ("step", GRADIENTS)):
        job.step(names)  # which defines them
        found[what] = figures(job.step(names))
    told, anew = job.kill(size - 1)
    found["death"] = figures(told) | {"anew_seconds": anew}
    return found


BEATS = 60.0
"""Seconds for which heartbeats are counted: a dozen of each rank's."""


def traffic(name: str, counted: Traffic) -> dict[str, int]:
    return {f"{name}_frames": counted.frames, f"{name}_bytes": counted.bytes}


def simulate_watched(size: int) -> dict[str, Any]:
    """Return the figures of one size with one watched group of all ranks."""
    from support.timed_watch import TimedWatches  # imports torch

    job = TimedWatches(size)
    job.form()
    beats, report = job.beat(BEATS), job.report()
    assert report.missing == (size - 1,), "the verdict names other ranks than the one that is missing"
    found: dict[str, Any] = {"heartbeats": asdict(beats)}
    found["report"] = {"seconds": report.seconds, "resumed": report.resumed, "busy": report.busy}
    for name in ("root", "comparer", "leaf"):
        found["report"] |= traffic(name, getattr(report, name))
    return found


# -- the page ---------------------------------------------------------------------------------------------------------


def time_text(seconds: float) -> str:
    return (
        f"{seconds:.3g} s"
        if seconds >= 1
        else f"{seconds * 1e3:.2g} ms"
        if seconds < 0.1
        else f"{seconds * 1e3:.0f} ms"
    )


def bytes_text(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def markdown(result: dict[str, Any]) -> str:
    """Return the table of a result."""
    head = (
        "| ranks | one tensor is agreed after | a step: frames at the root | bytes at the root, at a leaf | all know of a death after | "
        "all go on after | bytes of that at the root, at a leaf | the world is formed after | memory of the root |"
    )
    lines = [head, "|" + "---|" * 9]
    for size, found in sorted(result["ranks"].items(), key=lambda item: int(item[0])):
        step, death = found["step"], found["death"]
        cells = [
            f"{int(size):,}",
            time_text(found["tensor"]["seconds"]),
            f"{step['root_frames']:,}",
            f"{bytes_text(step['root_bytes'])}, {bytes_text(step['leaf_bytes'])}",
            time_text(death["seconds"]),
            time_text(death["anew_seconds"]),
            f"{bytes_text(death['root_bytes'])}, {bytes_text(death['leaf_bytes'])}",
            time_text(found["form"]["seconds"]),
            bytes_text(found["root_memory"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def markdown_of_watched(result: dict[str, Any]) -> str:
    """Return the table of a result with a watched group."""
    head = (
        "| ranks | heartbeats: frames and bytes a second at the root | of its core | a late launch: all know which rank is missing after | "
        "frames and bytes at the root | its core is busy for | bytes at the rank that compares, at a leaf |"
    )
    lines = [head, "|" + "---|" * 7]
    for size, found in sorted(result["ranks"].items(), key=lambda item: int(item[0])):
        beats, report = found["heartbeats"], found["report"]
        cells = [
            f"{int(size):,}",
            f"{beats['frames']:,.0f}, {bytes_text(beats['bytes'])}",
            f"{100 * beats['busy']:.2g} %",
            time_text(report["seconds"]),
            f"{report['root_frames']:,}, {bytes_text(report['root_bytes'])}",
            time_text(report["busy"]),
            f"{bytes_text(report['comparer_bytes'])}, {bytes_text(report['leaf_bytes'])}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw times, bytes and memory by the number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = sorted(map(int, result["ranks"]))
    found = [result["ranks"][str(size)] for size in sizes]
    figure, (times, traffic) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for label, values in (
        ("one tensor is agreed", [one["tensor"]["seconds"] for one in found]),
        ("all know of a death", [one["death"]["seconds"] for one in found]),
        ("all go on after a death", [one["death"]["anew_seconds"] for one in found]),
        ("the world is formed", [one["form"]["seconds"] for one in found]),
    ):
        times.plot(sizes, values, marker="o", label=label)
    for label, values in (
        ("a step of 161 tensors, at the root", [one["step"]["root_bytes"] for one in found]),
        ("a death, at the root", [one["death"]["root_bytes"] for one in found]),
        ("a death, at a leaf", [one["death"]["leaf_bytes"] for one in found]),
        ("memory of the root", [one["root_memory"] for one in found]),
    ):
        traffic.plot(sizes, values, marker="o", label=label)
    for axes, unit in ((times, "seconds"), (traffic, "bytes")):
        axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel=unit)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=8)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, action="append", help=f"{SIZES} if not given")
    parser.add_argument(
        "--write", action="store_true", help="write the result, the page's table and its plot"
    )
    parser.add_argument("--watched", action="store_true", help="ranks of one watched group")
    options = parser.parse_args()
    path, name = (WATCHED, "scale_watched") if options.watched else (RESULT, "scale")
    one_size, table = (simulate_watched, markdown_of_watched) if options.watched else (simulate, markdown)
    result: dict[str, Any] = {"network": asdict(Network()), "ranks": {}}
    if options.write and path.exists():
        result["ranks"] = json.loads(path.read_text())["ranks"]
    for size in options.ranks or SIZES:
        result["ranks"][str(size)] = one_size(size)
        print(f"{size} ranks: {json.dumps(result['ranks'][str(size)])}", flush=True)
        if options.write:
            path.write_text(json.dumps(result, indent=1) + "\n")
            write(PAGE, name, table(result))
            if not options.watched:
                plot(result, PLOT)
    if not options.write:
        print(table(result))


if __name__ == "__main__":
    main()
