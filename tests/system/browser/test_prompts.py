"""Ranks that ask, in JupyterLab and Notebook 7, in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from nbformat.v4 import new_code_cell, new_notebook

if TYPE_CHECKING:
    from playwright.sync_api import Locator

pytest.importorskip("jupyterlab")
pytest.importorskip("notebook")
pytest.importorskip("playwright.sync_api")

from support.jupyter.chromium import CHROMIUM
from support.jupyter.lab_page import LabPage, lab_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
]

WAIT_MS = 180_000  # limit of each wait for the page, in ms
INIT, ASK, STOP, AGAIN, NEXT, DIE, HERE = range(7)

CELLS = [
    "%load_ext hvdlab\n%hvd_run -np 2 import os; rank = int(os.environ['RANK']); x = rank * 10",
    "%%hvd_run\nprint('hello', input('name? '))",
    "%%hvd_run\nimport time\ndef f(a):\n    if rank == 1: breakpoint()\n    b = a + 1\n    return b\n\n"
    + "if rank == 0:\n    while not os.path.exists('go'): time.sleep(0.02)\n    print('meanwhile')\nf(x)",
    "%%hvd_run\nbreakpoint()\nx = 1",
    "%%hvd_run\nx",
    "%%hvd_run\nimport signal, threading, time\ndef die():\n    while not os.path.exists('die'): time.sleep(0.02)\n"
    + "    os.kill(os.getpid(), signal.SIGKILL)\n\nif rank == 1:\n    threading.Thread(target=die).start()\n    breakpoint()",
    "'still ' + 'here'",
]


def wait_for_box(lab: LabPage, prompt: str) -> Locator:
    """Wait for an input box with this prompt. One that was answered is in the page for another half second."""
    boxes = lab.page.locator(".jp-OutputArea-stdin-item:not(.jp-OutputArea-stdin-hiding)")
    box = boxes.filter(has_text=prompt)
    box.wait_for(timeout=WAIT_MS)
    return box.locator(".jp-Stdin-input")


def answer(lab: LabPage, prompt: str, line: str) -> None:
    """Wait for a prompt in the notebook's input box, and type a line."""
    box = wait_for_box(lab, prompt)
    box.fill(line)
    box.press("Enter")


@pytest.mark.parametrize("classic", [False, True], ids=["lab", "notebook"])
def test_ranks_ask_in_the_notebooks_own_input_box(tmp_path: Path, classic: bool) -> None:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = new_notebook(
        cells=[new_code_cell(source) for source in CELLS], metadata={"kernelspec": kernel}
    )
    with lab_page(tmp_path, notebook, classic=classic) as lab:
        lab.finish(INIT)

        lab.run(ASK)
        answer(lab, "[rank 0] (others wait, @? tells) name?", "all: Ada")
        lab.wait_until_ended(ASK)
        assert "[0,1] hello Ada" in lab.output(ASK)

        lab.run(STOP)
        wait_for_box(lab, "[rank 1] ipdb>")
        (tmp_path / "work" / "go").touch()
        lab.wait_for_text(STOP, "[0] meanwhile", running=True)  # while the box is open
        answer(lab, "[rank 1] ipdb>", "p a, 6 * 7")
        lab.wait_for_text(STOP, "(10, 42)", running=True)
        lab.wait_for_text(STOP, "rank 1 is at a prompt", running=True)
        answer(lab, "[rank 1] ipdb>", "continue")
        lab.wait_until_ended(STOP)
        assert "[1] 11" in lab.output(STOP)
        assert "is at a prompt" not in lab.output(STOP)

        lab.run(AGAIN)
        wait_for_box(lab, "[rank 0]")
        lab.stop()
        lab.wait_until_ended(AGAIN)
        assert "KeyboardInterrupt" in lab.output(AGAIN)

        assert "[0] 0" in lab.finish(NEXT)

        lab.run(DIE)
        wait_for_box(lab, "[rank 1] ipdb>")
        (tmp_path / "work" / "die").touch()
        lab.wait_until_ended(DIE)
        assert "rank 1 died" in lab.output(DIE)
        # JupyterLab runs no cell as long as a box is open, and this one can't be answered any more.
        assert "still here" in lab.finish(HERE)
        assert lab.page.locator(".jp-Stdin-input").count() == 0
