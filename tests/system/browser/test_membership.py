"""Ranks come and go by the buttons of the membership views, in a real browser, while a cell trains on them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_notebook

pytest.importorskip("torch")
pytest.importorskip("jupyterlab")
pytest.importorskip("playwright.sync_api")

from playwright.sync_api import Locator

from hvdlab.collectives.text import format_ranks
from support.jupyter.chromium import CHROMIUM, page_errors
from support.jupyter.lab_page import LabPage, lab_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium"),
]

WAIT_MS = 180_000  # limit of each wait for the page, in ms
LOAD, MEMBERSHIP, VIEWS, SET_UP, TRAIN, STOP = range(6)
CELLS = [
    "%load_ext hvdlab\nimport hvdlab",
    "hvdlab.membership()",
    "from IPython.display import display\ndisplay(hvdlab.timeline(height=200)); display(hvdlab.metrics())",
    """\
%%hvd_run -np 2
import os, time, torch, hvdlab.torch as hvd
hvd.init()
state = hvd.elastic.TorchState(step=0, stop=0)

@hvd.elastic.run
def train(state):
    while not state.stop:
        state.step += 1
        time.sleep(0.02)
        state.stop = int(hvd.allreduce(torch.tensor(float(os.path.exists({end!r}))), name='stop', op=hvd.Sum) > 0)
        hvd.metric('step', state.step)
        state.commit()""",
    "%%hvd_run --elastic --min-np 1 --max-np 4\ntrain(state)\nprint('ended with', hvd.size())",
    "%hvd_pool stop",
]
PANEL = ".jp-HvdlabTimeline"


def test_a_pool_is_changed_by_buttons_while_it_trains(tmp_path: Path) -> None:
    end = tmp_path / "end"
    sources = [source.replace("{end!r}", repr(str(end))) for source in CELLS]
    notebook = new_notebook(
        cells=[new_code_cell(source) for source in sources],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    with lab_page(tmp_path, notebook, width=1400, height=1900) as lab:
        errors = page_errors(lab.page)
        lab.finish(LOAD)
        # Before there is any pool: it waits for one.
        lab.finish(MEMBERSHIP)
        lab.wait_for_text(MEMBERSHIP, "waiting for ranks")
        lab.finish(VIEWS)
        lab.finish(SET_UP)
        widget = View(lab.page.locator(".jp-Notebook .hvd-membership"))
        widget.wait_for_ranks(2)
        lab.run(TRAIN)
        widget.root.locator(".hvd-status", has_text="cell [5] trains on ranks 0,1").wait_for(timeout=WAIT_MS)
        grow(widget)
        survive(widget)
        ask_before_ranks_end(widget)
        refuse(widget)
        in_the_panel(lab, widget)
        end.touch()
        lab.wait_until_ended(TRAIN)
        assert "ended with 2" in lab.output(TRAIN)
        lab.finish(STOP)
        widget.root.locator(".hvd-status", has_text="stopped").wait_for(timeout=WAIT_MS)
        assert widget.button("Resize").is_disabled()
        assert lab.page.locator(".hvd-failures:visible").count() == 0
        assert errors == []
        keeps_its_tables(lab)


class View:
    """Membership view on the page."""

    def __init__(self, root: Locator) -> None:
        self.root = root

    def button(self, name: str) -> Locator:
        return self.root.get_by_role("button", name=name, exact=True)

    def resize(self, np: int) -> None:
        self.root.locator(".hvd-size").fill(str(np))
        self.button("Resize").click()

    def wait_until_said(self, text: str) -> None:
        self.root.locator(".hvd-said", has_text=text).wait_for(timeout=WAIT_MS)

    def wait_for_ranks(self, count: int) -> None:
        """Wait until so many are in the world."""
        self.root.page.wait_for_function(
            "([view, count]) => view.querySelectorAll('.hvd-members .hvd-state[data-state=running]').length === count",
            arg=[self.root.element_handle(), count],
            timeout=WAIT_MS,
        )

    def ranks(self) -> list[int]:
        """Return those in the world."""
        found: list[int] = self.root.locator(".hvd-members .hvd-state[data-state=running]").evaluate_all(
            "states => states.map(state => Number(state.closest('tr').dataset.rank))"
        )
        return found

    def pid(self, rank: int) -> int:
        return int(self.root.locator(f"tr[data-rank='{rank}'] td").nth(1).inner_text().split("·")[1])

    def history(self) -> list[str]:
        """Return the events of ranks and of the world, oldest first: ``1 died``, ``regrouped``."""
        found: list[str] = self.root.locator(".hvd-history tbody tr").evaluate_all(
            "rows => rows.map(row => row.cells[1].innerText + ' ' + row.cells[2].innerText)"
        )
        return [" ".join(word for word in text.split() if word.isascii()) for text in reversed(found)]

    def wait_until_happened(self, *happened: str) -> None:
        """Wait until all of these are in the history."""
        for _ in range(WAIT_MS // 100):
            if set(happened) <= set(self.history()):
                return
            self.root.page.wait_for_timeout(100)
        raise AssertionError(f"{happened} in {self.history()}")


def grow(view: View) -> None:
    """Add ranks: nothing ends by it, so nothing is asked."""
    view.resize(4)
    view.wait_until_said("the pool has 4 ranks")
    view.wait_for_ranks(4)
    assert not view.root.locator(".hvd-question").is_visible()
    view.root.locator(".hvd-status", has_text="trains on ranks 0-3").wait_for(timeout=WAIT_MS)
    view.wait_until_happened("2 joined", "3 joined", "2 admitted", "regrouped")


def survive(view: View) -> None:
    """Check that a rank that dies is shown so, and repaired by a button."""
    os.kill(view.pid(1), signal.SIGKILL)
    view.root.locator("tr[data-rank='1'] .hvd-state[data-state=lost]").wait_for(timeout=WAIT_MS)
    assert "killed by SIGKILL" in view.root.locator("tr[data-rank='1']").inner_text()
    view.button("Repair").click()
    view.wait_until_said("rank 1 is back")
    view.wait_for_ranks(4)
    history = view.history()
    assert history.index("1 died") < len(history) - 1 - history[::-1].index("1 joined")
    assert view.root.locator(".hvd-stretch[data-phase=missing]").count() == 1


def ask_before_ranks_end(view: View) -> None:
    before = view.pid(2)
    view.resize(2)
    question = view.root.locator(".hvd-question")
    assert "ranks 2, 3 would end" in question.inner_text()
    view.root.page.keyboard.press("Escape")
    assert not question.is_visible()
    view.resize(2)
    view.button("Keep them").click()
    assert not question.is_visible()
    assert view.pid(2) == before
    view.resize(2)
    view.button("End ranks 2, 3").click()
    view.wait_until_said("the pool has 2 ranks")
    view.wait_for_ranks(2)
    view.wait_until_happened("2 left", "3 left")


def refuse(view: View) -> None:
    """Check that a refusal is shown in the view, in the words of the pool."""
    view.resize(5)
    view.wait_until_said("5 ranks are more than --max-np 4 of cell [5]")


def in_the_panel(lab: LabPage, widget: View) -> None:
    """Check the same in the panel, whose kernel is busy with the cell; both show the actions of either."""
    lab.page.keyboard.press("Control+Shift+C")
    lab.command("Membership of the Ranks")
    panel = View(lab.page.locator(f"{PANEL} .hvd-membership"))
    panel.wait_for_ranks(2)
    panel.resize(3)
    panel.wait_until_said("the pool has 3 ranks")
    for view in (panel, widget):
        view.wait_for_ranks(3)
    panel.root.locator("tr[data-rank='2']").get_by_role("button", name="Restart rank 2").click()
    before = panel.pid(2)
    panel.root.locator(".hvd-question .hvd-ends").click()
    panel.wait_until_said("rank 2 started again, with empty memory")
    wait_until(lab, lambda: widget.pid(2) != before)
    panel.resize(2)
    panel.button("End rank 2").click()
    panel.wait_until_said("the pool has 2 ranks")
    widget.wait_for_ranks(2)


def wait_until(lab: LabPage, condition: Callable[[], bool]) -> None:
    for _ in range(WAIT_MS // 100):
        if condition():
            return
        lab.page.wait_for_timeout(100)
    raise AssertionError("it did not happen")


def keeps_its_tables(lab: LabPage) -> None:
    """Saved with the notebook, for readers without a kernel."""
    (still,) = (
        text
        for text in lab.page.evaluate(
            """() => [...document.querySelectorAll(".jp-Notebook-cell")[1].querySelectorAll(".jp-RenderedHTMLCommon")]
                .map(node => node.textContent)"""
        )
        if "ranks are there" in text
    )
    assert "the pool was resized" in still


MODEL_CELLS = [
    "%env HVDLAB_PRELOAD=torch,torch._dynamo\n%load_ext hvdlab\nimport hvdlab",
    "hvdlab.membership()",
    """\
