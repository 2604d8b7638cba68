"""Outputs of cells of ranks in a notebook, as JupyterLab lays it out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytest.importorskip("jupyterlab")
pytest.importorskip("playwright.sync_api")

from support.jupyter.chromium import CHROMIUM
from support.jupyter.lab_page import LabPage, lab_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
]

LOAD, INIT, SKIP, TEXT, DIFF, STATUS, LABELS = range(7)

CELLS = [
    "%load_ext hvdlab",
    "%%hvd_run -np 2\nimport numpy as np, hvdlab.numpy as hvd\nhvd.init()",
    "%%hvd_run\nif hvd.rank(): hvd.allreduce(np.ones(3), name='skip')",
    "%%hvd_run\nprint('text'); a, b = hvd.rank(), -hvd.rank()",
    "%hvd_diff a b",
    "%hvd_pool status",
    "%%hvd_run\nfrom IPython.display import HTML, display\ndisplay(HTML(f'of {hvd.rank()}'))",
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


# Where the first text of each output begins, and the prompt beside it.
BEGINS = """cell => [...document.querySelectorAll('.jp-Notebook-cell')[cell].querySelectorAll('.jp-OutputArea-child')].map(child => {
    const texts = document.createTreeWalker(child.querySelector('.jp-OutputArea-output'), NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        if (!texts.currentNode.textContent.trim()) continue;
        const range = document.createRange();
        range.selectNodeContents(texts.currentNode);
        return [range.getBoundingClientRect().left, child.querySelector('.jp-OutputPrompt')?.innerText.trim() ?? ''];
    }
    return null;
}).filter(one => one)"""


def test_tables_and_labels_begin_where_text_does(lab: LabPage) -> None:
    for cell in (LOAD, INIT, TEXT, DIFF, STATUS, LABELS):
        lab.finish(cell)
    lab.wait_for_text(LABELS, "of 1")
    ((left, _),) = lab.page.evaluate(BEGINS, TEXT)
    diff = lab.page.evaluate(BEGINS, DIFF)
    assert [prompt for _, prompt in diff] == ["[4]:"], "one prompt, beside the first comparison"
    labels = lab.page.evaluate(BEGINS, LABELS)
    for begin, _ in (*diff, *lab.page.evaluate(BEGINS, STATUS), labels[0]):
        assert begin == pytest.approx(left, abs=1)
    assert lab.output(LABELS).startswith("rank 0")
