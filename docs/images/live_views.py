"""Makes the pictures of the live views: four ranks train in JupyterLab, and rank 2 computes for longer than the others.

python docs/images/live_views.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image

from lab_page import LabPage, lab_page  # beside the tests

TRAINING = """\
%%hvd_run
def step(number):
    time.sleep(0.06 + 0.07 * (hvd.rank() == 2))
    for layer in (3, 2, 1):
        hvd.allreduce(torch.ones(500_000 * layer), name=f'grad.layer{layer}.weight')
    if number % 5 == 4:
        hvd.broadcast(torch.ones(2_000_000), 0, name='weights')
        hvd.allgather(torch.ones(300_000), name='metrics')

for number in range(24):
    step(number)
"""
CELLS = [
    "import hvdlab\n%load_ext hvdlab",
    "%%hvd_run -np 4\nimport time, torch, hvdlab.torch as hvd\nhvd.init()\nhvd.barrier()",
    "hvdlab.timeline()",
    "hvdlab.ranks()",
    TRAINING,
]


def take(lab: LabPage, name: str) -> None:
    for cell in range(len(CELLS)):
        lab.finish(cell)
    lab.page.wait_for_timeout(2500)
    view = lab.page.locator(".hvd-timeline")
    canvas = view.locator("canvas")
    view.screenshot(path=HERE / f"timeline-{name}.png")
    lab.page.locator(".hvd-ranks").screenshot(path=HERE / f"ranks-{name}.png")
    # A few steps, with the arrivals at one collective.
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
    box = canvas.bounding_box()
    assert box is not None
    lab.page.mouse.click(box["x"] + target["x"], box["y"] + target["y"])
    lab.page.mouse.move(box["x"] + 20, box["y"] + 5)
    lab.page.wait_for_timeout(600)
    lab.page.evaluate("document.activeElement.blur()")
    view.screenshot(path=HERE / f"timeline-{name}-zoomed.png")


def shrink(path: Path) -> None:
    """Few colours are enough, and a third of the size."""
    Image.open(path).convert("RGB").quantize(192).save(path, optimize=True)


def main() -> None:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = new_notebook(cells=[new_code_cell(c) for c in CELLS], metadata={"kernelspec": kernel})
    for name, theme in (("light", "JupyterLab Light"), ("dark", "JupyterLab Dark")):
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory) / "lab"
            with lab_page(place, notebook, width=1180, height=1500, theme=theme, scale=2) as lab:
                take(lab, name)
    for path in (*HERE.glob("*-light*.png"), *HERE.glob("*-dark*.png")):
        shrink(path)


if __name__ == "__main__":
    main()
