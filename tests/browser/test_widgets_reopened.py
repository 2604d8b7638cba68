"""A page is closed and opened again: the widgets of ranks are there, as they were, and live."""

from __future__ import annotations

from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytest.importorskip("ipywidgets")
pytest.importorskip("playwright.sync_api")

from lab_page import CHROMIUM, lab_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
    pytest.mark.timeout(240),
]

SLIDER = """\
import ipywidgets, os
slider = ipywidgets.IntSlider(value=5, description=f"slider {os.environ['RANK']}")
slider"""


def test_widgets_of_ranks_live_on_in_a_page_that_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDLAB_PRELOAD", "")
    kernelspec = {"name": "hvdlab", "display_name": "Python 3 (hvdlab)"}
    notebook = new_notebook(
        cells=[new_code_cell(SLIDER), new_code_cell("slider.value")],
        metadata={"kernelspec": kernelspec, "hvdlab": {"np": 2}},
    )
    with lab_page(tmp_path, notebook) as lab:
        lab.run(0)
        lab.wait_until_ended(0)
        sliders = lab.page.locator(".jp-OutputArea .widget-slider")
        sliders.nth(1).locator(".noUi-handle").press("ArrowRight")
        sliders.nth(1).locator("text=6").wait_for()
        assert lab.finish(1).splitlines()[-2:] == ["[0] 5", "[1] 6"]
        with lab.page.expect_response(lambda one: one.request.method == "PUT" and one.ok):
            lab.page.keyboard.press("Control+s")
        lab.leave()

        lab.come_back()
        lab.wait_until_idle()
        sliders = lab.page.locator(".jp-OutputArea .widget-slider")
        sliders.nth(1).locator("text=6").wait_for()
        handle = sliders.nth(0).locator(".noUi-handle")
        for _ in range(2):
            handle.press("ArrowRight")
        sliders.nth(0).locator("text=7").wait_for()
        assert lab.finish(1).splitlines()[-2:] == ["[0] 7", "[1] 6"]
