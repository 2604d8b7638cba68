"""Restarting the kernel from JupyterLab's menu leaves the ranks of a kept pool, and the cell that they run, alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

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
LOAD, START, VIEW, TRAIN, ATTACH, AFTER, STOP = range(7)

CELLS = [
    "import os\nos.environ['XDG_RUNTIME_DIR'] = open('runtime').read()\n%load_ext hvdlab\nimport hvdlab",
    "%hvd_pool start 2 --keep night",
    "hvdlab.ranks()",
    """\
%%hvd_run
import os, time, numpy as np, hvdlab.numpy as hvd
hvd.init()
began = os.getpid()
step = 0
print('training', flush=True)
while hvd.allreduce(np.float64(not os.path.exists('end')), name='goes on') > 0:
    step += 1
    time.sleep(0.02)
""",
    "%hvd_pool attach night",
    "%%hvd_run\nassert began == os.getpid()\nassert step > 0\nprint('went on for', step > 1, flush=True)",
    "%hvd_pool stop",
]


@pytest.fixture
def runtime() -> Iterator[str]:
    """Yield a directory for the registry of kept pools, apart from those of other tests. Names of sockets may have 107
    characters."""
    with TemporaryDirectory(prefix="hvd-t-") as directory:
        yield directory
        # A test that failed has left the pool, which outlives its kernel.
        stop = "from hvdlab.runner.cli import main; main(['pools', 'stop', 'night'])"
        environ = {**os.environ, "XDG_RUNTIME_DIR": directory}
        subprocess.run([sys.executable, "-c", stop], env=environ, capture_output=True, check=False)


@pytest.fixture
def lab(tmp_path: Path, runtime: str) -> Iterator[LabPage]:
    notebook = new_notebook(
        cells=[new_code_cell(source) for source in CELLS],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    with lab_page(tmp_path, notebook, height=1500) as page:
        (tmp_path / "work" / "runtime").write_text(runtime)
        yield page


def restart(lab: LabPage) -> None:
    """Restart the kernel by the toolbar's button, and agree to it."""
    lab.page.locator('[data-command="notebook:restart-kernel"]').first.click()
    lab.page.locator(".jp-Dialog .jp-mod-accept, .jp-Dialog .jp-mod-warn").first.click()


def test_a_restart_from_the_menu_leaves_the_training_of_a_kept_pool_running(
    lab: LabPage, tmp_path: Path
) -> None:
    for cell in (LOAD, START, VIEW):
        lab.finish(cell)
    assert "ranks 0,1 are ready" in lab.output(START)
    lab.run(TRAIN)
    lab.wait_for_text(TRAIN, "training", running=True)
    lab.page.wait_for_function(
        "selector => document.querySelector(selector)?.innerText.includes('running [')",
        arg=".hvd-ranks .hvd-status",
        timeout=WAIT_MS,
    )
    restart(lab)
    lab.page.locator(".jp-Dialog").wait_for(state="detached", timeout=WAIT_MS)
    lab.wait_until_idle()
    lab.finish(LOAD)
    attached = lab.finish(ATTACH)
    if directory := os.environ.get("HVDLAB_TEST_PICTURES"):
        lab.page.screenshot(path=Path(directory) / "kept_pool.png")
    assert "of the notebook before still runs on ranks 0,1" in attached
    assert "interrupted" not in attached
    lab.page.wait_for_function(
        "selector => /running \\[\\d+\\] of the notebook before/.test(document.querySelector(selector)?.innerText)",
        arg=".jp-HvdlabStatus .jp-StatusBar-TextItem",
        timeout=WAIT_MS,
    )
    (tmp_path / "work" / "end").touch()
    assert "[0,1] went on for True" in lab.finish(AFTER)
    assert "all ranks have ended" in lab.finish(STOP)
