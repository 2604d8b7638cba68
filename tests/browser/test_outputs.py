"""What cells of ranks leave in a notebook, as JupyterLab lays it out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytest.importorskip("jupyterlab")
pytest.importorskip("playwright.sync_api")

from chromium import CHROMIUM
from lab_page import LabPage, lab_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
]

LOAD, INIT, SKIP = range(3)

CELLS = [
    "%load_ext hvdlab",
    "%%hvd_run -np 2\nimport numpy as np, hvdlab.numpy as hvd\nhvd.init()",
    "%%hvd_run\nif hvd.rank(): hvd.allreduce(np.ones(3), name='skip')",
]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[LabPage]:
    notebook = new_notebook(
        cells=[new_code_cell(source) for source in CELLS],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    with lab_page(tmp_path, notebook, height=1100) as page:
        yield page


def test_an_error_has_no_scrollbar(lab: LabPage) -> None:
    """The last line of this one has a bold keyword, which is higher than other words."""
    for cell in (LOAD, INIT):
        lab.finish(cell)
    assert "rank 0 finished its cell without it" in lab.finish(SKIP)
    heights = lab.page.evaluate(
        """cell => [...document.querySelectorAll('.jp-Notebook-cell')[cell].querySelectorAll('.jp-RenderedText pre')]
            .map(pre => [!!pre.querySelector('.ansi-bold'), pre.scrollHeight - pre.clientHeight])""",
        SKIP,
    )
    assert heights == [[True, 0]]
