"""The timeline by itself in a real browser: effects of pointer and keys on hosts, the minimap, and stretches of
time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api")

from playwright.sync_api import Page, Route

from support.jupyter.chromium import CHROMIUM, chromium, page_errors

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
]

STATIC = Path(__file__).parents[3] / "widgets" / "static"
ORIGIN = "http://views.invalid"
PAGE = f"""<!doctype html><html><head><style>{(STATIC / "views.css").read_text()}</style></head>
<body style="margin:0;background:#fff"><div id="at" style="height:700px"></div></body></html>"""

# Four ranks on two hosts, 100 rounds of 10 ms: rank 1 comes 2 ms after the others in the first half, 6 ms in the second.
SETUP = """async () => {
    const { Charts, Timeline, Store, Viewport } = await import('/timeline.js');
    const store = new Store(), rounds = 100, ranks = 4, count = rounds * ranks;
    store.names.push('grad.weight', 'loss');
    store.sites.push('', 'cell [7] line 4', 'cell [7] line 6');
    const rows = { count };
    for (const name of ['arrival', 'nbytes']) rows[name] = new Float64Array(count);
    for (const name of ['ready', 'started', 'finished', 'waited']) rows[name] = new Float32Array(count);
    for (const name of ['name', 'op']) rows[name] = new Uint32Array(count);
    for (const name of ['rank', 'size']) rows[name] = new Uint16Array(count);
    for (const name of ['kind', 'flags']) rows[name] = new Uint8Array(count);
    for (let i = 0; i < count; i++) {
        const round = Math.floor(i / ranks), rank = i % ranks, late = round < rounds / 2 ? 2e6 : 6e6;
        rows.rank[i] = rank; rows.op[i] = round + 1; rows.size[i] = ranks; rows.nbytes[i] = 4096;
        rows.name[i] = round % 10 ? 1 : 2;
        rows.arrival[i] = round * 1e7 + (rank === 1 ? late : 0);
        rows.ready[i] = rows.started[i] = rank === 1 ? 0 : late;
        rows.finished[i] = rows.started[i] + 1e6;
    }
    store.append(rows);
    store.ranks = [0, 1, 2, 3].map(rank => ({ rank, host: rank < 2 ? 'near' : 'far' }));
    const mark = (kind, rank, begin, end, text, ok) => store.marks.set(store.marks.size, { kind, rank, begin, end, text, ok });
    mark('cell', 0, 0, 499e6, '[7]', true); mark('cell', 1, 0, 499e6, '[7]', true); mark('cell', 0, 501e6, null, '[8]', true);
    mark('left', 3, 700e6, 700e6, 'rank 3 died: SIGKILL', false);
    store.lostBefore = 77;
    store.clockError.set(2, 3e4);
    store.version++;
    window.asked = [];
    const actions = Object.fromEntries(['open', 'save'].map(name => [name, value => asked.push([name, value])]));
    window.view = new Timeline(document.getElementById('at'), store, { view: new Viewport(), fill: true, actions, charts: (...place) => new Charts(...place) });
    view.view.fit();
    view.schedule();
}"""


def answer(route: Route) -> None:
    script = route.request.url.endswith("/timeline.js")
    body = (STATIC / "timeline.js").read_text() if script else PAGE
    route.fulfill(body=body, content_type="text/javascript" if script else "text/html")


@pytest.fixture
def page() -> Iterator[Page]:
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1100, "height": 700})
        errors = page_errors(page)
        page.route(f"{ORIGIN}/**", answer)
        page.goto(f"{ORIGIN}/")
        page.evaluate(SETUP)
        page.wait_for_selector(".hvd-details h4")
        yield page
    assert errors == []


def frames(page: Page) -> None:
    """Wait until the requested frames are drawn."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def canvas_point(page: Page, x: float, y: float) -> tuple[float, float]:
    box = page.locator(".hvd-plot canvas").bounding_box()
    assert box is not None
    return box["x"] + x, box["y"] + y


def hosts(page: Page) -> list[tuple[str, list[int], bool]]:
    found = page.evaluate("view.api.hosts()")
    return [(one["host"], one["ranks"], one["collapsed"]) for one in found]


def details(page: Page) -> str:
    return page.locator(".hvd-details").inner_text()


