"""The kernel whose cells run on all ranks, in JupyterLab."""

from __future__ import annotations

from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytest.importorskip("ipywidgets")
pytest.importorskip("playwright.sync_api")

from lab_page import CHROMIUM, LabPage, lab_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
    pytest.mark.timeout(240),
]

SLIDER = """\
import ipywidgets, os
slider = ipywidgets.IntSlider(value=5, description=f"slider {os.environ['RANK']}")
slider"""
TRAIN = """\
import numpy as np
from hvdlab.collectives import api, context
context.init()
for _ in range(20): api.allreduce(np.ones(8), name='loss')"""
VIEW = ".jp-HvdlabTimeline .hvd-timeline"


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
        assert "rank 1 failed" in lab.finish(2)
        check_panel(lab)

        lab.page.keyboard.press("Escape")
        lab.page.keyboard.press("Control+Shift+L")
        card = lab.page.locator(".jp-LauncherCard[data-category=Notebook]", has_text="Python 3 (hvdlab)")
        card.wait_for()
        assert card.locator("img").get_attribute("src").endswith("logo-svg.svg")


def check_panel(lab: LabPage) -> None:
    """The panel finds the kernel's ranks by itself, and goes from a span to its line."""
    lab.finish(3)
    lab.page.locator(".jp-HvdlabStatus [role=button]", has_text="3/3 ranks").click()
    lab.page.wait_for_function(f"() => document.querySelector('{VIEW}')?.hvdlab?.summary().spans >= 60")
    lab.page.locator(f"{VIEW} input[type=search]").fill("loss")
    lab.page.keyboard.press("Enter")
    lab.page.locator(f"{VIEW} .hvd-details :text('cell [4] line 4')").first.click()
    lab.page.locator(".jp-StatusBar-Widget :text('Ln 4, Col 1')").wait_for()
