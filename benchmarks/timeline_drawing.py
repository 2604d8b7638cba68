"""How long the timeline takes to draw, in headless Chromium with software drawing: a million spans in 64 lanes.

    python benchmarks/timeline_drawing.py [--spans 1000000] [--lanes 64] [--json FILE]

``frame`` is the distance between animation frames while something changes in each (16.7 ms is 60 a second), ``draw`` the
time of the drawing call. ``live`` adds spans at 20,000 per second meanwhile, as binary messages of 50 ms.

``charts``: the same number of spans over an hour of 8 ranks, with the charts of 12 metrics open under the lanes, a point per
rank, metric and second; live with new points each second. ``charts`` in a result is the part of a frame that they take.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import shutil
import statistics
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Page, sync_playwright

RANKS, METRICS = 8, 12
STRETCH = 40  # makes rounds so long that a million spans of 8 ranks are an hour

STATIC = Path(__file__).parents[1] / "widgets" / "static"
PAGE = """<!doctype html><html><head><link rel="stylesheet" href="views.css"></head>
<body style="margin:0;background:#fff"><div id="at"></div></body></html>"""

SETUP = """async ([spans, lanes, stretch, metrics]) => {
    const { default: widget } = await import('/timeline.js');
    let receive;
    const traits = { limit: Math.round(spans * 1.2), height: 560, still: 'none' };
    const model = { get: name => traits[name], on: (event, act) => { if (event === 'msg:custom') receive = act; }, off() {}, send() {} };
    let seed = 7, op = 0, sent = 0;
    const random = () => (seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0) / 2 ** 32;
    const clock = new Float64Array(lanes);
    const names = ['', ...Array.from({ length: 160 }, (_, i) => `grad.layer${i}.weight`)];
    // Rounds of collectives: each rank computes, arrives, waits for the last one, and transfers.
    window.make = rounds => {
        const count = rounds * lanes;
        const buffer = new ArrayBuffer(count * 46);
        let at = 0;
        const column = (Make, bytes) => { const c = new Make(buffer, at, count); at += bytes * count; return c; };
        const arrival = column(Float64Array, 8), nbytes = column(Float64Array, 8);
        const ready = column(Float32Array, 4), started = column(Float32Array, 4), finished = column(Float32Array, 4);
        column(Float32Array, 4);
        const name = column(Uint32Array, 4), ops = column(Uint32Array, 4);
        const rank = column(Uint16Array, 2), size = column(Uint16Array, 2), kind = column(Uint8Array, 1);
        let i = 0;
        for (let round = 0; round < rounds; round++) {
            op++;
            let last = 0;
            const what = random() < 0.85 ? 0 : 1 + Math.floor(random() * 4);
            for (let lane = 0; lane < lanes; lane++) {
                clock[lane] += stretch * (3e5 + 4e5 * random() ** 4);
                if (clock[lane] > last) last = clock[lane];
            }
            for (let lane = 0; lane < lanes; lane++, i++) {
                const begin = clock[lane], from = last + 2e4, end = from + stretch * (1e5 + 3e5 * random() ** 3);
                arrival[i] = begin; nbytes[i] = 4096; ready[i] = from - begin; started[i] = from - begin + 5e3; finished[i] = end - begin;
                name[i] = 1 + op % 160; ops[i] = op; rank[i] = lane; size[i] = lanes; kind[i] = what;
                clock[lane] = end;
            }
        }
        return [count, new DataView(buffer)];
    };
    // A point of each series in each second from one time to another, in columns.
    const known = ['hvdlab/cpu', 'hvdlab/rss', 'hvdlab/step_time', 'hvdlab/lateness', 'hvdlab/share/compute', 'hvdlab/share/wait', 'hvdlab/share/transfer'];
    const series = Array.from({ length: metrics * lanes }, (_, i) => ({ rank: i % lanes, name: known[Math.floor(i / lanes)] ?? `metric ${Math.floor(i / lanes)}`, unit: '' }));
    let pointed = 0, second = 0;
    window.measured = until => {
        const from = second;
        second = Math.floor(until / 1e9);
        const count = (second - from) * series.length, buffer = new ArrayBuffer(count * 32);
        const time = new Float64Array(buffer, 0, count), value = new Float64Array(buffer, 8 * count, count), step = new Float64Array(buffer, 16 * count, count);
        const which = new Uint32Array(buffer, 24 * count, count), number = new Uint32Array(buffer, 28 * count, count);
        for (let i = 0; i < count; i++) {
            time[i] = (from + Math.floor(i / series.length) + 0.5) * 1e9; which[i] = i % series.length; number[i] = i; step[i] = NaN;
            value[i] = series[which[i]].name.includes('/share/') ? 1 / 3 : 0.3 * random() + Math.sin(time[i] / 3e10 + which[i]);
        }
        return [count, buffer];
    };
    window.feed = ([count, view], until = 0) => {
        const first = !sent;
        const [points, columns] = until && metrics ? measured(until) : [0, new ArrayBuffer(0)];
        receive({
            type: 'rows', after: sent, from: sent, count, namesFrom: 0, names: first ? names : [], sites: [], marks: [], lost: 0, clockErrors: [],
            seriesFrom: 0, series: first ? series : [], points, pointsFrom: pointed, pointsTo: pointed + points, pointsLost: 0, heading: `${lanes}/${lanes} ranks`,
            ranks: first ? Array.from({ length: lanes }, (_, rank) => ({ rank, host: `node-${Math.floor(rank / 8)}`, state: 'running' })) : undefined,
        }, [view, new DataView(columns)]);
        sent += count;
        pointed += points;
    };
    widget.initialize({ model });
    widget.render({ model, el: document.getElementById('at') });
    window.api = document.querySelector('.hvd-timeline').hvdlab;
    const begun = performance.now();
    for (let left = spans; left > 0; left -= 64000) feed(make(Math.floor(Math.min(left, 64000) / lanes)));
    if (metrics) {
        feed([0, new DataView(new ArrayBuffer(0))], api.store.end);
        api.timeline.toggleCharts();
    }
    const load = performance.now() - begun;
    await new Promise(done => setTimeout(done, 1000));
    return { load, ...api.summary(), lanes: api.summary().lanes.length, points: api.store.series.count, charts: api.timeline.charts?.all.size ?? 0 };
}"""

MEASURE = """async ([what, frames, rate, lanes]) => {
    const { view, timeline, store } = api;
    const length = store.end - store.begin;
    view.fit();
    timeline.timings.draw.length = 0;
    timeline.timings.on = true;
    const charts = timeline.charts?.timings;
    if (charts) [charts.draw.length, charts.on] = [0, true];
    const gaps = [];
    let added = 0, messages = 0;
    const prepared = rate ? Array.from({ length: Math.ceil(frames / 3) + 9 }, () => make(Math.max(1, Math.round(rate * 0.05 / lanes)))) : [];
    const step = {
        'pan, everything': k => view.show(store.begin + length * 0.2 * Math.sin(k / 20), store.begin + length * (1 + 0.2 * Math.sin(k / 20))),
        'pan, a hundredth': k => view.show(store.begin + length * (0.3 + 0.0005 * k), store.begin + length * (0.31 + 0.0005 * k)),
        'zoom': k => { const f = Math.exp(-6 * (1 - Math.cos(k / 25))); view.show(store.begin + length * (0.5 - f / 2), store.begin + length * (0.5 + f / 2)); },
        'search, everything': k => view.show(store.begin + length * 0.2 * Math.sin(k / 20), store.begin + length * (1 + 0.2 * Math.sin(k / 20))),
        'follow': k => { if (!k) { view.show(store.end - 5e9, store.end); view.follow(true); } },
    }[what];
    await new Promise(done => {
        let k = 0, before = 0, next = 0;
        const tick = now => {
            if (before && k > 5) gaps.push(now - before);
            before = now;
            if (prepared.length && now >= next) { const one = prepared.shift(); added += one[0]; next = now + 50; feed(one, messages++ % 20 ? 0 : store.end); }
            step(k);
            timeline.schedule();
            if (k++ < frames) requestAnimationFrame(tick); else done();
        };
        requestAnimationFrame(tick);
    });
    timeline.timings.on = false;
    if (charts) charts.on = false;
    return { gaps, draw: timeline.timings.draw.slice(5), charts: charts?.draw.slice(5) ?? [], added, heap: performance.memory.usedJSHeapSize };
}"""


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def figures(values: list[float]) -> dict[str, float]:
    return {"p50": round(statistics.median(values), 1), "p95": round(percentile(values, 0.95), 1)}


class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path != "/":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, so that requests do not mix with the figures."""


