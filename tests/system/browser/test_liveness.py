"""Views mark outdated contents: the kernel has ended or is silent, or the page was opened again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytest.importorskip("jupyterlab")
pytest.importorskip("anywidget")
pytest.importorskip("playwright.sync_api")

from playwright.sync_api import TimeoutError as NotInTime

from support.jupyter.chromium import CHROMIUM
from support.jupyter.lab_page import LabPage, lab_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
]

WAIT_MS = 180_000  # limit of each wait for the page, in ms
LOAD, INIT, TIMELINE, RANKS, TRAIN, NEXT = range(6)

CELLS = [
    "%load_ext hvdlab\nimport hvdlab, os\nos.getpid()",
    "%%hvd_run -np 2\nimport os, time, numpy as np, hvdlab.numpy as hvd\nhvd.init()",
    "hvdlab.timeline()",
    "hvdlab.ranks()",
    """\
%%hvd_run
print('begins')
while True:
    time.sleep(0.05)
    if hvd.allreduce(np.array(float(os.path.exists('end'))), name='stop'): break
print('ends')
""",
    "%%hvd_run\nwhile not os.path.exists('next'): time.sleep(0.01)",
]

STRIP, STATE, HEADING = ".hvd-strip", ".hvd-timeline .hvd-bar .hvd-state", ".hvd-ranks .hvd-status"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[LabPage]:
    notebook = new_notebook(
        cells=[new_code_cell(source) for source in CELLS],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    with lab_page(tmp_path, notebook, height=1500) as page:
        yield page


def train(lab: LabPage) -> int:
    """Run all cells; return the kernel's process when the last one trains and all views are live."""
    process = int(lab.finish(LOAD).splitlines()[-1])
    for cell in (INIT, TIMELINE, RANKS):
        lab.finish(cell)
    lab.run(TRAIN)
    wait(lab, STRIP, "collectives/s")
    wait(lab, STATE, "live")
    wait(lab, HEADING, "running [5]")
    # Each view has news of its own, and knows by these that more must come.
    lab.page.wait_for_function(
        "document.querySelector('.hvd-timeline').hvdlab.store.ranks.some(row => row.state === 'running')",
        timeout=WAIT_MS,
    )
    return process


def wait(lab: LabPage, selector: str, text: str) -> None:
    lab.page.wait_for_function(
        "([selector, text]) => document.querySelector(selector)?.innerText.includes(text)",
        arg=[selector, text],
        timeout=WAIT_MS,
    )


def wait_for_end(lab: LabPage, selector: str, text: str) -> None:
    """Wait until a view shows that it has ended, or has made way for its still picture.

    A kernel that ends may close its widgets' comms as the last thing that it does, if it gets to that before the page has let go of it:
    JupyterLab then takes the widget away.
    """
    try:
        lab.page.wait_for_function(
            """([selector, text]) => {
                const view = document.querySelector(selector);
                const stills = [...document.querySelectorAll(".hvd-still")].filter(one => one.offsetParent);
                return view ? view.innerText.includes(text) : stills.length > 0;
            }""",
            arg=[selector, text],
            timeout=WAIT_MS,
        )
    except NotInTime:
        views = lab.page.evaluate(
            """() => [".hvd-strip", ".hvd-timeline", ".hvd-ranks", ".hvd-still", ".jp-Notebook-ExecutionIndicator"].map(
                selector => [selector, [...document.querySelectorAll(selector)].map(view =>
                    [view.isConnected, Boolean(view.offsetParent), view.innerText || view.dataset.status])])"""
        )
        pytest.fail(f"{selector} does not say {text!r}; the page shows {views}")


def check_still(lab: LabPage, selector: str) -> None:
    """Nothing counts on: the clock of a view that is live changes each second."""
    before = lab.page.locator(selector).inner_text()
    lab.page.wait_for_timeout(2500)
    assert lab.page.locator(selector).inner_text() == before


def colour(lab: LabPage, selector: str) -> Any:
    """Return the colour of the dot before a text."""
    script = "selector => getComputedStyle(document.querySelector(selector), '::before').backgroundColor"
    return lab.page.evaluate(script, selector)


def picture(lab: LabPage, name: str) -> None:
    if directory := os.environ.get("HVDLAB_TEST_PICTURES"):
        lab.page.screenshot(path=Path(directory) / f"{name}.png")


