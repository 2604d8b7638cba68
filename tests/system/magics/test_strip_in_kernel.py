"""The strip in a real kernel: which messages come, and that cells run, fail and stop as without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("anywidget")

from support.jupyter.live_kernel import Cell, LiveKernel
from support.leaks import no_leak_check as leak_check  # noqa: F401  # ranks come and go in the kernel that all tests share

STRIP = "application/vnd.jupyter.widget-view+json"

LOOP = """\
%%hvd_run {options}
while True:
    time.sleep(0.01)
    if float(hvd.allreduce(np.array(float(os.path.exists('{end}'))), name='end')): break
print('ended')
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveKernel]:
    directory = tmp_path_factory.mktemp("kernel")
    kernel = LiveKernel(
        directory,
        strip=True,
        prepare=[
            "%load_ext hvdlab",
            "%%hvd_run -np 2\nimport os, time, numpy as np, hvdlab.numpy as hvd\nhvd.init()",
        ],
    )
    yield kernel
    kernel.close()


def strips(cell: Cell) -> list[dict[str, Any]]:
    return [one["data"] for one in cell.of("display_data") if STRIP in one["data"]]


def updates(kernel: LiveKernel) -> list[dict[str, Any]]:
    """Return states of strips that went to the page; before ipykernel 7 they belong to the cell."""
    came = [*kernel.others, *(one for cell in kernel.cells.values() for one in cell.messages)]
    states = [
        (at, content["data"]["state"]["pace"])
        for at, kind, content in came
        if kind == "comm_msg" and "pace" in content["data"].get("state", {})
    ]
    return [state for _, state in sorted(states, key=lambda one: one[0])]


def end(kernel: LiveKernel, name: str) -> None:
    (kernel.directory / name).touch()


def test_it_lives_as_long_as_its_cell(kernel: LiveKernel) -> None:
    cell = kernel.send(LOOP.format(options="", end="first"))
    kernel.until(lambda: len(updates(kernel)) >= 4)
    end(kernel, "first")
    kernel.finish(cell)
    assert len(strips(cell)) == 1
    assert strips(cell)[0]["text/plain"].startswith("2 ranks · running [3]")
    *running, last_state = updates(kernel)
    assert running[-1]["rate"].endswith("collectives/s")
    assert not any(state["ended"] for state in running)
    assert last_state["ended"], "a page that shows the strip later reads that the cell has ended"
    assert cell.text() == "[0,1] ended\n"
    last = [content for _, kind, content in cell.messages if kind in ("display_data", "update_display_data")][
        -2:
    ]
    assert last[0]["data"] == {"text/plain": "", "text/html": ""}
    assert last[1]["data"]["text/plain"].startswith("2 ranks · ")


def test_an_interrupt_is_answered_as_without_it(kernel: LiveKernel) -> None:
    cell = kernel.send(
        "%%hvd_run\nprint('loops')\nwhile True: hvd.allreduce(np.ones(10, np.float32), name='x'); time.sleep(0.01)"
    )
    kernel.until(lambda: bool(strips(cell)))
    kernel.interrupt()
    kernel.finish(cell)
    assert cell.error is not None
    assert "ranks 0,1 were interrupted" in cell.error["evalue"]
    assert not [one for one in cell.of("display_data") if "in collectives" in str(one)], "no summary"
    after = kernel.run("%%hvd_run\nhvd.allreduce(np.ones(1, np.float32), op=hvd.Sum, name='sum').item()")
    assert [one["data"]["text/plain"] for one in after.of("execute_result")] == ["[0,1] 2.0"]


def test_a_cell_in_the_background_has_one_too(kernel: LiveKernel) -> None:
    cell = kernel.run(LOOP.format(options="--background", end="second"))
    kernel.until(lambda: bool(strips(cell)))
    assert kernel.run("1 + 1").error is None
    end(kernel, "second")
    kernel.until(lambda: any("in collectives" in str(one) for one in cell.of("display_data")))
    assert "[0,1] ended" in cell.text()


def test_a_setting_turns_it_off(kernel: LiveKernel) -> None:
    kernel.run("%env HVDLAB_STRIP=0")
    cell = kernel.run(
        "%%hvd_run\nfor _ in range(90): time.sleep(0.01); hvd.allreduce(np.ones(1, np.float32), name='x')"
    )
    assert cell.seconds > 0.8
    assert not cell.of("display_data")
