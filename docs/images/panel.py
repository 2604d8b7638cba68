"""Makes the pictures of the panel: four ranks train in JupyterLab, and rank 2 computes for longer than the others.

python docs/images/panel.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image

from support.jupyter.lab_page import LabPage, lab_page  # beside the tests

PREPARE = """\
%%hvd_run -np 4
import time, torch, hvdlab.torch as hvd
hvd.init()
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)])
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
"""
TRAINING = """\
%%hvd_run
for number in range(500):
    data = torch.randn(64, 512)
    time.sleep(0.05 + 0.05 * (hvd.rank() == 2))   # rank 2 reads from a slow disk
    optimizer.zero_grad()
    loss = model(data).square().mean()
    loss.backward()
    optimizer.step()
    hvd.metric('loss', loss.item(), number)
"""
CELLS = ["%load_ext hvdlab", PREPARE, TRAINING]
VIEW = ".jp-HvdlabPanel .hvd-timeline"


def take(lab: LabPage, name: str) -> None:
    page = lab.page
    page.keyboard.press("Control+B")  # the file browser
    lab.finish(0)
    lab.finish(1)  # starts the ranks
    page.locator("[data-command='hvdlab:toolbar-timeline']").click()
    page.locator(VIEW).wait_for()
    _make_room(lab)
    lab.run(2)
    page.wait_for_function(f"document.querySelector('{VIEW}')?.hvdlab.summary().spans > 1500", timeout=60_000)
    page.wait_for_timeout(2500)
    page.mouse.move(600, 10)
    page.screenshot(path=HERE / f"panel-{name}.png")


def _make_room(lab: LabPage) -> None:
    """Most of the page for the panel."""
    handle = lab.page.locator(".lm-DockPanel-handle[data-orientation=vertical]:visible").first.bounding_box()
    assert handle is not None
    x, y = handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2
    lab.page.mouse.move(x, y)
    lab.page.mouse.down()
    lab.page.mouse.move(x, 440, steps=4)
    lab.page.mouse.up()


def main() -> None:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = new_notebook(cells=[new_code_cell(c) for c in CELLS], metadata={"kernelspec": kernel})
    for name, theme in (("light", "JupyterLab Light"), ("dark", "JupyterLab Dark")):
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory) / "lab"
            with lab_page(place, notebook, width=1280, height=1150, theme=theme, scale=2, many=True) as lab:
                take(lab, name)
        path = HERE / f"panel-{name}.png"
        Image.open(path).convert("RGB").quantize(192).save(path, optimize=True)


if __name__ == "__main__":
    main()