def test_hosts_collapse_by_pointer_and_keys(page: Page) -> None:
    assert hosts(page) == [("near", [0, 1], False), ("far", [2, 3], False)]
    before = [page.evaluate(f"view.api.where({rank}, 0).y") for rank in range(4)]
    assert before == sorted(before)
    # The heading is just above the first lane of its host.
    page.mouse.click(*canvas_point(page, 40, (before[1] + before[2]) / 2))
    frames(page)
    assert hosts(page) == [("near", [0, 1], False), ("far", [2, 3], True)]
    after = [page.evaluate(f"view.api.where({rank}, 0).y") for rank in range(4)]
    assert after[3] - after[2] < 6 < after[1] - after[0], "a collapsed host's lanes are thin"
    page.keyboard.press("x")
    assert hosts(page)[1] == ("far", [2, 3], False)
    for key in ("ArrowUp", "ArrowUp", "ArrowUp", "x"):
        page.keyboard.press(key)
    assert hosts(page)[0] == ("near", [0, 1], True)
    assert page.locator("[aria-live=polite].hvd-unseen").inner_text() == "host near, ranks 0, 1, collapsed"
    page.keyboard.press("Shift+X")
    assert [collapsed for *_, collapsed in hosts(page)] == [True, True]


def test_the_minimap_moves_and_sizes_what_is_in_view(page: Page) -> None:
    page.evaluate("view.view.show(100e6, 300e6); view.schedule()")
    frames(page)
    box = page.locator(".hvd-minimap canvas").bounding_box()
    assert box is not None
    left, top, gutter, wide = box["x"], box["y"], 132, box["width"] - 133

    def at(time: float) -> tuple[float, float]:
        return left + gutter + wide * time / 0.997e9, top + 15

    page.mouse.move(*at(200e6))
    page.mouse.down()
    page.mouse.move(*at(400e6), steps=4)
    page.mouse.up()
    assert page.evaluate("[view.view.from, view.view.to]") == pytest.approx([300e6, 500e6], abs=4e6)
    page.mouse.move(*at(500e6))
    page.mouse.down()
    page.mouse.move(*at(700e6), steps=4)
    page.mouse.up()
    assert page.evaluate("[view.view.from, view.view.to]") == pytest.approx([300e6, 700e6], abs=4e6)
    page.mouse.click(*at(250e6))
    assert page.evaluate("[view.view.from, view.view.to]") == pytest.approx([50e6, 450e6], abs=4e6)
    # Rank 1 is late all the time, so there is orange over all of it; at the bottom the ranks are in collectives.
    page.evaluate("view.view.fit(); view.schedule()")
    page.wait_for_function(
        """() => {
            const canvas = document.querySelector('.hvd-minimap canvas');
            const { data } = canvas.getContext('2d').getImageData(900, 5, 20, 1);
            const orange = at => data[at] > 200 && data[at + 1] < 200 && data[at + 2] < data[at + 1];
            return Array.from({ length: 20 }, (_, x) => 4 * x).filter(orange).length > 5;
        }"""
    )
    page.locator(".hvd-plot canvas").focus()
    page.keyboard.press("w")
    page.keyboard.press("End")
    # Behind the end of a view that stands still there is room for the marks of the end.
    assert page.evaluate("view.view.from + 0.97 * view.view.length") == pytest.approx(
        page.evaluate("view.store.end")
    )
    page.keyboard.press("Home")
    assert page.evaluate("view.view.from") == 0


def test_the_time_of_a_cell_is_chosen_by_a_click(page: Page) -> None:
    y = page.evaluate("view.scene.top") - 12  # the track of cells is above the first host's heading
    x = page.evaluate("view.api.where(0, 250e6).x")
    page.mouse.move(*canvas_point(page, x, y))
    assert page.locator(".hvd-tip").inner_text() == "cell [7]\nranks 0, 1 · 499 ms"
    page.mouse.click(*canvas_point(page, x, y))
    assert details(page).startswith("Selection: 50 collectives in 499 ms")
    assert "100 ms · last in 50 of 50" in page.locator(".hvd-bars tr").nth(1).inner_text()
    page.mouse.click(*canvas_point(page, page.evaluate("view.api.where(0, 750e6).x"), y))
    assert details(page).startswith("Selection: 50 collectives in")
    # The cell began 1 ms after the first arrival.
    assert "299 ms · last in 50 of 50" in page.locator(".hvd-bars tr").nth(1).inner_text()
    page.keyboard.press("Escape")
    page.wait_for_selector(".hvd-details :text('In view')")


def test_stretches_are_chosen_with_keys_alone(page: Page) -> None:
    page.locator(".hvd-plot canvas").focus()
    page.evaluate("view.view.show(0, 100e6); view.schedule()")
    page.keyboard.press("m")
    assert details(page).startswith("Selection: 10 collectives in 100 ms")
    page.keyboard.press("Shift+D")
    page.keyboard.press("m")
    assert details(page).startswith("Selection: 10 collectives in 100 ms")
    page.keyboard.press("f")
    page.keyboard.press("z")
    assert page.evaluate("view.view.length") == pytest.approx(116e6, rel=0.01)
    page.keyboard.press("Escape")
    page.wait_for_selector(".hvd-details :text('In view')")


