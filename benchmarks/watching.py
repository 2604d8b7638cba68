"""What watching costs, and how soon one sees: ranks in JupyterLab, the timeline open in headless Chromium.

    python benchmarks/watching.py latency                  # event on a rank to pixels, a minute
    python benchmarks/watching.py cost                     # ResNet-50's 161 gradients, recorded and drawn or not; minutes
    python benchmarks/watching.py soak --minutes 5         # memory of everybody at 20,000 spans per second
    python benchmarks/watching.py soak --minutes 60 --json benchmarks/results/watching_soak.json   # the hour

All is real: ranks, coordinator, kernel, Jupyter's server, the widget in a page. Everything shares this machine's cores,
the drawing without a GPU included; on a real one the browser is elsewhere.

``latency``: the time is taken by each rank's program when its collective has returned, and in the page at the frame
after the one in which the pixel in the middle of that collective has got its colour. The two clocks (``CLOCK_MONOTONIC`` and
``performance.now()``) are compared by questions and answers; half the quickest round trip is the error, told as ``clock``.

``cost``: ranks do the same steps with their recorder on and off by turns, in the order on, off, off, on, so that what else
happens on the machine hits both. A figure is the median over such fours, with the quarters.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import psutil
from nbformat.v4 import new_code_cell, new_notebook

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from lab_page import LabPage, lab_page

WAIT_MS = 600_000
LOAD, INIT, VIEW, MEASURE = range(4)

START = """\
%%hvd_run -np {ranks}
import json, os, time, torch, hvdlab.torch as hvd
from hvdlab.collectives import context
hvd.init()
def shapes():  # of the 161 parameters of a ResNet-50
    found, channels = [(64, 3, 7, 7), (64,), (64,)], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for shape in ((width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                found += [shape, shape[:1], shape[:1]]
            if block == 0:
                found += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return [*found, (1000, 2048), (1000,)]
def step(tensors):
    handles = [hvd.allreduce_async_(t, name=f'grad.{{i}}', op=hvd.Sum) for i, t in enumerate(tensors)]
    for handle in handles: hvd.synchronize(handle)
assert len(shapes()) == 161
small = [torch.zeros(16) for _ in range(161)]
"""

LATENCY = """\
%%hvd_run
times = []
for k in range({probes} + 5):
    for _ in range({busy}): step(small)
    time.sleep(0.15 + 0.05 * (hvd.rank() == 1) + 0.013 * (k % 7))
    hvd.allreduce(torch.ones(4), name='probe')
    times.append(time.monotonic_ns())
if hvd.rank() == 0: json.dump(times, open('times.json', 'w'))
"""

COST = """\
%%hvd_run
tensors = [torch.zeros(shape) for shape in shapes()]
recorder = context.engine().recorder
for _ in range(5): step(tensors)
while not os.path.exists('go'): time.sleep(0.05)
blocks = []
for on in [True, False, False, True] * {fours}:
    hvd.barrier()
    recorder.enabled = on
    hvd.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range({steps}): step(tensors)
    blocks.append((on, (time.perf_counter() - wall) / {steps}, (time.process_time() - cpu) / {steps}))
recorder.enabled = True
json.dump(blocks, open(f'blocks-{{hvd.rank()}}.json', 'w'))
"""

SOAK = """\
%%hvd_run
pause = {ranks} * 161 / {rate}
following = time.monotonic()
for k in range(10**9):
    stop = bool(hvd.allreduce(torch.tensor([float(os.path.exists('stop'))]), name='stop', op=hvd.Sum)) if k % 20 == 0 else False
    if stop: break
    step(small)
    following = max(following + pause, time.monotonic())
    time.sleep(following - min(following, time.monotonic()))
"""

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


@contextmanager
def watched(ranks: int, measure: str) -> Iterator[tuple[LabPage, Path]]:
    """A notebook whose ranks are up and whose timeline is open; the last cell is ``measure``."""
    cells = [
        "%load_ext hvdlab\nimport hvdlab, os\nopen('kernel.pid', 'w').write(str(os.getpid()))",
        START.format(ranks=ranks),
        "hvdlab.timeline()",
        measure,
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook: nbformat.NotebookNode = new_notebook(
        cells=[new_code_cell(source) for source in cells], metadata={"kernelspec": kernel}
    )
    with (
        tempfile.TemporaryDirectory() as directory,
        lab_page(Path(directory) / "lab", notebook, height=1300) as lab,
    ):
        for cell in (LOAD, INIT, VIEW):
            lab.finish(cell)
        lab.page.wait_for_selector(".hvd-timeline canvas", timeout=WAIT_MS)
        yield lab, Path(directory) / "lab" / "work"


def wait_for(path: Path) -> Any:
    """What a file has, once the ranks have written it."""
    deadline = time.monotonic() + WAIT_MS / 1000
    while not path.exists() or not path.stat().st_size:
        if time.monotonic() > deadline:
            sys.exit(f"{path.name} did not come")
        time.sleep(0.2)
    time.sleep(0.2)
    return json.loads(path.read_text())


def clock_of(lab: LabPage, rounds: int = 100) -> tuple[float, float]:
    """What to add to ``performance.now()`` for ``time.monotonic()``, and by how much it may be off; ms."""
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


def cost(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, leave in (("streamed and drawn on the same cores", False), ("streamed, nobody looks", True)):
        measure = COST.format(fours=options.fours, steps=options.steps)
        with watched(options.ranks, measure) as (lab, work):
            lab.run(MEASURE)
            lab.page.wait_for_function(
                "document.querySelector('.hvd-timeline').hvdlab.summary().spans >= 161 * 5", timeout=WAIT_MS
            )
            if leave:
                lab.leave()
            (work / "go").touch()
            blocks = [wait_for(work / f"blocks-{rank}.json") for rank in range(options.ranks)]
        found[name] = compared(blocks)
        print(name, found[name], flush=True)
    return found


def compared(blocks: list[list[tuple[bool, float, float]]]) -> dict[str, Any]:
    """Recording against none, by fours, over all ranks."""
    result: dict[str, Any] = {}
    for column, name in ((1, "step"), (2, "cpu_of_step")):
        means = [statistics.fmean(block[column] for block in of_all) for of_all in zip(*blocks, strict=True)]
        ratios = [
            (means[i] + means[i + 3]) / (means[i + 1] + means[i + 2]) - 1 for i in range(0, len(means), 4)
        ]
        quarters = statistics.quantiles(ratios, n=4)
        result[name] = {
            "off_ms": round(1000 * statistics.median(means[1::4] + means[2::4]), 2),
            "more_percent": round(100 * statistics.median(ratios), 2),
            "quarters_percent": [round(100 * quarters[0], 2), round(100 * quarters[2], 2)],
            "fours": len(ratios),
        }
    return result


def soak(options: argparse.Namespace) -> dict[str, Any]:
    samples: list[dict[str, float]] = []
    with watched(options.ranks, SOAK.format(ranks=options.ranks, rate=options.rate)) as (lab, work):
        kernel = psutil.Process(int((work / "kernel.pid").read_text()))
        lab.run(MEASURE)
        begun = time.monotonic()
        while time.monotonic() < begun + 60 * options.minutes:
            time.sleep(options.every)
            told = lab.page.evaluate("document.querySelector('.hvd-timeline').hvdlab.summary()")
            samples.append(
                {
                    "seconds": round(time.monotonic() - begun),
                    "spans": told["spans"] + told["forgotten"] + told["lost"],
                    "lost": told["lost"],
                    **memory(kernel),
                }
            )
            print(samples[-1], flush=True)
        (work / "stop").touch()
        lab.page.wait_for_function(
            "document.querySelectorAll('.jp-InputPrompt')[3].textContent.includes('*') === false",
            timeout=60_000,
        )
    return {**growth(samples), "samples": samples}


def tab() -> float:
    """Megabytes of the page's process: the largest of the browser's renderers, of which some are spare."""
    found = [0.0]
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "--type=renderer" in child.cmdline():
                found.append(child.memory_full_info().pss / 1e6)
    return max(found)


def memory(kernel: psutil.Process) -> dict[str, float]:
    """Megabytes and processor time of those who watch, and of those who are watched."""
    coordinator, ranks = 0.0, []
    for child in kernel.children(recursive=True):
        command = " ".join(child.cmdline())
        if "hvdlab.collectives.coordinator" in command:
            coordinator = child.memory_info().rss / 1e6
        elif child.children() == [] and child.memory_info().rss > 80e6:
            ranks.append(child.memory_full_info().uss / 1e6)
    times = kernel.cpu_times()
    return {
        "kernel_mb": round(kernel.memory_info().rss / 1e6, 1),
        "kernel_cpu_s": round(times.user + times.system, 1),
        "coordinator_mb": round(coordinator, 1),
        "largest_rank_mb": round(max(ranks, default=0.0), 1),
        "tab_mb": round(tab(), 1),
    }


def growth(samples: list[dict[str, float]]) -> dict[str, Any]:
    """How much grew over the second half, when all histories are full, and how fast spans came."""
    later = samples[len(samples) // 2 :]
    minutes = (later[-1]["seconds"] - later[0]["seconds"]) / 60 or 1
    seconds = later[-1]["seconds"] - later[0]["seconds"] or 1
    return {
        "spans_per_second": round((later[-1]["spans"] - later[0]["spans"]) / seconds),
        "kernel_cores": round((later[-1]["kernel_cpu_s"] - later[0]["kernel_cpu_s"]) / seconds, 3),
        **{
            f"{name}_per_minute": round((later[-1][name] - later[0][name]) / minutes, 2)
            for name in ("kernel_mb", "coordinator_mb", "largest_rank_mb", "tab_mb")
        },
        **{f"{name}_at_most": max(one[name] for one in samples) for name in ("kernel_mb", "tab_mb")},
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
    one.add_argument("--fours", type=int, default=12)
    one.add_argument("--steps", type=int, default=5)
    one = commands.add_parser("soak")
    one.add_argument("--ranks", type=int, default=8)
    one.add_argument("--rate", type=int, default=20_000)
    one.add_argument("--minutes", type=float, default=5)
    one.add_argument("--every", type=float, default=10)
    for one in commands.choices.values():
        one.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    load = round(os.getloadavg()[1], 1)
    found = {"cores": len(os.sched_getaffinity(0)), "load_before": load, **measures[options.command](options)}
    print(json.dumps({key: value for key, value in found.items() if key != "samples"}, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
