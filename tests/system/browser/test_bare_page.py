"""The widgets' scripts in a page that is no Jupyter at all, imported as VS Code's and others' widget managers do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api")

from playwright.sync_api import Page

from support.jupyter.chromium import CHROMIUM, chromium

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
]

STATIC = Path(__file__).parents[3] / "widgets" / "static"
SHARES = {"known": True, "compute": 0.5, "wait": 0.25, "work": 0.25, "slowest": False}
TRAITS: dict[str, dict[str, Any]] = {
    "timeline": {"limit": 1000, "height": 300, "still": "none"},
    "metrics": {"limit": 1000, "height": 200, "still": "none"},
    "ranks": {"rows": [], "heading": "0/0 ranks · idle", "still": "none"},
    "strip": {
        "pace": {
            "ranks": [{"rank": rank, **SHARES, "paused": "at a prompt" * (rank == 4)} for rank in range(40)],
            "heading": "40 ranks · running [7]",
            "rate": "12.5 steps/s",
            "note": "others wait for rank 2 (31 %)",
            "paused": "rank 4 is at a prompt",
            "stalled": "",
            "elapsed": 3671.0,
            "silent": 0.0,
        },
        "opened": 0,
    },
}

# VS Code gives a page its colours under names of its own.
PAGE = """<body style="background:#1f1f1f; --vscode-editor-foreground:#ccc; --vscode-editor-background:#1f1f1f"><div id="at"></div></body>"""

RENDER = """async ([source, traits]) => {
    const url = URL.createObjectURL(new Blob([source], { type: 'text/javascript' }));
    const { default: widget } = await import(url);
    window.sent = [];
    const heard = window.heard = {};
    const on = (event, act) => { heard[event] = act; };
    const model = { get: name => traits[name], on, off() {}, send: content => window.sent.push(content) };
    widget.initialize?.({ model });
    window.end = await widget.render({ model, el: document.getElementById('at') });
    // The kernel says that there is nothing yet: until it says anything, a still picture would stay in the view's place.
    const empty = window.empty = { after: 0, from: 0, count: 0, namesFrom: 0, names: [], sites: [], marks: [], lost: 0, clockErrors: [],
        seriesFrom: 0, series: [], points: 0, pointsFrom: 0, pointsTo: 0, pointsLost: 0 };
    const none = () => new DataView(new ArrayBuffer(0));
    heard['msg:custom']?.({ type: 'rows', ...empty }, [none(), none()]);
}"""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as browser:
        yield browser.new_page()


@pytest.mark.parametrize("name", TRAITS)
def test_a_widget_needs_nothing_of_jupyter(page: Page, name: str) -> None:
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto("about:blank")
    page.set_content(PAGE)
    source = (STATIC / f"{name}.js").read_text()
    assert not re.search(r"\b(import|require)\s*\(?['\"]", source), "it must bring all that it needs"
    page.evaluate(RENDER, [source, TRAITS[name]])
    root = page.wait_for_selector(f".hvd-{name}[data-theme=dark]")
    assert root is not None
    page.evaluate("window.end()")
    assert page.locator("#at").inner_html() == ""
    assert problems == []


def test_the_strip_is_a_button_for_keys_too(page: Page) -> None:
    page.goto("about:blank")
    page.set_content(PAGE)
    page.evaluate(RENDER, [(STATIC / "strip.js").read_text(), TRAITS["strip"]])
    strip = page.locator(".hvd-strip")
    assert "1:01:1" in strip.inner_text()
    assert "12.5 steps/s" in str(strip.get_attribute("aria-label"))
    assert strip.locator(".hvd-strip-rank").nth(3).get_attribute("aria-label") == (
        "rank 3: computes 50 %, in collectives 25 %, waits 25 %"
    )
    assert strip.locator(".hvd-strip-rank").nth(4).get_attribute("aria-label") == "rank 4: at a prompt"
    assert strip.get_attribute("data-state") == "paused"
    assert strip.locator(".hvd-strip-note").inner_text() == "rank 4 is at a prompt"
    strip.focus()
    page.keyboard.press("Enter")
    page.keyboard.press(" ")
    strip.click()
    assert page.evaluate("window.sent") == [{"type": "open"}], "it is asked for once"


POINTS = """() => {
    const columns = new DataView(new ArrayBuffer(2 * 32));
    [0, 8].forEach(at => columns.setFloat64(at, 1e9 + at * 1e8, true));
    columns.setUint32(60, 1, true);
    const none = new DataView(new ArrayBuffer(0));
    window.heard['msg:custom']({ ...window.empty, type: 'rows', series: [{ rank: 0, name: 'loss', unit: '' }], points: 2, pointsTo: 2 }, [none, columns]);
}"""

# As JupyterLab does: all is hidden when the theme's name is there, and shown again before the next frame is drawn.
CHANGE_THEME = """() => {
    const at = document.getElementById('at');
    document.body.style.background = '#fff';
    at.style.display = 'none';
    Promise.resolve().then(() => requestAnimationFrame(() => { at.style.display = ''; }));
}"""
COLOUR = "() => getComputedStyle(document.querySelector('.hvd-chip .hvd-line')).borderTopColor"


def test_charts_change_with_the_theme_while_nothing_comes(page: Page) -> None:
    page.goto("about:blank")
    page.set_content(PAGE)
    page.evaluate(RENDER, [(STATIC / "metrics.js").read_text(), TRAITS["metrics"]])
    page.evaluate(POINTS)
    page.wait_for_selector(".hvd-chip .hvd-line", state="attached")
    dark = page.evaluate(COLOUR)
    page.evaluate(CHANGE_THEME)
    page.wait_for_function(f"dark => ({COLOUR})() !== dark", arg=dark, timeout=20_000)