def memory_of_tab(pid: int) -> float:
    """Return MB of the renderer's own share of memory: the largest among the browser's processes."""
    found = [0.0]
    for child in psutil.Process(pid).children(recursive=True):
        if "--type=renderer" in child.cmdline():
            found.append(child.memory_full_info().pss / 1e6)
    return max(found)


def browser_pid() -> int:
    own = psutil.Process().children(recursive=True)
    return next(p.pid for p in own if "chrom" in p.name() and "--type=" not in " ".join(p.cmdline()))


def measured(page: Page, lanes: int, frames: int, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield figures of each way to move, without and with spans that come meanwhile."""
    for rate in (0, 20_000):
        for what in ("pan, everything", "pan, a hundredth", "zoom", "search, everything", "follow"):
            if what == "follow" and not rate:
                continue
            page.locator(".hvd-timeline input").first.fill("layer12" if what.startswith("search") else "")
            found = page.evaluate(MEASURE, [what, frames, rate, lanes])
            one = {"frame": figures(found["gaps"]), "draw": figures(found["draw"]), "added": found["added"]}
            if found["charts"]:
                one["charts"] = figures(found["charts"])
            one["heap_mb"] = round(found["heap"] / 1e6)
            one["tab_mb"] = round(memory_of_tab(browser_pid()))
            told = what + (", live" if rate else "")
            print(f"{name + told:36} {one}", flush=True)
            yield told, one


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spans", type=int, default=1_000_000)
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--frames", type=int, default=240)
    parser.add_argument("--width", type=int, default=1400)
    parser.add_argument("--only", choices=("lanes", "charts"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(STATIC))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    results: dict[str, Any] = {}
    with sync_playwright() as playwright:
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-precise-memory-info"]
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        address = f"http://127.0.0.1:{server.server_port}/"
        for name, lanes, stretch, metrics in (
            ("", options.lanes, 1, 0),
            ("charts: ", RANKS, STRETCH, METRICS),
        ):
            if options.only and options.only != (name.strip(": ") or "lanes"):
                continue
            page = browser.new_page(viewport={"width": options.width, "height": 1300 if metrics else 900})
            page.goto(address)
            results[f"{name}loaded"] = page.evaluate(SETUP, [options.spans, lanes, stretch, metrics])
            results |= {f"{name}{what}": one for what, one in measured(page, lanes, options.frames, name)}
            page.close()
        browser.close()
    server.shutdown()
    server.server_close()
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
