"""A notebook in JupyterLab, in a real browser: the display, and its times."""

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

LOAD, LIVE, FAIL, STUCK, LOOP, NEXT = range(6)

# Ranks wait for a file after their first line: it is shown while the cell runs, or never.
FIRST_CELL = """\
%%hvd_run -np 2
import os, time, hvdlab.numpy as hvd, numpy as np
hvd.init()
print('step 0')
while not os.path.exists('go'): time.sleep(0.01)
print('rank', hvd.rank(), 'is done')
"""

CELLS = [
    "%load_ext hvdlab",
    FIRST_CELL,
    "%%hvd_run\nif hvd.rank() == 1:\n    raise ValueError('bad batch')\nhvd.allreduce(np.ones(1, np.float32), name='loss')",
    "%%hvd_run\nprint('stuck')\nif hvd.rank() == 0:\n    hvd.barrier()\nelse:\n    time.sleep(1000)",
    "%%hvd_run\nprint('looping')\nwhile True: pass",
    "%%hvd_run\nhvd.allreduce(np.ones(1, np.float32), op=hvd.Sum, name='sum').item()",
]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[LabPage]:
    notebook = new_notebook(
        cells=[new_code_cell(source) for source in CELLS],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    with lab_page(tmp_path, notebook) as page:
        yield page


def test_output_errors_and_the_stop_button(lab: LabPage, tmp_path: Path) -> None:
    lab.finish(LOAD)

    lab.run(LIVE)
    lab.wait_for_text(LIVE, "[0,1] step 0", running=True)
    (tmp_path / "work" / "go").touch()
    lab.wait_until_ended(LIVE)
    assert lab.output(LIVE).split("\n")[:3] == ["[0,1] step 0", "[0] rank 0 is done", "[1] rank 1 is done"]

    report = lab.finish(FAIL)
    assert report.startswith("rank 1 failed:")
    assert "----> 3     raise ValueError('bad batch')" in report
    assert report.strip().endswith("rank 0: stopped in allreduce `loss` because rank 1 failed")

    for cell, said in ((STUCK, "stuck"), (LOOP, "looping")):
        lab.run(cell)
        lab.wait_for_text(cell, said, running=True)
        lab.stop()
        lab.wait_until_ended(cell)
        assert "KeyboardInterrupt: ranks 0,1 were interrupted" in lab.output(cell)

    assert "[0,1] 2.0" in lab.finish(NEXT)
