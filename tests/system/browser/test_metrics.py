"""Charts of metrics in JupyterLab, in a real browser: they must show the ranks' reports and the readings of their
clocks."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import nbformat
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
LATE = 0.15  # seconds for which rank 2 sleeps in each step
STEPS = 20
LOAD, INIT, VIEW, TRAIN, CLOCKS, TABLE = range(6)

TRAINING = f"""\
%%hvd_run
came, gone = [], []
for step in range({STEPS}):  # all begin it together, since they have waited for each other
    if hvd.rank() == 2: time.sleep({LATE})
    came.append(time.monotonic_ns())
    grad = hvd.allreduce_async(np.ones(50_000, np.float32), name='grad')
    gone.append(time.monotonic_ns())
    hvd.synchronize(grad)
    hvd.metric('loss', 1 / (step + 1) + hvd.rank(), step=step)
"""

REPORT = """\
import json
table = view.table()
late = table[table['name'] == 'hvdlab/lateness'].groupby('rank')['value'].max()
first_came, first_gone = ([min(times) for times in zip(*clocks.values())] for clocks in (came, gone))
last_came, last_gone = ([max(times) for times in zip(*clocks.values())] for clocks in (came, gone))
seconds = (last_gone[-1] - first_came[0]) / 1e9
def sums(begins, ends):
    return sum(max(0, end - begin) for begin, end in zip(begins, ends)) / 1e9 / seconds
print(json.dumps({
    "late": {rank: late[rank] for rank in came},
    "least": {rank: max(a - b for a, b in zip(came[rank], first_gone)) / 1e9 for rank in came},
    "most": {rank: max(a - b for a, b in zip(gone[rank], first_came)) / 1e9 for rank in came},
    "waited": {rank: sums(gone[rank], last_came) for rank in came},
    "waited at most": {rank: sums(came[rank], last_gone) for rank in came},
}))
"""
"""The table's lateness, and the bounds of it and of the share of waiting by the ranks' own clocks, before and after each call."""

CELLS = [
    "import hvdlab\n%load_ext hvdlab",
    "%%hvd_run -np 4\nimport time, numpy as np, hvdlab.numpy as hvd\nhvd.init()",
    "view = hvdlab.metrics()\nview",
    TRAINING,
    "%hvd_pull came gone",
    REPORT,
]


def notebook(cells: list[str]) -> nbformat.NotebookNode:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made: nbformat.NotebookNode = new_notebook(
        cells=[new_code_cell(source) for source in cells], metadata={"kernelspec": kernel}
    )
    return made


def api(lab: LabPage, expression: str) -> Any:
    return lab.page.evaluate(
        f"(() => {{ const api = document.querySelector('.hvd-metrics').hvdlab; return api.{expression}; }})()"
    )


def wait_for(lab: LabPage, expression: str) -> None:
    lab.page.wait_for_function(
        f"(() => {{ const api = document.querySelector('.hvd-metrics')?.hvdlab; return api && ({expression}); }})()",
        timeout=WAIT_MS,
    )


def test_what_ranks_measure_is_seen_while_they_run(tmp_path: Path) -> None:
    with lab_page(tmp_path, notebook(CELLS), width=1280, height=1500) as lab:
        for cell in (LOAD, INIT):
            lab.finish(cell)
        for cell in (VIEW, TRAIN):
            lab.run(cell)
        lab.page.wait_for_selector(".hvd-metrics[data-theme=light]")
        wait_for(lab, "api.values('loss', 0).length >= 3")
        assert "*" in lab.prompt(TRAIN), "nothing was shown before the cell ended"
        lab.wait_until_ended(TRAIN)
        wait_for(lab, f"[0, 1, 2, 3].every(rank => api.values('loss', rank).length === {STEPS})")
        for rank in range(4):
            found = api(lab, f"values('loss', {rank})")
            assert [one["value"] for one in found] == [1 / (step + 1) + rank for step in range(STEPS)]
            assert [one["step"] for one in found] == list(range(STEPS))
            times = [one["time"] for one in found]
            assert times == sorted(times)
        check_lateness(lab)
        check_charts(lab)
        check_saved(lab, tmp_path / "work" / "notebook.ipynb")


def check_lateness(lab: LabPage) -> None:
    """Each rank is as late, and has waited as long, as the clocks say; in the page and in the table."""
    wait_for(lab, "api.values('hvdlab/lateness', 2).length >= 2")
    lab.finish(CLOCKS)
    told = json.loads(lab.finish(TABLE))
    values = {
        rank: [one["value"] for one in api(lab, f"values('hvdlab/lateness', {rank})")] for rank in range(4)
    }
    for rank in range(4):
        late = max(values[rank])
        assert late == told["late"][str(rank)]
        assert told["least"][str(rank)] - 0.001 < late < told["most"][str(rank)] + 0.001
    assert max(values[2]) >= LATE * 0.95
    shares = {
        rank: [one["value"] for one in api(lab, f"values('hvdlab/share/wait', {rank})")] for rank in range(4)
    }
    assert all(0 <= value <= 1 for values in shares.values() for value in values)
    # Seconds in which nothing but the training ran. In its first one a rank may wait for others that begin later.
    for rank in (0, 1, 3):
        assert max(shares[rank]) > 0.5 * told["waited"][str(rank)]
    assert statistics.median(shares[2]) < 0.4 + told["waited at most"]["2"]


def check_charts(lab: LabPage) -> None:
    wait_for(lab, "api.charts().some(chart => chart.id === 'hvdlab/rss')")
    shown = [chart["title"] for chart in api(lab, "charts()")]
    assert shown[0] == "loss"
    assert {"Time spent", "Lateness", "allreduce bus", "CPU", "Memory"} <= set(shown)
    assert "Threads" not in shown
    lab.page.get_by_role("button", name="Choose what is shown").click()
    lab.page.get_by_label("Threads").check()
    wait_for(lab, "api.charts().some(chart => chart.title === 'Threads')")
    lab.page.keyboard.press("Escape")
    lab.page.wait_for_selector(".hvd-choices", state="hidden")
    lab.page.locator(".hvd-metrics .hvd-charts-view").focus()
    lab.page.keyboard.press("f")
    lab.page.wait_for_selector(".hvd-metrics .hvd-state:has-text('paused')")
    chart = lab.page.locator("[data-chart='loss'] .hvd-chart-plot")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box
    share = api(lab, "values('loss', 3).map(one => (one.time - api.view.from) / api.view.length)[7]")
    lab.page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] / 2)
    lab.page.wait_for_selector(".hvd-metrics .hvd-tip :text('rank 3')")
    tip = lab.page.locator(".hvd-metrics .hvd-tip").inner_text()
    assert "step 7" in tip
    assert "3.125" in tip  # 1 / (7 + 1) + 3
    log = lab.page.locator("[data-chart='loss'] .hvd-chart-log")
    log.click()
    assert log.get_attribute("aria-pressed") == "true"
    lab.page.locator(".hvd-metrics .hvd-charts-view").focus()
    length = api(lab, "view.length")
    lab.page.keyboard.press("w")
    assert api(lab, "view.length") < length
    assert lab.page.locator(".jp-Notebook-cell").count() == len(CELLS), "a key went to the notebook"


def check_saved(lab: LabPage, path: Path) -> None:
    lab.page.keyboard.press("Control+s")
    deadline = time.monotonic() + WAIT_MS / 1000
    while not (outputs := lab.saved_outputs(path, VIEW)):
        assert time.monotonic() < deadline, "Ctrl-S in the charts does not save"
        lab.page.wait_for_timeout(100)
    still = outputs[0]["data"]
    assert "data:image/png;base64," in still["text/html"]
    assert len(json.dumps(outputs)) < 100_000


SYNTHETIC = """\
import math, hvdlab
from hvdlab.collectives.tracing.recording import Recording
from hvdlab.collectives.tracing.record_format import Metric
from hvdlab.collectives.tracing.record_format import encode
recording = Recording()
for rank in range(16):
    recording.feed(rank, encode(rank, [Metric('loss', math.exp(-k / 100) + rank / 50, k, 10**9 + k * 10**8) for k in range(600)]))