def test_a_collective_says_where_it_was_called_and_goes_there(page: Page) -> None:
    point = page.evaluate("view.api.where(1, 62.5e6)")
    page.mouse.move(*canvas_point(page, point["x"], point["y"]))
    assert "rank 1 · allreduce · cell [7] line 4" in page.locator(".hvd-tip").inner_text()
    page.mouse.click(*canvas_point(page, point["x"], point["y"]))
    text = details(page)
    assert "called at\ncell [7] line 4" in text
    assert "rank 1, by 2.00 ms ± 30.0 µs" in text
    assert "rank 2 first ± 30.0 µs" in " ".join(text.split())
    page.keyboard.press("o")
    page.locator(".hvd-details .hvd-link").first.click()
    assert page.evaluate("asked") == [["open", "cell [7] line 4"]] * 2


def test_what_a_place_can_do_is_in_a_menu(page: Page) -> None:
    page.get_by_role("button", name="Save or open elsewhere").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert page.evaluate("asked") == [["save", None]]
    # The page that opens it is a link: Enter follows it, and so does Space, as in any menu.
    page.context.route("https://ui.perfetto.dev/", lambda route: route.fulfill(body="Perfetto"))
    for key in ("Enter", "Space"):
        page.keyboard.press("Enter")
        page.keyboard.press("ArrowDown")
        with page.context.expect_page() as opened:
            page.keyboard.press(key)
        assert opened.value.url == "https://ui.perfetto.dev/"
        assert opened.value.evaluate("window.opener") is None
        opened.value.close()
        assert page.locator(".hvd-menu").is_hidden()
        assert page.evaluate("document.activeElement.title") == "Save or open elsewhere"
    assert page.evaluate("asked") == [["save", None]]
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert page.locator(".hvd-menu").is_hidden()


def test_what_is_not_known_is_said(page: Page) -> None:
    """Dropped rows, the clocks, and a rank that died while the view is open."""
    status = page.locator(".hvd-bar .hvd-status").inner_text()
    assert status == "ranks 0\N{EN DASH}3 · 400 spans · 77 oldest dropped · clocks ± 30.0 µs"
    page.wait_for_timeout(350)  # the texts are brought up to date every 300 ms
    page.evaluate(
        """() => {
            view.store.marks.set(99, { kind: 'joined', rank: 3, begin: 900e6, end: 900e6, text: 'rank 3 joined', ok: true });
            view.store.version++;
            view.data();
        }"""
    )
    page.wait_for_function("document.querySelector('.hvd-unseen').textContent === 'rank 3 joined'")
    page.keyboard.press("Tab")
    page.locator(".hvd-plot canvas").focus()
    page.keyboard.press("?")
    help_box = page.get_by_role("note", name="Keys")
    assert "choose a stretch; choose what is in view" in help_box.inner_text()
    page.keyboard.press("Escape")
    assert help_box.is_hidden()


def test_charts_are_on_the_same_time_axis(page: Page) -> None:
    button = page.get_by_role("button", name="Charts under the lanes (G)")
    charts = page.locator(".hvd-charts")
    assert charts.is_hidden()
    page.evaluate(
        """() => {
            const count = 100;
            const points = { count, step: new Float64Array(count).fill(NaN), series: new Uint32Array(count) };
            for (const name of ['time', 'value']) points[name] = Float64Array.from({ length: count }, (_, k) => 1e7 * k);
            points.number = Uint32Array.from({ length: count }, (_, k) => k);
            view.store.series.define(0, [{ rank: 0, name: 'loss', unit: '' }]);
            view.store.series.append(points, 0, count);
            view.store.version++;
            view.data();
        }"""
    )
    plot = page.locator(".hvd-chart-plot .u-over").first
    plot.wait_for()
    frames(page)
    over, box = plot.bounding_box(), page.locator(".hvd-plot canvas").bounding_box()
    assert over is not None
    assert box is not None
    lanes = page.evaluate("[view.scene.gutter, view.scene.width]")
    assert [over["x"], over["x"] + over["width"]] == pytest.approx([box["x"] + one for one in lanes], abs=1)
    # Both show the same range.
    before = page.evaluate("view.view.length")
    page.locator(".hvd-charts-view").focus()
    page.keyboard.press("+")
    assert page.evaluate("view.view.length") < before
    button.click()
    frames(page)
    assert charts.is_hidden()
    assert button.get_attribute("aria-pressed") == "false"
    page.locator(".hvd-plot canvas").focus()
    page.keyboard.press("g")
    frames(page)
    assert charts.is_visible()


