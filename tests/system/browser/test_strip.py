"""The strip under a running cell, in JupyterLab in a real browser."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytest.importorskip("jupyterlab")
pytest.importorskip("anywidget")
pytest.importorskip("playwright.sync_api")

from support.jupyter.chromium import CHROMIUM
from support.jupyter.lab_page import LabPage, lab_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
]

WAIT_MS = 180_000  # limit of each wait for the page, in ms
LOAD, INIT, TRAIN, NEXT = range(4)

TRAINING = """\
%%hvd_run
print('begins')
while not os.path.exists('seen'):
    time.sleep(0.08 if hvd.rank() == 2 else 0.01)
    hvd.allreduce(np.ones(1000, np.float32), name='loss')
    stop = hvd.allreduce(np.array(float(os.path.exists('seen'))), name='stop')
    if stop: break
print('ends')
"""

CELLS = [
    "%load_ext hvdlab",
    "%%hvd_run -np 3\nimport os, time, numpy as np, hvdlab.numpy as hvd\nhvd.init()",
    TRAINING.replace("while not os.path.exists('seen')", "while True"),
    "%%hvd_run\nhvd.rank()",
]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[LabPage]:
    notebook = new_notebook(
        cells=[new_code_cell(source) for source in CELLS],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    with lab_page(tmp_path, notebook, height=1100) as page:
        yield page


def test_a_running_cell_has_a_strip_that_opens_the_timeline(lab: LabPage, tmp_path: Path) -> None:
    page = lab.page
    for cell in (LOAD, INIT):
        lab.finish(cell)
    lab.run(TRAIN)
    # On a busy machine any rank may be the slowest for a moment.
    page.wait_for_function(
        "document.querySelector('.hvd-strip .hvd-strip-slowest .hvd-strip-number')?.innerText.startsWith('2')",
        timeout=WAIT_MS,
    )
    strip = page.locator(".hvd-strip")
    assert strip.locator(".hvd-strip-rank").count() == 3
    assert "3 ranks · running [3]" in strip.inner_text()
    page.wait_for_function(
        "document.querySelector('.hvd-strip-rate').textContent.endsWith('collectives/s')", timeout=WAIT_MS
    )
    # Waiting ranks are shown as waiting: the bars of ranks 0 and 1 are mostly waiting, that of rank 2 is computing.
    page.wait_for_function(
        """() => {
            const bars = [...document.querySelectorAll('.hvd-strip-wait')];
            const waits = bars.map(e => e.getBoundingClientRect().width / e.parentElement.getBoundingClientRect().width);
            return waits[0] > 0.5 && waits[1] > 0.5 && waits[2] < 0.3;
        }""",
        timeout=WAIT_MS,
    )
    # The kernel is busy; still the click has its effect, and the opened view shows the present.
    strip.click()
    page.wait_for_selector(".hvd-timeline canvas", timeout=WAIT_MS)
    seen = page.evaluate("document.querySelector('.hvd-timeline').hvdlab.summary().spans")
    page.wait_for_function(
        f"document.querySelector('.hvd-timeline').hvdlab.summary().spans > {seen} + 60", timeout=WAIT_MS
    )
    assert "*" in lab.prompt(TRAIN)
    assert page.locator(".hvd-strip").bounding_box()["y"] > page.locator(".hvd-timeline").bounding_box()["y"]  # type: ignore[index]  # it is visible

    (tmp_path / "work" / "seen").touch()
    lab.wait_until_ended(TRAIN)
    page.wait_for_selector(".hvd-strip", state="detached")
    lab.wait_for_text(TRAIN, "others waited")
    text = lab.output(TRAIN)
    assert text.index("begins") < text.index("ends") < text.index("3 ranks · ")
    assert "for rank 2" in text
    lab.finish(NEXT)
    assert "3 ranks ·" not in lab.output(NEXT), "a quick cell has no strip"
    check_saved(lab, tmp_path / "work" / "notebook.ipynb")


def check_saved(lab: LabPage, path: Path) -> None:
    lab.page.locator(".jp-Notebook-cell").nth(NEXT).locator(".cm-content").click()
    lab.page.keyboard.press("Control+s")
    deadline = time.monotonic() + WAIT_MS / 1000
    while not (outputs := lab.saved_outputs(path, TRAIN)):
        assert time.monotonic() < deadline, "the notebook was not saved"
        lab.page.wait_for_timeout(100)
    assert not [one for one in outputs if "hvd-strip" in json.dumps(one)]
    summary = outputs[-1]["data"]
    assert summary["text/plain"].startswith("3 ranks · ")
    assert len(json.dumps(summary)) < 1000
    assert len(json.dumps(outputs)) < 100_000
