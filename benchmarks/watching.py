"""Costs and latency of watching: ranks in JupyterLab, the timeline open in headless Chromium.

    python benchmarks/watching.py latency                  # event on a rank to pixels, a minute
    python benchmarks/watching.py cost                     # ResNet-50's 161 gradients, recorded or not, three minutes
    python benchmarks/watching.py soak --minutes 5         # memory of everybody at 20,000 spans per second
    python benchmarks/watching.py soak --no-browser --minutes 60 --json benchmarks/results/watching_soak.json   # the hour

All is real: ranks, coordinator, kernel, Jupyter's server, the widget in a page. Everything shares this machine's cores,
the drawing without a GPU included; on a real one the browser is elsewhere.

``latency``: the time is taken by each rank's program when its collective has returned, and in the page at the frame
after the one in which the pixel in the middle of that collective has got its colour. The two clocks (``CLOCK_MONOTONIC`` and
``performance.now()``) are compared by questions and answers; half the quickest round trip is the error, given as
``clock``.

``cost``: see ``watching_cost.py``. With ``--browser`` also with the timeline drawn on the same processors.

``soak``: with ``--no-browser`` a small client receives the messages of the timeline and the charts, in the page's
place.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from bare_kernel import prefer
from watched import LATENCY, MEASURE, SOAK, WAIT_MS, wait_for, watched, watched_unseen
from watching_cost import cost

from support.jupyter.lab_page import LabPage

# Looks in every frame whether the pixel in the middle of the next probe's waiting has got another colour than an empty lane.
LOOK = """() => {
    const { store, where, timeline } = document.querySelector('.hvd-timeline').hvdlab;
    const canvas = timeline.scene.canvas;
    const context = canvas.getContext('2d');
    const ratio = canvas.width / canvas.clientWidth;
    const lane = store.lane(0);
    const empty = timeline.palette.lane;
    let next = 0, at = 0;
    window.seen = [];
    let waiting = [];
    const tick = now => {
        for (const one of waiting) window.seen.push(one === undefined ? null : performance.now());
        waiting = [];
        for (; next < lane.n + lane.dropped; next++) {
            const k = next - lane.dropped;
            if (k < 0 || store.names[lane.name[k]] !== 'probe') continue;
            const { x, y } = where(0, lane.arrival[k] + lane.ready[k] / 2);
            const pixel = context.getImageData(Math.round(x * ratio), Math.round(y * ratio), 1, 1).data;
            const apart = Math.abs(pixel[0] - empty[0]) + Math.abs(pixel[1] - empty[1]) + Math.abs(pixel[2] - empty[2]);
            if (apart < 24) break;
            waiting.push(k);
        }
        requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
}"""


def clock_of(lab: LabPage, rounds: int = 100) -> tuple[float, float]:
    """Return the offset from ``performance.now()`` to ``time.monotonic()``, and its error; ms."""
    best = (float("inf"), 0.0)
    for _ in range(rounds):
        before = time.monotonic_ns()
        there = lab.page.evaluate("performance.now()")
        after = time.monotonic_ns()
        best = min(best, ((after - before) / 1e6, (before + after) / 2e6 - there))
    return best[1], best[0] / 2


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def latency(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, busy in (("probes alone", 0), ("and 161 gradients four times a second", 1)):
        with watched(options.ranks, LATENCY.format(probes=options.probes, busy=busy)) as (lab, work):
            offset, error = clock_of(lab)
            lab.run(MEASURE)
            lab.page.wait_for_function(
                "document.querySelector('.hvd-timeline').hvdlab.store.lanes.length > 0"
            )
            lab.page.evaluate(LOOK)
            times = wait_for(work / "times.json")[: options.probes]
            lab.page.wait_for_function(f"window.seen.length >= {options.probes}", timeout=WAIT_MS)
            seen = lab.page.evaluate("window.seen")[: options.probes]
            again, _ = clock_of(lab)
        late = [at + offset - begun / 1e6 for at, begun in zip(seen, times, strict=True)]
        found[name] = {
            "p50_ms": round(statistics.median(late), 1),
            "p95_ms": round(percentile(late, 0.95), 1),
            "p99_ms": round(percentile(late, 0.99), 1),
            "max_ms": round(max(late), 1),
            "probes": len(late),
            "clock_ms": round(error + abs(again - offset), 2),
        }
        print(name, found[name], flush=True)
    return found


def soak(options: argparse.Namespace) -> dict[str, Any]:
    prefer(options.nice)
    measure = SOAK.format(ranks=options.ranks, rate=options.rate)
    samples = unseen_soak(options, measure) if options.no_browser else drawn_soak(options, measure)
    return {**growth(samples), "by_minute": by_minute(samples), "samples": samples}


def drawn_soak(options: argparse.Namespace, measure: str) -> list[dict[str, float]]:
    with watched(options.ranks, measure) as (lab, work):
        kernel = psutil.Process(int((work / "kernel.pid").read_text()))
        lab.run(MEASURE)

        def told() -> dict[str, float]:
            found = lab.page.evaluate("document.querySelector('.hvd-timeline').hvdlab.summary()")
            spans = found["spans"] + found["forgotten"] + found["lost"]
            return {"spans": spans, "lost": found["lost"], "tab_mb": round(tab(), 1)}

        samples = sampled(options, kernel, told)
        (work / "stop").touch()
        lab.page.wait_for_function(
            "document.querySelectorAll('.jp-InputPrompt')[3].textContent.includes('*') === false",
            timeout=60_000,
        )
    return samples


def unseen_soak(options: argparse.Namespace, measure: str) -> list[dict[str, float]]:
    with watched_unseen(options.ranks) as kernel:
        timeline, metrics = sorted(kernel.views, key=lambda view: view.kind, reverse=True)
        running = kernel.start(measure)

        def told() -> dict[str, float]:
            return {
                "spans": timeline.rows + timeline.missed,
                "lost": timeline.lost,
                "missed": timeline.missed,
                "points": metrics.points,
                "sent_mb": round(timeline.megabytes + metrics.megabytes, 1),
            }

        samples = sampled(options, kernel.process, told)
        (kernel.directory / "stop").touch()
        kernel.wait(running)
    return samples


def sampled(
    options: argparse.Namespace, kernel: psutil.Process, told: Callable[[], dict[str, float]]
) -> list[dict[str, float]]:
    """Return the memory of all processes at intervals, and the counts of the view's messages by then."""
    samples: list[dict[str, float]] = []
    begun = time.monotonic()
    while time.monotonic() < begun + 60 * options.minutes:
        time.sleep(options.every)
        samples.append({"seconds": round(time.monotonic() - begun), **told(), **memory(kernel)})
        print(samples[-1], flush=True)
    return samples


def tab() -> float:
    """Return megabytes of the page's process: the largest of the browser's renderers, of which some are spare."""
    found = [0.0]
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "--type=renderer" in child.cmdline():
                found.append(child.memory_full_info().pss / 1e6)
    return max(found)


def memory(kernel: psutil.Process) -> dict[str, float]:
    """Return megabytes and processor time of the watching processes, and of the watched ones."""
    coordinator, ranks = 0.0, []
    for child in kernel.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline())
            if "hvdlab.collectives.coordinator" in command:
                coordinator = child.memory_info().rss / 1e6
            elif child.children() == [] and child.memory_info().rss > 80e6:
                ranks.append(child.memory_full_info())
    times = kernel.cpu_times()
    return {
        "kernel_mb": round(kernel.memory_info().rss / 1e6, 1),
        "kernel_pss_mb": round(kernel.memory_full_info().pss / 1e6, 1),
        "kernel_cpu_s": round(times.user + times.system, 1),
        "coordinator_mb": round(coordinator, 1),
        "largest_rank_mb": round(max((one.uss for one in ranks), default=0) / 1e6, 1),
        "ranks_pss_mb": round(sum(one.pss for one in ranks) / 1e6, 1),
        "ranks": len(ranks),
    }