%%hvd_run -np 2
import os, time, torch, hvdlab.torch as hvd
hvd.init()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, stop=0)

@hvd.elastic.run
def train(state):
    ranks = hvd.global_process_set.ranks
    if hvd.rank() == min(ranks):
        print('goes on with', list(ranks), flush=True)
    while not state.stop:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()  # a gradient of 1 on each rank
        optimizer.step()
        state.step += 1
        time.sleep(0.02)
        state.stop = int(hvd.allreduce(torch.tensor(float(os.path.exists({end!r}))), name='stop', op=hvd.Sum) > 0)
        state.commit()""",
    """\
%%hvd_run --elastic --min-np 1 --max-np 4
train(state)
print('ended with', hvd.size(), 'ranks,', state.step + model.weight.item(), 'steps too few')""",
    "%hvd_pool stop",
]
MODEL, TRAINED, STOPPED = 2, 3, 4


@pytest.mark.soak
def test_a_model_trains_through_ten_changes_that_are_shown(tmp_path: Path) -> None:
    end = tmp_path / "end"
    sources = [source.replace("{end!r}", repr(str(end))) for source in MODEL_CELLS]
    notebook = new_notebook(
        cells=[new_code_cell(source) for source in sources],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    with lab_page(tmp_path, notebook, width=1400, height=1900) as lab:
        errors = page_errors(lab.page)
        for cell in (LOAD, MEMBERSHIP, MODEL):
            lab.finish(cell)
        view = View(lab.page.locator(".jp-Notebook .hvd-membership"))
        lab.run(TRAINED)
        trains = Training(lab, view)
        trains.on([0, 1])
        for change, ranks, happened in TEN_CHANGES:
            trains.changes()
            change(view)
            trains.on(ranks)
            view.wait_until_happened(*happened)
            assert lab.page.locator(".hvd-failures:visible").count() == 0
        end.touch()
        lab.wait_until_ended(TRAINED)
        assert "ended with 3 ranks, 0.0 steps too few" in lab.output(TRAINED)
        lab.finish(STOPPED)
        assert errors == []


class Training:
    """Cell that trains, with its membership view."""

    def __init__(self, lab: LabPage, view: View) -> None:
        self._lab, self._view = lab, view
        #: How often training had begun, as shown under the cell, before the last change.
        self._begun = 0

    def changes(self) -> None:
        """A change is about to be made."""
        self._begun = self._lab.output(TRAINED).count("goes on with [")

    def on(self, ranks: list[int]) -> None:
        """Wait until training goes on with these ranks after the last change, and until the view shows just them."""
        self._lab.page.wait_for_function(
            """([cell, begun, wanted]) => {
                const shown = document.querySelectorAll(".jp-Notebook-cell")[cell].querySelector(".jp-OutputArea");
                const lines = (shown?.innerText ?? "").match(/goes on with \\[[^\\]]*\\]/g) ?? [];
                return lines.length > begun && lines[lines.length - 1] === wanted;
            }""",
            arg=[TRAINED, self._begun, f"goes on with {ranks}"],
            timeout=WAIT_MS,
        )
        self._view.wait_for_ranks(len(ranks))
        said = f"trains on {format_ranks(ranks)}, at least 1, at most 4"
        self._view.root.locator(".hvd-status", has_text=said).wait_for(timeout=WAIT_MS)
        assert self._view.ranks() == ranks


def resize(np: int, *ending: int) -> Callable[[View], None]:
    """By the view's button, which asks if ranks end by it."""

    def change(view: View) -> None:
        view.resize(np)
        if ending:
            view.root.locator(".hvd-question .hvd-ends").click()
        view.wait_until_said(f"the pool has {np} ranks")

    return change


