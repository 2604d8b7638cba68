"""Makes the pictures of cells in JupyterLab: a training's output, the report of an error, a rank's prompt, and the debugger.

python docs/images/cell_outputs.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image

from support.jupyter.lab_page import LabPage, lab_page  # beside the tests

LOAD = "%load_ext hvdlab"
PROGRESS = """\
%%hvd_run
import sys
from tqdm.auto import tqdm
for epoch in tqdm(range(40), desc="epoch"):
    for rows in epoch_indices(epoch):
        optimizer.zero_grad()
        F.cross_entropy(model(train_x[rows]), train_y[rows]).backward()
        optimizer.step()
    if epoch % 20 == 0:
        print("learning rate", optimizer.param_groups[0]["lr"])
    if epoch == 10 + hvd.rank():
        tqdm.write(f"rank {hvd.rank()} is at epoch {epoch}", file=sys.stdout)
"""
BAD_BATCH = """\
%%hvd_run
for step, rows in enumerate(epoch_indices(0)):
    batch = train_x[rows]
    if step == 3 and hvd.rank() == 2:
        batch = batch.reshape(-1, 3, 8, 8)
    optimizer.zero_grad()
    F.cross_entropy(model(batch), train_y[rows]).backward()
    optimizer.step()
"""
PROMPT = """\
%%hvd_run
def f(a):
    if rank: breakpoint()
    b = a + 1
    return b
f(x)
"""
DOUBLE = """\
%%hvd_run
def double(n):
    y = n * 2
    return y
z = double(rank + 1)
print(z)
"""
FRAMES = ".jp-DebuggerCallstack-body li"


def quickstart() -> list[str]:
    """Return the cells of the quickstart that load hvdlab and make data, a model and the order of batches."""
    cells = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    order = next(source for source in sources if "def epoch_indices" in source)
    return [*sources[:3], "%%hvd_run\n" + order.partition("\n")[2].partition("\nhistory")[0]]


def save_cell(lab: LabPage, cell: int, name: str) -> None:
    """Save the picture of a cell and its output."""
    lab.page.mouse.move(5, 5)
    path = HERE / f"{name}.png"
    lab.page.locator(".jp-Notebook-cell").nth(cell).screenshot(path=path)
    save_small(path)


def save_small(path: Path) -> None:
    """Reduce the colours, which makes the file a third as large."""
    Image.open(path).convert("RGB").quantize(192).save(path, optimize=True)


def training(place: Path) -> None:
    """Save the output of a training while it runs, and the report of an error."""
    before = quickstart()
    progress, bad_batch = len(before), len(before) + 1
    with lab_page(place, as_notebook([*before, PROGRESS, BAD_BATCH]), width=1000, height=1400) as lab:
        for cell in range(progress):
            lab.finish(cell)
        lab.run(progress)
        lab.wait_for_text(progress, "rank 3 is at epoch 13", running=True)
        lab.page.evaluate("document.activeElement.blur()")
        save_cell(lab, progress, "live-output")
        lab.wait_until_ended(progress)
        lab.run(bad_batch)
        lab.wait_until_ended(bad_batch)
        lab.page.evaluate("document.activeElement.blur()")
        save_cell(lab, bad_batch, "error-report")


def prompt(place: Path) -> None:
    """Save the input box of one of two ranks that have stopped."""
    start = f"{LOAD}\n%hvd_run -np 3 import os; rank = int(os.environ['RANK']); x = rank * 10"
    with lab_page(place, as_notebook([start, PROMPT]), width=1040, height=480) as lab:
        lab.finish(0)
        lab.run(1)
        box = lab.page.locator(".jp-OutputArea-stdin-item:not(.jp-OutputArea-stdin-hiding)")
        line = box.filter(has_text="[rank 1] (others wait").locator(".jp-Stdin-input")
        line.fill("p a")
        line.press("Enter")
        lab.wait_for_text(1, "[1] 10", running=True)
        box.filter(has_text="[rank 1]").wait_for()
        lab.wait_for_text(1, "ranks 1,2 are at a prompt", running=True)
        save_cell(lab, 1, "prompt")


def debugger(place: Path) -> None:
    """Save JupyterLab's debugger with two ranks that have stopped at a breakpoint."""
    cells = [LOAD, "%%hvd_run -np 2\nimport os\nrank = int(os.environ['RANK'])", DOUBLE]
    with lab_page(place, as_notebook(cells), width=1500, height=900, many=True) as lab:
        page = lab.page
        lab.finish(0)
        lab.finish(1)
        page.locator(".jp-DebuggerBugButton").first.click()
        page.wait_for_selector(".jp-DebuggerBugButton[aria-pressed=true]")
        gutter = page.locator(".jp-Notebook-cell").nth(2).locator(".cm-breakpoint-gutter .cm-gutterElement")
        gutter.nth(4).click()  # the first element is a hidden one that gives the width
        page.wait_for_selector(".jp-DebuggerBreakpoints-body >> text=4")
        lab.run(2)
        page.locator(FRAMES, has_text="rank 0: double").wait_for()
        page.locator(FRAMES, has_text="rank 1: double").click()
        page.wait_for_selector(".jp-DebuggerVariables >> text=y")
        page.wait_for_selector("text=ranks 0, 1 are stopped by the debugger")
        page.mouse.move(700, 600)
        page.screenshot(path=HERE / "debugger.png")
        save_small(HERE / "debugger.png")
        page.locator('[data-command="debugger:continue"]').first.click()
        lab.wait_until_ended(2)


def as_notebook(cells: list[str]) -> NotebookNode:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return new_notebook(
        cells=[new_code_cell(cell.rstrip()) for cell in cells], metadata={"kernelspec": kernel}
    )


def main() -> None:
    for make in (training, prompt, debugger):
        with tempfile.TemporaryDirectory() as directory:
            make(Path(directory) / "lab")


if __name__ == "__main__":
    main()
