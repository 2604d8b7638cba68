"""JupyterLab's own debugger in ranks, in a real browser: its user's clicks, and their effects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytest.importorskip("jupyterlab")
pytest.importorskip("playwright.sync_api")
pytest.importorskip("debugpy")

from playwright.sync_api import Locator, Page

from support.jupyter.chromium import CHROMIUM
from support.jupyter.lab_page import LabPage, lab_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
]

WAIT_MS = 180_000  # limit of each wait for the page, in ms
LOAD, START, CELL = range(3)
CELLS = [
    "%load_ext hvdlab",
    "%%hvd_run -np 2\nimport os\nrank = int(os.environ['RANK'])",
    "%%hvd_run\ndef double(n):\n    y = n * 2\n    return y\nz = double(rank + 1)\nprint(z)",
]
ONE_RANK = '[data-command="hvdlab:debug-one-rank"]'
FRAMES = ".jp-DebuggerCallstack-body li"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[LabPage]:
    notebook = new_notebook(
        cells=[new_code_cell(source) for source in CELLS],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    with lab_page(tmp_path, notebook, many=True, width=1400) as page:
        yield page


def printed(lab: LabPage) -> list[str]:
    """Return the lines under the cell, except pydevd's about a thread that begins just as it lists all of them."""
    return [line for line in lab.output(CELL).split("\n") if "thread._ident is None" not in line]


def wait_for_frames(lab: LabPage, *frames: str) -> None:
    """Wait until these are listed, in any order of ranks."""
    lab.page.wait_for_function(
        """([selector, frames]) => {
            const shown = [...document.querySelectorAll(selector)].map(node => node.innerText.replace(/\\s+/g, " "));
            return JSON.stringify(shown.sort()) === JSON.stringify([...frames].sort());
        }""",
        arg=[FRAMES, list(frames)],
        timeout=WAIT_MS,
    )


def wait_for_variable(lab: LabPage, name: str, value: str) -> None:
    lab.page.wait_for_function(
        r"""([name, value]) => (document.querySelector(".jp-DebuggerVariables")?.innerText ?? "")
            .split(/[\s:]+/).join(" ").includes(`${name} ${value}`)""",
        arg=[name, value],
        timeout=WAIT_MS,
    )


def test_a_click_in_the_gutter_stops_ranks_and_the_buttons_move_them(lab: LabPage) -> None:
    lab.finish(LOAD)
    lab.finish(START)
    page = lab.page
    page.locator(".jp-DebuggerBugButton").first.click()
    page.wait_for_selector(".jp-DebuggerBugButton[aria-pressed=true]", timeout=WAIT_MS)
    gutter = page.locator(".jp-Notebook-cell").nth(CELL).locator(".cm-breakpoint-gutter .cm-gutterElement")
    gutter.nth(4).click()  # the first element is a hidden one that gives the width
    page.wait_for_selector(".jp-DebuggerBreakpoints-body >> text=4", timeout=WAIT_MS)

    lab.run(CELL)
    at = {rank: (f"rank {rank}: double Cell [*]:4", f"rank {rank}: <module> Cell [*]:5") for rank in (0, 1)}
    wait_for_frames(lab, *at[0], *at[1])
    for rank in (0, 1):
        page.locator(FRAMES, has_text=f"rank {rank}: double").click()
        wait_for_variable(lab, "n", str(rank + 1))
        wait_for_variable(lab, "y", str(2 * rank + 2))
    page.wait_for_selector("text=ranks 0, 1 are stopped by the debugger", timeout=WAIT_MS)

    page.locator('[data-command="debugger:next"]').first.click()
    wait_for_frames(lab, *(f"rank {rank}: <module> Cell [*]:6" for rank in (0, 1)))
    wait_for_variable(lab, "z", "4")  # rank 1, which was looked at last, is still shown
    page.locator('[data-command="debugger:continue"]').first.click()
    lab.wait_until_ended(CELL)
    assert printed(lab)[:2] == ["[0] 2", "[1] 4"]

    # Switched off while ranks have stopped: they go on.
    lab.run(CELL)
    page.wait_for_selector(FRAMES, timeout=WAIT_MS)
    page.locator(".jp-DebuggerBugButton").first.click()
    lab.wait_until_ended(CELL)
    assert printed(lab)[:2] == ["[0] 2", "[1] 4"]


def press_by_keyboard(page: Page, button: Locator) -> None:
    """Press the focused button by Enter, and see to it that the button got the key.

    JupyterLab focuses the cell that has stopped as soon as it has found its source, a second or more after it shows the frames.
    """
    button.evaluate("button => button.addEventListener('keydown', () => { window.gotKey = true; })")
    for _ in range(20):
        button.press("Enter")
        if page.evaluate("window.gotKey === true"):
            return
    raise AssertionError("the focus is taken from the button each time")


def test_a_button_lets_the_others_stay_while_one_rank_steps(lab: LabPage) -> None:
    lab.finish(LOAD)
    lab.finish(START)
    page = lab.page
    button = page.locator(ONE_RANK).first
    page.locator(".jp-DebuggerBugButton").first.click()
    page.wait_for_selector(".jp-DebuggerBugButton[aria-pressed=true]", timeout=WAIT_MS)
    gutter = page.locator(".jp-Notebook-cell").nth(CELL).locator(".cm-breakpoint-gutter .cm-gutterElement")
    gutter.nth(5).click()
    page.wait_for_selector(".jp-DebuggerBreakpoints-body >> text=5", timeout=WAIT_MS)
    assert not button.is_visible()  # no rank has stopped

    lab.run(CELL)
    wait_for_frames(lab, *(f"rank {rank}: <module> Cell [*]:5" for rank in (0, 1)))
    page.locator(FRAMES, has_text="rank 1").click()
    page.wait_for_selector(f"{ONE_RANK}[aria-pressed=false] >> text=Rank 1 Only", timeout=WAIT_MS)
    press_by_keyboard(page, button)
    page.wait_for_selector(f"{ONE_RANK}[aria-pressed=true] >> text=Rank 1 Only", timeout=WAIT_MS)

    page.locator('[data-command="debugger:next"]').first.click()
    wait_for_frames(lab, "rank 1: <module> Cell [*]:6", "rank 0: <module> Cell [*]:5")
    wait_for_variable(lab, "z", "4")

    button.click()
    page.wait_for_selector(f"{ONE_RANK}[aria-pressed=false]", timeout=WAIT_MS)
    page.locator('[data-command="debugger:continue"]').first.click()
    lab.wait_until_ended(CELL)
    assert printed(lab)[:2] == ["[0] 2", "[1] 4"]
    page.wait_for_selector(ONE_RANK, state="hidden", timeout=WAIT_MS)
