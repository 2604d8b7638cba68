"""The kernel whose cells run on all ranks, in JupyterLab."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytest.importorskip("ipywidgets")
pytest.importorskip("playwright.sync_api")

from support.jupyter.chromium import CHROMIUM
from support.jupyter.lab_page import LabPage, lab_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
    pytest.mark.timeout(600),
]

SLIDER = """\
import ipywidgets, os
slider = ipywidgets.IntSlider(value=5, description=f"slider {os.environ['RANK']}")
slider"""
TRAIN = """\
import numpy as np
import hvdlab.numpy as hvd
from hvdlab.collectives import context
context.init()
for _ in range(20): hvd.allreduce(np.ones(8), name='loss')"""
VIEW = ".jp-HvdlabTimeline .hvd-timeline"
WIDGET = "application/vnd.jupyter.widget-view+json"
WAIT = 60.0  # seconds until a wait for the notebook's file fails
PRESS_AGAIN = 3.0  # seconds after which a user who sees nothing saved presses the key once more


def test_a_notebook_gets_the_ranks_that_it_names_and_their_widgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDLAB_PRELOAD", "")
    cells = [
        new_code_cell(code)
        for code in (SLIDER, "slider.value", "if slider.value == 6: raise ValueError('six')", TRAIN)
    ]
    kernelspec = {"name": "hvdlab", "display_name": "Python 3 (hvdlab)"}
    notebook = new_notebook(cells=cells, metadata={"kernelspec": kernelspec, "hvdlab": {"np": 3}})
    with lab_page(tmp_path, notebook, many=True) as lab:
        lab.run(0)
        lab.wait_until_ended(0)
        sliders = lab.page.locator(".jp-OutputArea .widget-slider")
        sliders.nth(2).wait_for()
        assert sliders.count() == 3
        handle = sliders.nth(1).locator(".noUi-handle")
        handle.focus()
        handle.press("ArrowRight")
        sliders.nth(1).locator("text=6").wait_for()
        assert lab.finish(1).splitlines()[-2:] == ["[0,2] 5", "[1]   6"]
        open_again(lab, tmp_path / "work" / "notebook.ipynb")
        assert "rank 1 failed" in lab.finish(2)
        check_panel(lab)

        lab.page.keyboard.press("Escape")
        lab.page.keyboard.press("Control+Shift+L")
        card = lab.page.locator(".jp-LauncherCard[data-category=Notebook]", has_text="Python 3 (hvdlab)")
        card.wait_for()
        assert str(card.locator("img").get_attribute("src")).endswith("logo-svg.svg")


def open_again(lab: LabPage, path: Path) -> None:
    """Check that in a reopened page the ranks' widgets are unchanged, and live."""
    pressed, deadline = float("-inf"), time.monotonic() + WAIT
    while path.read_text(encoding="utf-8").count(WIDGET) < 3:
        now = time.monotonic()
        assert now < deadline, "Ctrl-S does not save"
        if lab.page.locator(".jp-Dialog").count():
            lab.page.locator(".jp-Dialog").get_by_role("button", name="Overwrite").click()
        elif now > pressed + PRESS_AGAIN:
            pressed = now
            lab.page.keyboard.press("Control+s")
        lab.page.wait_for_timeout(50)
    lab.leave()
    lab.come_back()
    lab.wait_until_idle()
    sliders = lab.page.locator(".jp-OutputArea .widget-slider")
    sliders.nth(1).locator("text=6").wait_for()
    for value in (6, 7):
        sliders.nth(0).locator(".noUi-handle").press("ArrowRight")
        sliders.nth(0).locator(f"text={value}").wait_for()
    # A page keeps a widget's change back until the kernel has taken the one before: the cell may be quicker.
    deadline = time.monotonic() + WAIT
    while (shown := lab.finish(1).splitlines()[-3:]) != ["[0] 7", "[1] 6", "[2] 5"]:
        assert time.monotonic() < deadline, shown


def check_panel(lab: LabPage) -> None:
    """Check that the panel finds the kernel's ranks by itself, and goes from a span to its line."""
    lab.finish(3)
    executed = lab.prompt(3).strip(":")  # its number depends on how often the cells before it were run
    lab.page.locator(".jp-HvdlabStatus [role=button]", has_text="3/3 ranks").click()
    lab.page.wait_for_function(f"() => document.querySelector('{VIEW}')?.hvdlab?.summary().spans >= 60")
    lab.page.locator(f"{VIEW} input[type=search]").fill("loss")
    lab.page.keyboard.press("Enter")
    lab.page.locator(f"{VIEW} .hvd-details :text('cell {executed} line 5')").first.click()
    lab.page.locator(".jp-StatusBar-Widget :text('Ln 5, Col 1')").wait_for()
