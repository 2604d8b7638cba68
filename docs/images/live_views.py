"""Makes the pictures of the live views: four ranks train in JupyterLab, and rank 2 computes for longer than the others.

python docs/images/live_views.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image

from support.jupyter.lab_page import LabPage, lab_page  # beside the tests

STEP = """\
%%hvd_run
def step(number, late):
    time.sleep(0.06 + late * (hvd.rank() == 2))
    for layer in (3, 2, 1):
        hvd.allreduce(torch.ones(500_000 * layer), name=f'grad.layer{layer}.weight')
    if number % 5 == 4:
        hvd.broadcast(torch.ones(2_000_000), 0, name='weights')
        hvd.allgather(torch.ones(300_000), name='scores')
    hvd.metric('loss', 2.3 / (1 + number / 6) + 0.05 * torch.rand(1).item(), step=number)
"""
TRAINING = "%%hvd_run\nfor number in range(24):\n    step(number, late=0.07)"
LOAD = "import hvdlab\n%load_ext hvdlab"
INIT = "%%hvd_run -np 4\nimport time, torch, hvdlab.torch as hvd\nhvd.init()\nhvd.barrier()"
CELLS = [LOAD, INIT, STEP, "hvdlab.timeline()", "hvdlab.ranks()", TRAINING]


def notebook(cells: list[str]) -> nbformat.NotebookNode:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(cells=[new_code_cell(c) for c in cells], metadata={"kernelspec": kernel})


def canvas_corner(lab: LabPage) -> tuple[float, float]:
    box = lab.page.locator(".hvd-timeline .hvd-plot canvas").bounding_box()
    assert box is not None
    return box["x"], box["y"]


def look(lab: LabPage) -> None:
    """Let it be drawn, with nothing under the pointer and no frame around what has the focus."""
    x, y = canvas_corner(lab)
    lab.page.mouse.move(x + 20, y + 5)
    lab.page.evaluate("document.activeElement.blur()")
    lab.page.wait_for_timeout(900)


def take(lab: LabPage, name: str) -> None:
    """The timeline, the ranks, and one collective from near."""
    for cell in range(len(CELLS)):
        lab.finish(cell)
    lab.page.wait_for_timeout(2500)
    view = lab.page.locator(".hvd-timeline")
    view.screenshot(path=HERE / f"timeline-{name}.png")
    lab.page.locator(".hvd-ranks").screenshot(path=HERE / f"ranks-{name}.png")
    target = lab.page.evaluate(
        """() => {
            const { store, view, timeline, where } = document.querySelector('.hvd-timeline').hvdlab;
            const { late } = store.lane(2);
            const i = Array.from({ length: late.n }, (_, k) => k).filter(k => late.end[k] - late.start[k] > 4e7).at(-3);
            view.show(late.start[i] - 3.4e8, late.end[i] + 2.6e8);
            timeline.schedule();
            return where(2, late.end[i] - 2e7);
        }"""
    )
    x, y = canvas_corner(lab)
    lab.page.mouse.click(x + target["x"], y + target["y"])
    look(lab)
    view.screenshot(path=HERE / f"timeline-{name}-zoomed.png")


def shrink(path: Path) -> None:
    """Few colours are enough, and a third of the size."""
    Image.open(path).convert("RGB").quantize(192).save(path, optimize=True)


def main() -> None:
    for name, theme in (("light", "JupyterLab Light"), ("dark", "JupyterLab Dark")):
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory) / "lab"
            with lab_page(place, notebook(CELLS), width=1180, height=1900, theme=theme, scale=2) as lab:
                take(lab, name)
        for what in ("timeline", "ranks"):
            for path in HERE.glob(f"{what}-{name}*.png"):
                shrink(path)


if __name__ == "__main__":
    main()