MEMORY = ("kernel_mb", "kernel_pss_mb", "coordinator_mb", "largest_rank_mb", "ranks_pss_mb", "tab_mb")


def by_minute(samples: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return one sample of each minute, the first of it, with the rate since the one before."""
    chosen: dict[int, dict[str, float]] = {}
    for one in samples:
        chosen.setdefault(int(one["seconds"] // 60), one)
    result, before = [], {"seconds": 0.0, "spans": 0.0}
    for minute, one in chosen.items():
        rate = (one["spans"] - before["spans"]) / max(1, one["seconds"] - before["seconds"])
        kept = {name: one[name] for name in MEMORY if name in one}
        result.append({"minute": minute, "spans_per_second": round(rate), **kept})
        before = one
    return result


def growth(samples: list[dict[str, float]]) -> dict[str, Any]:
    """Return how fast spans came, and the slope of a straight line through the second half, when all histories are
    full."""
    later = samples[len(samples) // 2 :]
    seconds = later[-1]["seconds"] - later[0]["seconds"] or 1
    at = [one["seconds"] / 60 for one in later]
    names = [name for name in MEMORY if name in later[0]]
    return {
        "minutes": round(samples[-1]["seconds"] / 60, 1),
        "spans_per_second": round((later[-1]["spans"] - later[0]["spans"]) / seconds),
        "spans": later[-1]["spans"],
        **{name: later[-1][name] for name in ("lost", "missed") if name in later[0]},
        "kernel_cores": round((later[-1]["kernel_cpu_s"] - later[0]["kernel_cpu_s"]) / seconds, 3),
        "over_minutes": round(seconds / 60, 1),
        **{
            f"{name}_per_minute": round(
                statistics.linear_regression(at, [one[name] for one in later]).slope, 3
            )
            for name in names
        },
        **{f"{name}_at_most": max(one[name] for one in samples) for name in names},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    commands = parser.add_subparsers(dest="command", required=True)
    measures: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "latency": latency,
        "cost": cost,
        "soak": soak,
    }
    one = commands.add_parser("latency")
    one.add_argument("--ranks", type=int, default=4)
    one.add_argument("--probes", type=int, default=200)
    one = commands.add_parser("cost")
    one.add_argument("--ranks", type=int, default=2)
    one.add_argument("--seconds", type=float, default=150, help="of measuring")
    one.add_argument("--steps", type=int, default=3, help="in a block")
    one.add_argument("--small-steps", type=int, default=30, help="in a block of small tensors")
    one.add_argument("--browser", action="store_true", help="also with a browser on the same processors")
    one = commands.add_parser("soak")
    one.add_argument("--ranks", type=int, default=8)
    one.add_argument("--rate", type=int, default=20_000)
    one.add_argument("--minutes", type=float, default=5)
    one.add_argument("--every", type=float, default=10, help="seconds between looks")
    one.add_argument("--no-browser", action="store_true", help="a small client in the page's place")
    one.add_argument(
        "--nice", type=int, default=0, help="priority, for a machine that others use (needs root)"
    )
    for one in commands.choices.values():
        one.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    load = round(os.getloadavg()[1], 1)
    found = {"cores": len(os.sched_getaffinity(0)), "load_before": load, **measures[options.command](options)}
    found.pop("samples", None)  # they were printed
    print(json.dumps(found, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
