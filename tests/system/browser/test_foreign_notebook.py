"""A notebook from an attacker, and ranks that print an attacker's text: none of their scripts runs in the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

pytest.importorskip("jupyterlab")
pytest.importorskip("playwright.sync_api")

from support.jupyter.chromium import CHROMIUM, chromium
from support.jupyter.lab_page import WAIT_MS, LabPage, lab_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
]

RUNS = "window.foreign = (window.foreign ?? 0) + 1"
HOSTILE = (
    f"\"'><img src=x onerror='{RUNS}'><svg onload='{RUNS}'></svg><script>{RUNS}</script>\x1b]0;t\x07\x1b[2J"
)
SVG = f'<svg xmlns="http://www.w3.org/2000/svg" onload="{RUNS}"><script>{RUNS}</script></svg>'
MODULE = f"{RUNS}; export default {{ render() {{ {RUNS} }} }}"
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
WIDGET = "application/vnd.jupyter.widget-view+json"


def widget_states() -> dict[str, Any]:
    """A widget with a script of its own, and one of hvdlab's kind with names in it."""
    common = {"model_module": "anywidget", "model_module_version": "~0.9.*", "model_name": "AnyModel"}
    plain = {
        "_anywidget_id": HOSTILE,
        "_model_module": "anywidget",
        "_model_module_version": "~0.9.*",
        "_model_name": "AnyModel",
        "_view_module": "anywidget",
        "_view_module_version": "~0.9.*",
        "_view_name": "AnyView",
        "_esm": MODULE,
        "_css": f"</style><img src=x onerror='{RUNS}'>",
        "pace": {"heading": HOSTILE, "ranks": [{"rank": HOSTILE, "paused": HOSTILE}], "failed": HOSTILE},
    }
    html = {
        "model_module": "@jupyter-widgets/controls",
        "model_module_version": "2.0.0",
        "model_name": "HTMLModel",
        "state": {"value": HOSTILE, "description": HOSTILE},
    }
    state = {"foreign1": {**common, "state": plain}, "foreign2": html}
    return {
        "application/vnd.jupyter.widget-state+json": {"version_major": 2, "version_minor": 0, "state": state}
    }


def foreign_notebook() -> nbformat.NotebookNode:
    """Return a notebook from a stranger, with hostile text wherever it can have text."""
    views = [
        new_output("display_data", {WIDGET: {"model_id": one, "version_major": 2}, "text/plain": HOSTILE})
        for one in ("foreign1", "foreign2", HOSTILE)
    ]
    outputs = [
        new_output("stream", text=HOSTILE),
        new_output("display_data", {"text/html": HOSTILE, "text/plain": HOSTILE}),
        new_output("display_data", {"image/svg+xml": SVG}),
        new_output("display_data", {"application/javascript": RUNS}),
        new_output("error", ename=HOSTILE, evalue=HOSTILE, traceback=[HOSTILE]),
        *views,
    ]
    cells = [new_code_cell(HOSTILE, outputs=outputs), new_markdown_cell(HOSTILE), new_code_cell("1")]
    for cell in cells:
        cell["metadata"] = {"tags": [HOSTILE], "hvdlab": {"ranks": HOSTILE}, "trusted": True}
    notebook: nbformat.NotebookNode = new_notebook(
        cells=cells,
        metadata={
            "kernelspec": KERNEL,
            "title": HOSTILE,
            "hvdlab": {"np": HOSTILE, "pool": HOSTILE},
            "widgets": widget_states(),
        },
    )
    notebook["cells"][0]["id"] = HOSTILE
    return notebook


def ran(page: Any) -> int:
    """Return how much of the stranger's code has run in the page, or in a frame of it."""
    page.wait_for_timeout(500)  # an image that is not found reports it later
    return sum(int(frame.evaluate("() => window.foreign ?? 0")) for frame in page.frames)


def test_the_bait_would_be_taken() -> None:
    """The code whose absence the other tests check would run if put into a page unescaped."""
    with chromium() as browser:
        page = browser.new_page()
        page.set_content(f"<p>{HOSTILE}</p>{SVG}")
        page.wait_for_function("() => window.foreign >= 4", timeout=WAIT_MS)
        page.close()


FILE = f"<img src=x onerror='{RUNS}'>.ipynb"


def test_a_foreign_notebook_runs_nothing_when_it_is_opened(tmp_path: Path) -> None:
    own = new_notebook(cells=[new_code_cell("1")], metadata={"kernelspec": KERNEL})
    with lab_page(tmp_path, own, many=True) as lab:
        work = (tmp_path / "work").resolve()
        # Written as JSON: libraries that write notebooks refuse such ids of cells.
        (work / FILE).write_text(json.dumps(foreign_notebook()))
        execute = "([command, options]) => void window.jupyterapp.commands.execute(command, options)"
        lab.page.evaluate(execute, ["docmanager:open", {"path": f"{work.name}/{FILE}"}])
        lab.page.get_by_text("does not match").or_(lab.page.locator(".jp-OutputArea-output")).first.wait_for(
            timeout=WAIT_MS
        )
        while (
            dialog := lab.page.locator(".jp-Dialog .jp-mod-accept")
        ).count():  # the file is not quite valid
            dialog.first.click()
        lab.page.locator(".jp-OutputArea-output").first.wait_for(timeout=WAIT_MS)
        assert ran(lab.page) == 0
        lab.page.evaluate(execute, ["hvdlab:open-timeline", {}])
        lab.page.locator(".jp-HvdlabPanel-empty", has_text=f"{FILE} has no ranks yet").wait_for(
            timeout=WAIT_MS
        )
        assert ran(lab.page) == 0


CELLS = [
    "%load_ext hvdlab\nimport hvdlab",
    f"""\
%%hvd_run -np 2
import numpy as np, hvdlab.numpy as hvd
hvd.init()
hostile = {HOSTILE!r}
for k in range(20):
    hvd.allreduce(np.ones(4), name=hostile)
    hvd.metric(hostile.replace(chr(27), ''), float(k), step=k)
globals()[hostile] = np.ones(3)
exec(compile("hvd.allreduce(np.ones(4), name='of a hostile file')", hostile, "exec"))
hostile
""",
    "hvdlab.timeline()",
    "hvdlab.metrics()",
    "%hvd_pool status",
    "%hvd_whos",
    "%%hvd_run\nraise type(hostile, (ValueError,), {})(hostile)",
]


def test_what_ranks_say_runs_nothing_in_the_views(tmp_path: Path) -> None:
    """Names of tensors, metrics, variables, files and errors come from data as often as from the user."""
    pytest.importorskip("anywidget")
    notebook = new_notebook(
        cells=[new_code_cell(source) for source in CELLS], metadata={"kernelspec": KERNEL}
    )
    with lab_page(tmp_path, notebook, height=1400, many=True) as lab:
        for cell in range(len(CELLS)):
            lab.finish(cell)
        lab.page.wait_for_selector(".hvd-timeline canvas", timeout=WAIT_MS)
        hover_everything(lab)
        assert ran(lab.page) == 0
        assert "onerror" in lab.output(6), "the name of the error is not shown"


def hover_everything(lab: LabPage) -> None:
    """Rest the pointer on the views' drawings, whose tooltips show the names."""
    for canvas in lab.page.locator(".hvd-timeline canvas, .hvd-metrics canvas").all()[:6]:
        box = canvas.bounding_box()
        if box is not None:
            for share in (0.2, 0.5, 0.8):
                canvas.hover(position={"x": box["width"] * share, "y": box["height"] / 2}, force=True)
