"""Threads and displays that outlive a cell on its ranks, in a real kernel: prints of threads and tasks, and updates of
displays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.jupyter.live_kernel import Cell, LiveKernel
from support.leaks import no_leak_check as leak_check  # noqa: F401  # ranks come and go in the kernel that all tests share
from support.patience import eventually

PREPARE = """\
%%hvd_run -np 2
import asyncio, os, threading, time
from IPython.display import display
rank = int(os.environ['RANK'])
def wait_for(name):
    while not os.path.exists(name): time.sleep(0.01)
"""

LATE = """\
%%hvd_run
def late():
    wait_for('{go}')
    print('late of', rank)
threading.Thread(target=late).start()
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveKernel]:
    kernel = LiveKernel(tmp_path_factory.mktemp("kernel"), prepare=["%load_ext hvdlab", PREPARE])
    yield kernel
    kernel.close()


def go(kernel: LiveKernel, name: str) -> None:
    (kernel.directory / name).touch()


def has(cell: Cell, *lines: str) -> bool:
    return all(line in cell.lines() for line in lines)


def test_a_thread_prints_under_the_cell_that_started_it_while_none_runs(kernel: LiveKernel) -> None:
    cell = kernel.run(LATE.format(go="idle"))
    assert cell.text() == ""
    go(kernel, "idle")
    kernel.until(lambda: has(cell, "[0] late of 0", "[1] late of 1"))
    number = cell.reply["execution_count"]
    assert has(kernel.run(f"%hvd_output {number}"), "[0] late of 0", "[1] late of 1")


def test_a_thread_prints_under_the_cell_that_started_it_while_another_fails(kernel: LiveKernel) -> None:
    cell = kernel.run(LATE.format(go="busy"))
    other = kernel.send("%%hvd_run\nprint('other')\nwait_for('fail')\n1 / 0")
    go(kernel, "busy")
    kernel.until(lambda: has(cell, "[0] late of 0", "[1] late of 1"))
    go(kernel, "fail")
    kernel.finish(other)
    assert other.text() == "[0,1] other\n"
    assert other.error is not None
    assert other.error["ename"] == "ZeroDivisionError"


def test_a_process_that_outlives_its_cell_gets_all_its_output_shown_or_recorded(kernel: LiveKernel) -> None:
    """It waits for room, and gets it: 30 MB are more than may be on their way."""
    cell = kernel.run(
        "%%hvd_run --ranks 0\nimport subprocess\n"
        "p = subprocess.Popen('until [ -e flood ]; do sleep 0.05; done; yes ' + 9999 * 'x' + ' | head -n 3000; '"
        "                     'echo THE END; touch flooded', shell=True)"
    )
    assert cell.error is None, cell.error
    go(kernel, "flood")
    eventually((kernel.directory / "flooded").exists)
    assert kernel.run("%%hvd_run\nprint('next')").text().endswith("[0,1] next\n")
    number = cell.reply["execution_count"]

    def recorded() -> str:
        kernel.run(f"%hvd_output {number} --to written")
        return (kernel.directory / "written").read_text()

    eventually(lambda: "THE END" in recorded())
    assert recorded().count("x") == 3000 * 9999


def test_a_task_and_an_uncaught_error_of_a_thread_are_shown(kernel: LiveKernel) -> None:
    cell = kernel.run(
        "%%hvd_run\n"
        "async def later():\n"
        "    while not os.path.exists('task'): await asyncio.sleep(0.01)\n"
        "    print('from a task')\n"
        "    threading.Thread(target=lambda: 1 / 0).start()\n"
        "task = asyncio.create_task(later())"
    )
    kernel.run("%%hvd_run\nNone")
    go(kernel, "task")
    kernel.until(lambda: has(cell, "[0,1] from a task") and "ZeroDivisionError" in cell.text("stderr"))


def test_a_handle_updates_the_display_of_an_earlier_cell(kernel: LiveKernel) -> None:
    first = kernel.run("%%hvd_run\nhandle = display(f'first {rank}', display_id='dd')")
    areas = {one["data"]["text/plain"]: one["transient"]["display_id"] for one in first.of("display_data")}
    assert set(areas) == {"[0] 'first 0'", "[1] 'first 1'"}
    second = kernel.run("%%hvd_run\nhandle.update(f'second {rank}')")
    assert second.of("display_data") == []
    updates = {
        one["transient"]["display_id"]: one["data"]["text/plain"] for one in second.of("update_display_data")
    }
    assert updates == {
        areas["[0] 'first 0'"]: "[0] 'second 0'",
        areas["[1] 'first 1'"]: "[1] 'second 1'",
    }


def test_clearing_a_widgets_output_leaves_the_cells(kernel: LiveKernel) -> None:
    pytest.importorskip("ipywidgets")
    cell = kernel.run(
        "%%hvd_run\n"
        "import ipywidgets\n"
        "print('important')\n"
        "out = ipywidgets.Output()\n"
        "display(out)\n"
        "with out:\n"
        "    print('gone')\n"
        "with out:\n"
        "    out.clear_output(wait=True)\n"
        "    print('inside'); display('shown inside')\n"
        "print('after', [one.get('text') or one['data']['text/plain'] for one in out.outputs])"
    )
    assert cell.error is None, cell.error
    assert cell.of("clear_output") == []
    inside = ["inside\n", "'shown inside'"]
    assert cell.text() == f"[0,1] important\n[0,1] after {inside}\n"