def lose(*ranks: int) -> Callable[[View], None]:
    def change(view: View) -> None:
        for pid in [view.pid(rank) for rank in ranks]:
            os.kill(pid, signal.SIGKILL)
        for rank in ranks:
            view.root.locator(f"tr[data-rank='{rank}'] .hvd-state[data-state=lost]").wait_for(timeout=WAIT_MS)

    return change


def repair(view: View) -> None:
    view.button("Repair").click()
    view.wait_until_said("back, with empty memory")


def repair_and_grow(view: View) -> None:
    repair(view)
    resize(3)(view)


def restart(rank: int) -> Callable[[View], None]:
    def change(view: View) -> None:
        view.root.get_by_role("button", name=f"Restart rank {rank}").click()
        view.root.locator(".hvd-question .hvd-ends").click()
        view.wait_until_said(f"rank {rank} started again")

    return change


TEN_CHANGES: list[tuple[Callable[[View], None], list[int], list[str]]] = [
    (resize(3), [0, 1, 2], ["2 joined"]),
    (lose(0), [1, 2], ["0 died"]),
    (repair, [0, 1, 2], ["0 joined"]),
    (resize(4), [0, 1, 2, 3], ["3 joined"]),
    (lose(2, 3), [0, 1], ["2 died", "3 died"]),
    (repair, [0, 1, 2, 3], []),
    (restart(1), [0, 1, 2, 3], ["1 died", "1 joined"]),
    (resize(2, 2, 3), [0, 1], ["2 left", "3 left"]),
    (lose(1), [0], []),
    (repair_and_grow, [0, 1, 2], []),
]
"""Each with the ranks that train afterwards, and what the history has by then."""
