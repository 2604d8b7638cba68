"""A saved notebook is opened and no kernel runs: pictures are there, and none is empty or reports a missing part."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
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
MAKE, TIMELINE, RANKS, END = range(4)
MOST_BYTES = 100_000  # of all outputs in the saved notebook

RECORDING = """\
import hvdlab
from hvdlab.collectives.types import DType, OpKind
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.tracing.record_format import Members, Span
from hvdlab.collectives.tracing.record_format import encode
recording = Recording()
for rank in range(16):
    spans = [Members(0, 1, 16, 0)]
    for k in range(300):
        at = 10**9 + k * 10**6
        last = at + 400_000
        arrived = last if rank == k % 16 else at
        spans.append(Span(f'layer{k % 7}', OpKind(k % 4), DType.F32, 0, k + 1, 0, 4096, arrived, last + 9000, last + 12_000, last + 300_000))
    recording.feed(rank, encode(rank, spans))
recording.close()
"""

CELLS = [RECORDING, "hvdlab.timeline(recording)", "hvdlab.ranks(recording)", "import time; time.sleep(2.5)"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> nbformat.NotebookNode:
    """Return a notebook that was run from a command line."""
    notebook: nbformat.NotebookNode = new_notebook(cells=[new_code_cell(source) for source in CELLS])
    path = str(tmp_path_factory.mktemp("run"))
    NotebookClient(
        notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": path}}
    ).execute()
    return notebook


def test_each_cell_is_small(saved: nbformat.NotebookNode) -> None:
    for cell in (TIMELINE, RANKS):
        outputs = saved.cells[cell].outputs
        assert outputs
        assert len(json.dumps(outputs)) < MOST_BYTES
    assert "held others up" in saved.cells[TIMELINE].outputs[0]["data"]["text/plain"]


def test_pictures_are_there(saved: nbformat.NotebookNode, tmp_path: Path) -> None:
    notebook = nbformat.from_dict(json.loads(json.dumps(saved)))
    # A kernel that does not exist, of a language that no other has, so that a page asks which one to use.
    notebook.metadata["kernelspec"] = {"name": "none", "display_name": "None", "language": "none"}
    notebook.metadata["language_info"] = {"name": "none"}
    with lab_page(tmp_path, notebook, height=1400, kernel=False) as lab:
        lab.page.locator(".jp-Dialog button:has-text('No Kernel')").click(timeout=WAIT_MS)
        check_pictures(lab)


def check_pictures(lab: LabPage) -> None:
    timeline = lab.page.locator(".jp-Notebook-cell").nth(TIMELINE)
    picture = timeline.locator("img").first
    picture.wait_for(state="visible", timeout=WAIT_MS)
    assert timeline.locator("img").count() == 16
    assert "rank 15" in lab.output(TIMELINE)
    assert lab.page.evaluate("image => image.naturalWidth", picture.element_handle()) > 100
    assert "held others up" in lab.output(RANKS)
    # Parts that can't live without a kernel are not there at all, and do not complain.
    lab.page.wait_for_timeout(1500)
    assert picture.is_visible()
    for cell in (TIMELINE, RANKS):
        text = lab.output(cell).lower()
        assert "error" not in text
        assert "not found" not in text
        assert "loading" not in text
    assert not lab.page.locator(".hvd-timeline canvas:visible").count()
