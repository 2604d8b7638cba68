"""A closed laptop: the page can't reach the server for a while and a cell goes on; then everything is as if nothing had been."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytest.importorskip("jupyterlab")
pytest.importorskip("playwright.sync_api")

from support.jupyter.chromium import CHROMIUM
from support.jupyter.lab_page import LabPage, lab_page
from support.network.cut_wire import CutWire

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
]

WAIT_MS = 180_000  # limit of each wait for the page, in ms
INIT, VIEW, TRAIN, COUNT, CLEAR = range(5)

CELLS = [
    "import hvdlab\n%load_ext hvdlab\n%hvd_run -np 2 import os, time, numpy as np, hvdlab.numpy as hvd; hvd.init()",
    "view = hvdlab.timeline(); view",
    """\
%%hvd_run
stop = False
while not stop:
    time.sleep(0.03)
    stop = bool(hvd.allreduce(np.array(float(os.path.exists('end'))), name='step'))
    if hvd.rank() == 0:
        with open('steps', 'a') as file: file.write('.')
""",
    "print('rows', view.recording.count)",
    "%hvd_timeline clear",
]
PANEL, WIDGET = ".jp-HvdlabPanel .hvd-timeline", ".jp-OutputArea .hvd-timeline"


def test_panel_and_widget_catch_up(tmp_path: Path) -> None:
    notebook = new_notebook(
        cells=[new_code_cell(source) for source in CELLS],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    wire, work = CutWire(), tmp_path / "work"
    with lab_page(tmp_path, notebook, width=1280, height=1100, many=True, wire=wire) as lab:
        for cell in (INIT, VIEW):
            lab.finish(cell)
        # Where the wire is cut for longer JupyterLab shows a box about it, over the whole page.
        lab.page.add_locator_handler(
            lab.page.locator(".jp-Dialog", has_text="Server Connection Error"),
            lambda dialog: dialog.locator(".jp-Dialog-footer button").click(),
        )
        lab.page.locator(".jp-HvdlabStatus [role=button]").click(timeout=WAIT_MS)
        lab.run(TRAIN)
        for view in (PANEL, WIDGET):
            wait(lab, view, "api.lateness('step').length > 5")
        lab.page.wait_for_selector(".hvd-strip", timeout=WAIT_MS)

        wire.cut()
        lab.page.wait_for_selector(
            ".jp-HvdlabStatus-lost:text-is('2/2 ranks · connection lost')", timeout=WAIT_MS
        )
        said = lab.page.locator(f"{PANEL} .hvd-bar .hvd-state").inner_text()
        assert said.startswith("no connection · as of ")
        assert "connection lost" in lab.page.locator(".jp-HvdlabPanel-spoken").inner_text()
        seen = api(lab, PANEL, "lateness('step').length")
        wait_for_steps(work, 40)
        assert api(lab, PANEL, "lateness('step').length") == seen, "the wire is not cut"

        wire.mend()
        steps = os.stat(work / "steps").st_size
        for view in (PANEL, WIDGET):
            wait(lab, view, f"api.lateness('step').length > {steps}")
        lab.page.locator(".jp-HvdlabStatus", has_text="2/2 ranks · running [3]").wait_for(timeout=WAIT_MS)
        assert "connected again" in lab.page.locator(".jp-HvdlabPanel-spoken").inner_text()
        assert "*" in lab.prompt(TRAIN), "it was there again only when the cell had ended"
        (work / "end").touch()
        lab.wait_until_ended(TRAIN)
        check_complete(lab, work)


def check_complete(lab: LabPage, work: Path) -> None:
    """Check that nothing is missing and nothing is there twice."""
    steps = os.stat(work / "steps").st_size
    lab.wait_until_idle()
    lab.run(COUNT)
    lab.wait_for_text(COUNT, f"rows {2 * steps}")
    for view in (PANEL, WIDGET):
        wait(lab, view, f"api.summary().spans === {2 * steps}")
        found = api(lab, view, "lateness('step')")
        assert [one["ranks"] for one in found] == [2] * steps
        assert api(lab, view, "summary().lost") == 0
    lab.finish(CLEAR)
    for view in (PANEL, WIDGET):
        wait(lab, view, "api.summary().spans === 0")


def api(lab: LabPage, view: str, expression: str) -> Any:
    return lab.page.evaluate(f"document.querySelector('{view}').hvdlab.{expression}")


def wait(lab: LabPage, view: str, condition: str) -> None:
    lab.page.wait_for_function(
        f"() => {{ const api = document.querySelector('{view}')?.hvdlab; return api && ({condition}); }}",
        timeout=WAIT_MS,
    )


def wait_for_steps(work: Path, more: int) -> None:
    """Wait until the ranks have done so many more."""
    first, deadline = os.stat(work / "steps").st_size, time.monotonic() + WAIT_MS / 1000
    while os.stat(work / "steps").st_size < first + more:
        assert time.monotonic() < deadline
        time.sleep(0.02)
