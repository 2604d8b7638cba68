"""The browser is closed while a cell runs, and opened again: nothing that the cell wrote is lost."""

from __future__ import annotations

import re
import time
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

LOAD, WAITED_FOR, SHOWN_AFTERWARDS, IN_BACKGROUND, GOES_ON = range(5)

# The test makes the files that the ranks wait for, and reads theirs for their progress.
TRAINING = """\
%%hvd_run -np 2 {options}
import os, time
rank = os.environ['RANK']
def until(name):
    while not os.path.exists('{name}-' + name): time.sleep(0.01)
print('epoch 0')
until('closed')
print('epoch 1 of rank', rank)
open('{name}-written-' + rank, 'w').close()
until('reopened')
print('epoch 2')
if rank == '1': raise ValueError('bad batch')
"""

CELLS = [
    "%load_ext hvdlab",
    TRAINING.format(name="waited", options=""),
    "%hvd_output",
    TRAINING.format(name="background", options="--background"),
    "%hvd_output",
]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[LabPage]:
    notebook = new_notebook(
        cells=[new_code_cell(source) for source in CELLS],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    with lab_page(tmp_path, notebook) as page:
        yield page


def run_while_away(lab: LabPage, cell: int, files: str) -> None:
    """Run a cell, close the browser after its first line, come back after its second."""
    lab.run(cell)
    lab.wait_for_text(cell, "epoch 0")
    lab.leave()
    Path(f"{files}-closed").touch()
    deadline = time.monotonic() + 60
    while not all(Path(f"{files}-written-{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    lab.come_back()


def check_complete(text: str) -> None:
    """Check that each rank's lines are there once and in order; whether equal ones were merged depends on their
    timing."""
    written: dict[str, list[str]] = {"0": [], "1": []}
    for labels, line in re.findall(r"^\[([01,]+)\] (epoch .*)$", text, re.MULTILINE):
        for rank in labels.split(","):
            written[rank].append(line)
    assert written == {rank: ["epoch 0", f"epoch 1 of rank {rank}", "epoch 2"] for rank in "01"}, text
    assert "ValueError: bad batch" in text


def test_what_a_cell_wrote_meanwhile_is_not_lost(lab: LabPage, tmp_path: Path) -> None:
    lab.finish(LOAD)
    files = str(tmp_path / "work" / "waited")
    run_while_away(lab, WAITED_FOR, files)
    Path(f"{files}-reopened").touch()
    # As long as the kernel is busy, JupyterLab does not connect a new page to it.
    lab.wait_until_idle()
    lab.run(SHOWN_AFTERWARDS)
    lab.wait_for_text(SHOWN_AFTERWARDS, "ValueError: bad batch")
    check_complete(lab.output(SHOWN_AFTERWARDS))

    files = str(tmp_path / "work" / "background")
    run_while_away(lab, IN_BACKGROUND, files)
    lab.wait_until_idle()
    lab.run(GOES_ON)
    lab.wait_for_text(GOES_ON, "epoch 1 of rank 1")
    Path(f"{files}-reopened").touch()
    lab.wait_for_text(GOES_ON, "ValueError: bad batch")
    check_complete(lab.output(GOES_ON))