def test_when_the_kernel_is_restarted_or_silent_no_view_says_that_it_is_live(lab: LabPage) -> None:
    process = train(lab)
    live = colour(lab, ".hvd-strip-heading")
    os.kill(process, signal.SIGSTOP)
    try:
        wait(lab, STRIP, "no news since 0:")
        wait(lab, STATE, "no news since ")
        wait(lab, HEADING, "no news since ")
        assert colour(lab, ".hvd-strip-heading") != live
        assert "running" not in lab.page.locator(STRIP).inner_text()
        check_still(lab, STRIP)
        picture(lab, "silent")
    finally:
        os.kill(process, signal.SIGCONT)
    wait(lab, STRIP, "running [5]")
    wait(lab, STATE, "live")
    assert colour(lab, ".hvd-strip-heading") == live

    lab.page.evaluate(
        """() => [...window.jupyterapp.shell.widgets("main")]
            .find(widget => widget.sessionContext?.session?.kernel).sessionContext.session.kernel.restart()"""
    )
    wait_for_end(lab, STRIP, "ended · last news at 0:")
    wait_for_end(lab, STATE, "ended · as of ")
    wait_for_end(lab, HEADING, "ended · as of ")
    lab.wait_until_idle()  # of the new kernel, which brings none of them to life
    shown = [selector for selector in (STRIP, STATE, HEADING) if lab.page.locator(selector).count()]
    for selector in shown:
        check_still(lab, selector)
        text = lab.page.locator(selector).inner_text()
        assert "ended" in text
        assert "running" not in text
    if STRIP in shown:
        assert colour(lab, ".hvd-strip-heading") != live
    picture(lab, "restarted")


def test_a_page_that_is_opened_again_shows_that_the_cell_has_ended_and_saves_new_pictures(
    lab: LabPage, tmp_path: Path
) -> None:
    train(lab)
    save(lab)
    lab.leave()
    lab.come_back()
    (tmp_path / "work" / "end").touch()
    lab.wait_until_idle()
    wait(lab, STRIP, "ended after ")
    wait(lab, STRIP, "%hvd_output 5 shows all that it wrote".replace("%hvd_output 5", "`%hvd_output 5`"))
    check_still(lab, STRIP)
    picture(lab, "reopened")
    path = tmp_path / "work" / "notebook.ipynb"
    for cell, text in ((TIMELINE, "2 ranks, "), (RANKS, "2/2 ranks · idle")):
        deadline = time.monotonic() + WAIT_MS / 1000
        while not (stills := still(lab, path, cell)) or text not in stills:
            assert time.monotonic() < deadline, f"what was saved is still {stills}"
            save(lab)
            lab.page.wait_for_timeout(500)

    # The next strip takes the model of this one away, and then no kernel has any: nothing complains, and the sentence is there.
    lab.run(NEXT)
    lab.page.wait_for_function(
        "([cell, strip]) => !document.querySelectorAll('.jp-Notebook-cell')[cell].querySelector(strip)",
        arg=[TRAIN, STRIP],
        timeout=WAIT_MS,
    )
    assert "`%hvd_output 5` shows all that it wrote" in lab.output(TRAIN)
    (tmp_path / "work" / "next").touch()
    lab.wait_until_ended(NEXT)
    save(lab)
    lab.page.evaluate(
        """() => [...window.jupyterapp.shell.widgets("main")]
            .find(widget => widget.sessionContext?.session?.kernel).sessionContext.shutdown()"""
    )
    lab.leave()
    lab.come_back()
    lab.page.wait_for_function(
        """() => [...document.querySelectorAll(".jp-OutputArea-output.jupyter-widgets")]
            .filter(node => node.textContent.includes("model not found")).length === 3""",
        timeout=WAIT_MS,
    )
    for cell in (TIMELINE, RANKS, TRAIN):
        assert "not found" not in lab.output(cell)
    assert "`%hvd_output 5` shows all that it wrote" in lab.output(TRAIN)
    assert "2/2 ranks" in lab.output(RANKS)
    picture(lab, "later")


def save(lab: LabPage) -> None:
    lab.page.evaluate(
        """() => [...window.jupyterapp.shell.widgets("main")]
            .find(widget => widget.context?.save).context.save()"""
    )


def still(lab: LabPage, path: Path, cell: int) -> str:
    """Return the text of the picture that is saved with a view; empty if there is none."""
    texts = [one["data"]["text/plain"] for one in lab.saved_outputs(path, cell) if "data" in one]
    return next((text for text in texts if text), "")
