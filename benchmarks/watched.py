"""Ranks in a notebook that are watched: in JupyterLab with the timeline open, or in a kernel with a client in the page's place."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_notebook

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from bare_kernel import BareKernel, bare_kernel

from support.jupyter.lab_page import LabPage, lab_page

WAIT_MS = 600_000  # limit of each wait for the page, in ms
LOAD, INIT, VIEW, MEASURE = range(4)

START = """\
%%hvd_run -np {ranks}
import json, os, time, torch, hvdlab.torch as hvd
from hvdlab.collectives import context
hvd.init()
def shapes():  # of the 161 parameters of a ResNet-50
    found, channels = [(64, 3, 7, 7), (64,), (64,)], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            for shape in ((width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                found += [shape, shape[:1], shape[:1]]
            if block == 0:
                found += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return [*found, (1000, 2048), (1000,)]
def step(tensors):
    handles = [hvd.allreduce_async_(t, name=f'grad.{{i}}', op=hvd.Sum) for i, t in enumerate(tensors)]
    for handle in handles: hvd.synchronize(handle)
assert len(shapes()) == 161
small = [torch.zeros(16) for _ in range(161)]
"""

LATENCY = """\
%%hvd_run
times = []
for k in range({probes} + 5):
    for _ in range({busy}): step(small)
    time.sleep(0.15 + 0.05 * (hvd.rank() == 1) + 0.013 * (k % 7))
    hvd.allreduce(torch.ones(4), name='probe')
    times.append(time.monotonic_ns())
if hvd.rank() == 0: json.dump(times, open('times.json', 'w'))
"""

SOAK = """\
%%hvd_run
pause = {ranks} * 161 / {rate}
following = time.monotonic()
for k in range(10**9):
    stop = bool(hvd.allreduce(torch.tensor([float(os.path.exists('stop'))]), name='stop', op=hvd.Sum)) if k % 20 == 0 else False
    if stop: break
    step(small)
    following = max(following + pause, time.monotonic() - 1)  # what a moment has lost is made up for
    time.sleep(max(0, following - time.monotonic()))
"""


@contextmanager
def watched(ranks: int, measure: str) -> Iterator[tuple[LabPage, Path]]:
    """Yield a notebook whose ranks are up and whose timeline is open; the last cell is ``measure``."""
    cells = [
        "%load_ext hvdlab\nimport hvdlab, os\nopen('kernel.pid', 'w').write(str(os.getpid()))",
        START.format(ranks=ranks),
        "hvdlab.timeline()",
        measure,
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook: nbformat.NotebookNode = new_notebook(
        cells=[new_code_cell(source) for source in cells], metadata={"kernelspec": kernel}
    )
    with (
        tempfile.TemporaryDirectory() as directory,
        lab_page(Path(directory) / "lab", notebook, height=1300) as lab,
    ):
        for cell in (LOAD, INIT, VIEW):
            lab.finish(cell)
        lab.page.wait_for_selector(".hvd-timeline canvas", timeout=WAIT_MS)
        yield lab, Path(directory) / "lab" / "work"


@contextmanager
def watched_unseen(ranks: int) -> Iterator[BareKernel]:
    """Yield a kernel whose ranks are up and whose timeline and charts a client takes, which draws nothing."""
    with tempfile.TemporaryDirectory() as directory, bare_kernel(Path(directory)) as kernel:
        kernel.finish("%load_ext hvdlab\nimport hvdlab")
        kernel.finish(START.format(ranks=ranks))
        kernel.finish("a, b = hvdlab.timeline(), hvdlab.metrics()\ndisplay(a, b)")
        kernel.look(2)
        yield kernel


def wait_for(path: Path) -> Any:
    """Return a file's contents, once the ranks have written it."""
    deadline = time.monotonic() + WAIT_MS / 1000
    while not path.exists() or not path.stat().st_size:
        if time.monotonic() > deadline:
            sys.exit(f"{path.name} did not come")
        time.sleep(0.2)
    time.sleep(0.2)
    return json.loads(path.read_text())
