"""How long the timeline takes to draw, in headless Chromium with software drawing: a million spans in 64 lanes.

    python benchmarks/timeline_drawing.py [--spans 1000000] [--lanes 64] [--json FILE]

``frame`` is the distance between animation frames while something changes in each (16.7 ms is 60 a second), ``draw`` the
time of the drawing call. ``live`` adds spans at 20,000 per second meanwhile, as binary messages of 50 ms.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import shutil
import statistics
import threading
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import sync_playwright

STATIC = Path(__file__).parents[1] / "widgets" / "static"
PAGE = """<!doctype html><html><head><link rel="stylesheet" href="views.css"></head>
<body style="margin:0;background:#fff"><div id="at"></div></body></html>"""

SETUP = """async ([spans, lanes]) => {
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
                clock[lane] += 3e5 + 4e5 * random() ** 4;
                if (clock[lane] > last) last = clock[lane];
            }
            for (let lane = 0; lane < lanes; lane++, i++) {
                const begin = clock[lane], from = last + 2e4, end = from + 1e5 + 3e5 * random() ** 3;
                arrival[i] = begin; nbytes[i] = 4096; ready[i] = from - begin; started[i] = from - begin + 5e3; finished[i] = end - begin;
                name[i] = 1 + op % 160; ops[i] = op; rank[i] = lane; size[i] = lanes; kind[i] = what;
                clock[lane] = end;
            }
        }
        return [count, new DataView(buffer)];
    };
    window.feed = ([count, view]) => {
        const first = !sent;
        receive({
            type: 'rows', after: sent, from: sent, count, namesFrom: 0, names: first ? names : [], sites: [], marks: [], lost: 0, clockErrors: [],
            seriesFrom: 0, series: [], points: 0, pointsFrom: 0, pointsTo: 0, pointsLost: 0, heading: `${lanes}/${lanes} ranks`,
            ranks: first ? Array.from({ length: lanes }, (_, rank) => ({ rank, host: `node-${Math.floor(rank / 8)}`, state: 'running' })) : undefined,
        }, [view, new DataView(new ArrayBuffer(0))]);
        sent += count;
    };
    widget.initialize({ model });
    widget.render({ model, el: document.getElementById('at') });
    window.api = document.querySelector('.hvd-timeline').hvdlab;
    const begun = performance.now();
    for (let left = spans; left > 0; left -= 64000) feed(make(Math.floor(Math.min(left, 64000) / lanes)));
    const load = performance.now() - begun;
    await new Promise(done => setTimeout(done, 1000));
    return { load, ...api.summary(), lanes: api.summary().lanes.length };
}"""

MEASURE = """async ([what, frames, rate, lanes]) => {
    const { view, timeline, store } = api;
    const length = store.end - store.begin;
    view.fit();
    timeline.timings.draw.length = 0;
    timeline.timings.on = true;
    const gaps = [];
    let seed = 0, owed = 0, added = 0, messages = 0;
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
            if (prepared.length && now >= next) { const one = prepared.pop(); added += one[0]; messages++; next = now + 50; feed(one); }
            step(k);
            timeline.schedule();
            if (k++ < frames) requestAnimationFrame(tick); else done();
        };
        requestAnimationFrame(tick);
    });
    timeline.timings.on = false;
    return { gaps, draw: timeline.timings.draw.slice(5), added, heap: performance.memory.usedJSHeapSize };
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
        """Not wanted."""


def memory_of_tab(pid: int) -> float:
    """MB of the renderer's own share of memory: the largest among the browser's processes."""
    found = [0.0]
    for child in psutil.Process(pid).children(recursive=True):
        if "--type=renderer" in child.cmdline():
            found.append(child.memory_full_info().pss / 1e6)
    return max(found)


def browser_pid() -> int:
    own = psutil.Process().children(recursive=True)
    return next(p.pid for p in own if "chrom" in p.name() and "--type=" not in " ".join(p.cmdline()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spans", type=int, default=1_000_000)
    parser.add_argument("--lanes", type=int, default=64)
    parser.add_argument("--frames", type=int, default=240)
    parser.add_argument("--width", type=int, default=1400)
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
        page = browser.new_page(viewport={"width": options.width, "height": 900})
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        results["loaded"] = page.evaluate(SETUP, [options.spans, options.lanes])
        for rate in (0, 20_000):
            for what in ("pan, everything", "pan, a hundredth", "zoom", "search, everything", "follow"):
                if what == "follow" and not rate:
                    continue
                page.locator(".hvd-timeline input").fill("layer12" if what.startswith("search") else "")
                found = page.evaluate(MEASURE, [what, options.frames, rate, options.lanes])
                one = {
                    "frame": figures(found["gaps"]),
                    "draw": figures(found["draw"]),
                    "added": found["added"],
                }
                one["heap_mb"] = round(found["heap"] / 1e6)
                one["tab_mb"] = round(memory_of_tab(browser_pid()))
                results[what + (", live" if rate else "")] = one
                print(f"{what + (', live' if rate else ''):28} {one}")
        browser.close()
    server.shutdown()
    server.server_close()
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
