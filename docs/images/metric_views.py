"""Makes the pictures of metrics: four ranks train in JupyterLab, and rank 2 becomes slower at half of the time.

python docs/images/metric_views.py
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

from support.jupyter.lab_page import lab_page  # beside the tests

MODEL = """\
%%hvd_run
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 170)
watch = hvd.watch(model, optimizer, batch_size=32)
data = torch.randn(170, 32, 64, generator=torch.Generator().manual_seed(hvd.rank()))
"""
TRAINING = """\
%%hvd_run
for step in range(170):
    time.sleep(0.08 + 0.06 * (hvd.rank() == 2 and step > 80))  # as if it computed
    x = data[step]
    loss = torch.nn.functional.mse_loss(model(x).squeeze(), x[:, :8].sum(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    hvd.metric('loss', loss, step=step)
"""
CELLS = [
    "import hvdlab\n%load_ext hvdlab",
    "%%hvd_run -np 4\nimport time, torch, hvdlab.torch as hvd\nhvd.init()",
    MODEL,
    "hvdlab.metrics()",
    TRAINING,
]
VIEW, TRAIN = 3, 4


def main() -> None:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    book = new_notebook(cells=[new_code_cell(c) for c in CELLS], metadata={"kernelspec": kernel})
    for name, theme in (("light", "JupyterLab Light"), ("dark", "JupyterLab Dark")):
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory) / "lab"
            with lab_page(
                place, nbformat.from_dict(book), width=1180, height=1900, theme=theme, scale=2
            ) as lab:
                for cell in range(VIEW):
                    lab.finish(cell)
                lab.run(VIEW)
                lab.page.locator(".hvd-metrics").wait_for()
                lab.run(TRAIN)
                lab.page.wait_for_function(
                    "() => document.querySelector('.hvd-metrics').hvdlab.values('loss', 0).length === 170",
                    timeout=120_000,
                )
                lab.page.wait_for_timeout(1500)
                lab.page.locator(".hvd-metrics").screenshot(path=HERE / f"metrics-{name}.png")
        path = HERE / f"metrics-{name}.png"
        # Few colours are enough, and a third of the size.
        Image.open(path).convert("RGB").quantize(192).save(path, optimize=True)
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()
