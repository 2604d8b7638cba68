"""What agreement costs with up to 16,384 ranks: frames, bytes, time and memory, of the real state machines on a modelled network.

    python benchmarks/scale.py --ranks 8 --ranks 1024        # some seconds, and tables
    python benchmarks/scale.py --ranks 1024 --levels 1       # only with a relay on each host
    python benchmarks/scale.py --write                       # 8 to 4,096: the tables and plot of docs/design/scale.md

The model is ``tests/timed_job.py``: nothing is timed, so that the figures are the same on every machine, busy or not. 4,096 ranks take half
a minute of a core, 16,384 two and a half minutes and some gigabytes; those are only simulated if they are asked for. Each size is simulated with
a connection for each rank, with a relay on each host, and with relays above those, as far as there are enough ranks. With ``--write``, figures
of what is not asked for stay.
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

from timed_job import Network, Passage, TimedJob, memory_of_root

SIZES = (8, 64, 128, 1024, 4096)
LEVELS = (0, 1, 2)
"""How many relays are between a rank and the coordinator."""
RESULT, PAGE, PLOT = (
    ROOT / "benchmarks/results/scale.json",
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


def is_useful(size: int, levels: int) -> bool:
    """Whether so many levels of relays have more than one process behind the coordinator, or behind each relay of the last level."""
    network = Network()
    return size > (1, network.ranks_per_host, network.ranks_per_host * network.relays_per_relay)[levels]


def simulate(size: int, levels: int = 0) -> dict[str, Any]:
    """The figures of one size."""
    behind = (0, Network().ranks_per_host, Network().ranks_per_host * Network().relays_per_relay)[levels]
    found: dict[str, Any] = {"root_memory": memory_of_root(size, GRADIENTS, behind)}
    job = TimedJob(size, levels=levels)
    found["form"] = figures(job.form())
    for what, names in (("tensor", GRADIENTS[:1]), ("step", GRADIENTS)):
        job.step(names)  # which defines them
        found[what] = figures(job.step(names))
    told, anew = job.kill(size - 1)
    found["death"] = figures(told) | {"anew_seconds": anew}
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
    """The table of a result."""
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


def figures_of(result: dict[str, Any], levels: int) -> dict[str, Any]:
    """What a result has of jobs with so many levels of relays, by number of ranks."""
    of: dict[str, Any] = result["relays"].setdefault(str(levels), {}) if levels else result["ranks"]
    return of


def relays_markdown(result: dict[str, Any]) -> str:
    """The table of what relays change."""
    head = (
        "| ranks | levels of relays | one tensor is agreed after (of that without) | a step: frames and bytes at the root | "
        "all know of a death after | all go on after | the world is formed after | memory of the root |"
    )
    lines = [head, "|" + "---|" * 8]
    found = [(int(size), level) for level in LEVELS[1:] for size in figures_of(result, level)]
    for size, levels in sorted(found):
        one, without = figures_of(result, levels)[str(size)], result["ranks"].get(str(size))
        agreed, step, death = one["tensor"]["seconds"], one["step"], one["death"]
        share = f" ({agreed / without['tensor']['seconds']:.2g})" if without else ""
        cells = [
            f"{size:,}",
            str(levels),
            time_text(agreed) + share,
            f"{step['root_frames']:,}, {bytes_text(step['root_bytes'])}",
            time_text(death["seconds"]),
            time_text(death["anew_seconds"]),
            time_text(one["form"]["seconds"]),
            bytes_text(one["root_memory"]),
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
    for level, label in ((1, "one tensor, relays on each host"), (2, "one tensor, two levels of relays")):
        relayed = sorted((int(size), one) for size, one in figures_of(result, level).items())
        seconds = [one["tensor"]["seconds"] for _, one in relayed]
        if relayed:
            times.plot([size for size, _ in relayed], seconds, marker="s", linestyle="--", label=label)
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
    parser.add_argument("--levels", type=int, action="append", choices=LEVELS, help="all if not given")
    parser.add_argument(
        "--write", action="store_true", help="write the result, the page's tables and its plot"
    )
    options = parser.parse_args()
    result: dict[str, Any] = {"network": asdict(Network()), "ranks": {}, "relays": {}}
    if options.write and RESULT.exists():
        before = json.loads(RESULT.read_text())
        result |= {"ranks": before["ranks"], "relays": before.get("relays", {})}
    for size in options.ranks or SIZES:
        for level in options.levels or LEVELS:
            if not is_useful(size, level):
                continue
            found = figures_of(result, level)[str(size)] = simulate(size, level)
            print(f"{size} ranks, {level} levels of relays: {json.dumps(found)}", flush=True)
            if options.write:
                write_page(result)
    if not options.write:
        print(markdown(result), relays_markdown(result), sep="\n\n")


def write_page(result: dict[str, Any]) -> None:
    """Write the result, the page's tables and its plot."""
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    write(PAGE, "scale", markdown(result))
    write(PAGE, "relays", relays_markdown(result))
    plot(result, PLOT)


if __name__ == "__main__":
    main()