def test_a_chart_that_waits_for_its_turn_knows_ranks_that_came_meanwhile(page: Page) -> None:
    give = """rank => {
        const { series } = view.store;
        series.define(series.all.length, [{ rank, name: 'loss', unit: '' }]);
        const [time, value] = [0, 1].map(() => Float64Array.from([1e8, 2e8, 3e8]));
        const of = new Uint32Array(3).fill(series.all.length - 1);
        series.append({ count: 3, time, value, step: new Float64Array(3).fill(NaN), series: of, number: Uint32Array.of(0, 1, 2) }, series.next, series.next + 3);
    }"""
    page.evaluate(f"() => {{ ({give})(0); view.store.version++; view.data(); }}")
    page.locator(".hvd-chart-plot .u-over").first.wait_for()
    frames(page)
    # The frame in which charts are drawn whose turn it is comes before the one that was asked for when the rank came.
    page.evaluate(
        f"() => {{ ({give})(1); for (const one of view.charts.all.values()) one.move(); view.charts.some(); }}"
    )
    assert page.evaluate("view.charts.api.charts().map(one => one.ranks)") == [[0, 1]]
    frames(page)
    assert page.locator(".hvd-charts .hvd-chip").all_inner_texts() == ["rank 0", "rank 1"]


def test_a_chart_with_many_points_is_drawn_and_moves_along_until_its_turn(page: Page) -> None:
    page.evaluate(
        """() => {
            const count = 5000;
            const points = { count, step: new Float64Array(count).fill(NaN), series: new Uint32Array(count) };
            points.time = Float64Array.from({ length: count }, (_, k) => 2e5 * k);
            points.value = Float64Array.from({ length: count }, (_, k) => (k % 2 ? 0.5 : 0) + (k < count / 2 ? 0 : 10));
            points.number = Uint32Array.from({ length: count }, (_, k) => k);
            view.store.series.define(0, [{ rank: 0, name: 'loss', unit: '' }]);
            view.store.series.append(points, 0, count);
            view.store.version++;
            view.view.follow(false);
            view.view.show(0, 1e9);
            view.data();
        }"""
    )
    page.locator(".hvd-chart-plot .u-over").first.wait_for()
    ink = """() => {
        const canvas = document.querySelector('.hvd-chart-plot canvas');
        const { data, width, height } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        const part = (x0, x1, y0, y1) => {
            let [seen, all] = [0, 0];
            for (let y = Math.floor(y0 * height); y < y1 * height; y++)
                for (let x = Math.floor(x0 * width); x < x1 * width; x++, all++) {
                    const at = 4 * (y * width + x);
                    if (data[at + 3] > 200 && data[at + 2] - data[at] > 60) seen++;
                }
            return seen / all;
        };
        return [part(0.1, 0.4, 0.5, 1), part(0.1, 0.4, 0, 0.5), part(0.6, 0.9, 0, 0.5), part(0.6, 0.9, 0.5, 1)];
    }"""
    page.wait_for_function(f"({ink})()[0] > 0.02")
    low, above, high, below = page.evaluate(ink)
    assert low > 0.02
    assert high > 0.02
    assert above == below == 0, "the line is low in the first half and high in the second"
    canvas = page.locator(".hvd-chart-plot canvas").first
    assert canvas.evaluate("one => one.style.transform") == ""
    page.evaluate("view.charts.pace.ready = () => false; view.view.show(1e8, 1.1e9); view.schedule()")
    page.wait_for_function("document.querySelector('.hvd-chart-plot canvas').style.transform")
    moved = canvas.evaluate("one => new DOMMatrix(getComputedStyle(one).transform).e / one.clientWidth")
    assert moved == pytest.approx(-0.1, abs=0.002), "a tenth to the left, as its times are"
    page.evaluate("view.charts.pace.ready = () => true; view.schedule()")
    page.wait_for_function("!document.querySelector('.hvd-chart-plot canvas').style.transform")
    assert page.evaluate(ink)[3] == 0


def test_a_cleared_recording_empties_the_picture(page: Page) -> None:
    ink = """() => {
        const count = canvas => {
            const { data } = canvas.getContext('2d').getImageData(200, 0, canvas.width - 200, canvas.height);
            return new Set(new Uint32Array(data.buffer)).size;
        };
        return [...document.querySelectorAll('.hvd-timeline canvas')].map(count);
    }"""
    page.keyboard.press("m")
    before = page.evaluate(ink)
    page.evaluate("() => { view.store.clear(); view.data(); }")
    page.wait_for_function("document.querySelector('.hvd-details').childElementCount === 0")
    frames(page)
    assert page.evaluate("view.api.summary().spans") == 0
    assert page.evaluate("view.api.lateness('loss')") == []
    assert all(now < was for now, was in zip(page.evaluate(ink), before, strict=True)), (
        "something is drawn still"
    )
    assert "77 oldest dropped" in page.locator(".hvd-status").inner_text()
    assert hosts(page) == [("near", [0, 1], False), ("far", [2, 3], False)]
