"""The views in Notebook 7, in a real browser."""

from __future__ import annotations

import json
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytest.importorskip("notebook")
pytest.importorskip("anywidget")
pytest.importorskip("playwright.sync_api")

from support.jupyter.chromium import CHROMIUM
from support.jupyter.lab_page import lab_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
]

WAIT_MS = 180_000  # limit of each wait for the page, in ms
INIT, VIEW, RANKS, TRAIN = range(4)

CELLS = [
    "import hvdlab\n%load_ext hvdlab\n%hvd_run -np 2 import os, time, numpy as np, hvdlab.numpy as hvd; hvd.init()",
    "hvdlab.timeline()",
    "hvdlab.ranks()",
    """\
%%hvd_run
stop = False
while not stop:
    time.sleep(0.02)
    stop = bool(hvd.allreduce(np.array(float(os.path.exists('seen'))), name='stop'))
""",
]


def test_timeline_ranks_and_strip(tmp_path: Path) -> None:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook: nbformat.NotebookNode = new_notebook(
        cells=[new_code_cell(source) for source in CELLS], metadata={"kernelspec": kernel}
    )
    with lab_page(tmp_path, notebook, height=1500, classic=True) as lab:
        page = lab.page
        for cell in (INIT, VIEW, RANKS):
            lab.finish(cell)
        lab.run(TRAIN)
        page.wait_for_selector(".hvd-strip .hvd-strip-rank", timeout=WAIT_MS)
        page.wait_for_function(
            "document.querySelector('.hvd-timeline')?.hvdlab.summary().spans > 100", timeout=WAIT_MS
        )
        lab.wait_for_text(RANKS, "2/2 ranks · running [4]")
        assert "*" in lab.prompt(TRAIN)
        (tmp_path / "work" / "seen").touch()
        lab.wait_until_ended(TRAIN)
        lab.wait_for_text(TRAIN, "2 ranks · ")
        assert page.locator(".hvd-strip").count() == 0

        # The still picture, which is hidden now, is made when nothing has come for a while.
        page.wait_for_selector("[class*=hvdlab-timeline-] img", state="attached", timeout=WAIT_MS)
        page.locator(".jp-Notebook-cell").nth(TRAIN).locator(".cm-content").click()
        page.keyboard.press("Control+s")
        path, deadline = tmp_path / "work" / "notebook.ipynb", time.monotonic() + WAIT_MS / 1000
        while not (outputs := lab.saved_outputs(path, VIEW)):
            assert time.monotonic() < deadline, "the notebook was not saved"
            page.wait_for_timeout(100)
        assert "data:image/png;base64," in outputs[0]["data"]["text/html"]
        assert len(json.dumps(outputs)) < 100_000