view = hvdlab.metrics(recording)
view
"""

# The share of the plot's pixels that are not background or nearly so.
INK = """() => {
    const canvas = document.querySelector('.hvd-chart-plot canvas');
    const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    let drawn = 0;
    for (let i = 0; i < pixels.length; i += 4) {
        const [r, g, b, a] = pixels.subarray(i, i + 4);
        if (a > 80 && Math.max(r, g, b) - Math.min(r, g, b) > 40) drawn++;
    }
    return drawn / (pixels.length / 4);
}"""


def test_many_ranks_are_a_band_in_the_colours_of_the_theme(tmp_path: Path) -> None:
    cells = [SYNTHETIC, "view.close()", "print(view)"]
    with lab_page(tmp_path, notebook(cells), theme="JupyterLab Dark") as lab:
        lab.finish(0)
        wait_for(lab, "api.store.series.count === 9600")
        lab.page.wait_for_selector(".hvd-metrics[data-theme=dark]")
        lab.page.wait_for_function(f"({INK})() > 0.01", timeout=WAIT_MS)
        assert api(lab, "charts()[0].label").startswith("loss: ")
        before = lab.page.evaluate(INK)
        api(lab, "choose(15)")
        lab.page.wait_for_selector(".hvd-chip[aria-pressed=true]:has-text('15')")
        lab.page.wait_for_function(f"({INK})() > {before}", timeout=WAIT_MS)
        lab.finish(1)
        assert "loss |█" in lab.finish(2)
