"""How the panel is found, set up and used without a pointer, in a real browser."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytest.importorskip("jupyterlab")
pytest.importorskip("playwright.sync_api")

from support.jupyter.chromium import CHROMIUM, page_errors
from support.jupyter.lab_page import LabPage, lab_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
]

WAIT_MS = 180_000  # limit of each wait for the page, in ms
LOAD, RUN = range(2)
CELLS = [
    "%load_ext hvdlab",
    """\
%%hvd_run -np 2
import numpy as np
import hvdlab.numpy as hvd
from hvdlab.collectives import context
context.init()
for _ in range(20): hvd.allreduce(np.ones(8), name='loss')""",
]
PANEL = ".jp-HvdlabTimeline"
VIEW = f"{PANEL} .hvd-timeline"


def test_it_is_found_set_up_and_used_with_keys(tmp_path: Path) -> None:
    notebook = new_notebook(
        cells=[new_code_cell(source) for source in CELLS],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    with lab_page(tmp_path, notebook, width=1400, height=1000, many=True) as lab:
        errors = page_errors(lab.page)
        check_launcher(lab)
        lab.page.locator(".lm-TabBar-tab", has_text="notebook.ipynb").click()
        for cell in (LOAD, RUN):
            lab.finish(cell)
        wait(lab, "api.summary().spans === 40")
        check_menus(lab)
        check_keys(lab)
        check_tab_order(lab)
        check_settings(lab)
        wait_until_kept(tmp_path / "settings" / "@hvdlab" / "labextension" / "plugin.jupyterlab-settings")
        check_place(lab)
        assert errors == []


def check_launcher(lab: LabPage) -> None:
    """Check that its card opens it, with Enter as well."""
    lab.command("New Launcher")
    card = lab.page.locator(".jp-LauncherCard", has_text="Timeline of the Ranks")
    card.wait_for(timeout=WAIT_MS)
    card.focus()
    assert card.locator("svg, img").count(), "it has no icon"
    lab.page.keyboard.press("Enter")
    lab.page.locator(f"{PANEL} .jp-HvdlabPanel-empty", has_text="notebook.ipynb has no ranks yet").wait_for(
        timeout=WAIT_MS
    )


def check_menus(lab: LabPage) -> None:
    labels = lab.page.locator(".lm-Menu-item:visible .lm-Menu-itemLabel")
    lab.page.locator(".lm-MenuBar-item", has_text="View").click()
    labels.locator("text='Timeline of the Ranks'").wait_for(timeout=WAIT_MS)
    lab.page.keyboard.press("Escape")
    lab.page.locator(".lm-MenuBar-item", has_text="File").click()
    item = lab.page.locator(".lm-Menu-item", has_text="Save Timeline of the Ranks as Chrome Trace")
    item.wait_for(timeout=WAIT_MS)
    assert "lm-mod-disabled" not in str(item.get_attribute("class"))
    lab.page.keyboard.press("Escape")


def check_keys(lab: LabPage) -> None:
    """Check that the command puts the focus there; W, A, S, D and arrows move, Escape leads out of an opened part."""
    lab.command("Timeline of the Ranks")
    lab.page.wait_for_function(
        f"document.activeElement === document.querySelector('{VIEW} .hvd-plot canvas')"
    )
    press = lab.page.keyboard.press

    def seen() -> tuple[float, float]:
        return api(lab, "view.from"), api(lab, "view.to")

    press("f")
    everything = seen()
    press("w")
    near = seen()
    assert everything[0] < near[0] < near[1] < everything[1]
    press("s")
    assert seen()[1] - seen()[0] > near[1] - near[0]
    for back, on in (("a", "d"), ("ArrowLeft", "ArrowRight")):
        press("w")
        begin = seen()[0]
        press(on)
        moved = seen()[0]
        assert moved > begin
        press(back)
        assert seen()[0] < moved
    press("f")
    assert seen() == everything
    help_box = lab.page.locator(f"{VIEW} .hvd-help")
    press("?")
    help_box.wait_for(state="visible")
    press("Escape")
    help_box.wait_for(state="hidden")
    press("]")
    spoken = lab.page.locator(f"{VIEW} .hvd-unseen[aria-live=polite]")
    assert "allreduce loss" in spoken.inner_text()
    press("Escape")
    press("/")
    assert active(lab) == "Search tensors by name"
    lab.page.keyboard.type("lo")
    lab.page.locator(f"{VIEW} .hvd-bar [aria-live]", has_text="1 name").wait_for()
    press("Escape")
    assert "Collectives of each rank" in active(lab)


def check_tab_order(lab: LabPage) -> None:
    """Check that Tab goes through everything, from the menu of pools to the last button, and out again."""
    lab.page.locator(f"{PANEL} .jp-HvdlabPanel-source select").focus()
    found = [active(lab)]
    while True:
        lab.page.keyboard.press("Tab")
        if not lab.page.evaluate(f"document.activeElement.closest('{PANEL}') !== null"):
            break
        found.append(active(lab))
        assert len(found) < 60, "there is no way out"
    assert all(found), "something has no name"
    assert found[:2] == ["Whose ranks are shown", "Search tensors by name"]
    canvas = next(i for i, name in enumerate(found) if name.startswith("Collectives of each rank"))
    assert {"Stand still (Space)", "Keys (?)"} & set(
        found[2:canvas]
    ) or "Follow what happens (Space)" in found
    regions = lab.page.locator(
        f"{VIEW}[role=region][aria-label], {VIEW} canvas[role=application][aria-describedby]"
    )
    assert regions.count() == 2


def check_settings(lab: LabPage) -> None:
    """Check that each one changes something, at once."""
    lab.page.locator(".lm-TabBar-tab", has_text="notebook.ipynb").click()  # they open where the front is
    lab.command("Settings Editor")
    lab.page.locator(".jp-PluginList-entry", has_text="Ranks timeline").click()
    form = lab.page.locator(".jp-SettingsForm:visible", has_text="Table of ranks")
    form.wait_for(timeout=WAIT_MS)

    def box(name: str) -> Any:
        return form.locator("label", has_text=name).first

    box("Table of ranks").click()
    lab.page.locator(f"{PANEL} .hvd-ranks tbody tr").nth(1).wait_for(timeout=WAIT_MS)
    status = lab.page.locator(".jp-HvdlabStatus .jp-StatusBar-TextItem")
    status.wait_for()
    box("Status item").click()
    status.wait_for(state="hidden", timeout=WAIT_MS)
    box("Status item").click()
    status.wait_for(timeout=WAIT_MS)
    form.locator("input[type=number], input[id$=spans]").first.fill("20000")
    wait(lab, "api.store.limit === 20000 && api.summary().spans === 40")
    box("Follow what happens").click()
    form.locator("select").select_option(label="Beside the notebook")


def check_place(lab: LabPage) -> None:
    """Check that the next one opens at the place asked for, standing still, and is there when the page is loaded
    again."""
    lab.page.locator(".lm-TabBar-tab", has_text="notebook.ipynb").click()
    lab.page.locator(".lm-TabBar-tab", has=lab.page.locator("text='Ranks'")).locator(
        ".lm-TabBar-tabCloseIcon"
    ).click()
    lab.page.locator(PANEL).wait_for(state="detached")
    lab.page.locator(".jp-HvdlabStatus [role=button]").focus()
    lab.page.keyboard.press("Enter")
    wait(lab, "api.summary().spans === 40 && api.store.limit === 20000")
    # Where it is comes to rest after the first drawing.
    lab.page.wait_for_function(
        f"""() => {{
            const at = node => document.querySelector(node)?.getBoundingClientRect();
            const [book, panel] = [at('.jp-NotebookPanel'), at('{PANEL}')];
            return book && panel && panel.left >= book.right - 2 && Math.abs(panel.top - book.top) < 40;
        }}""",
        timeout=WAIT_MS,
    )
    for _ in range(2):
        wait(lab, "api.summary().spans === 40 && api.store.limit === 20000")
        assert lab.page.locator(f"{VIEW} .hvd-state").first.inner_text() == "paused"
        lab.page.locator(f"{PANEL} .hvd-ranks").wait_for()
        lab.page.reload()
    wait(lab, "api.summary().spans === 40")


def wait_until_kept(settings: Path) -> None:
    """JupyterLab saves settings after a moment, all at once."""
    deadline = time.monotonic() + WAIT_MS / 1000
    while '"area": "right"' not in settings.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def active(lab: LabPage) -> str:
    """Return a screen reader's name of the focused element."""
    name: str = lab.page.evaluate(
        """() => { const one = document.activeElement;
            return one.getAttribute('aria-label') || one.title || one.textContent.trim(); }"""
    )
    return name


def api(lab: LabPage, expression: str) -> Any:
    return lab.page.evaluate(f"document.querySelector('{VIEW}').hvdlab.{expression}")


def wait(lab: LabPage, condition: str) -> None:
    lab.page.wait_for_function(
        f"() => {{ const api = document.querySelector('{VIEW}')?.hvdlab; return api && ({condition}); }}",
        timeout=WAIT_MS,
    )
