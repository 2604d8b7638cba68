"""``hvdlab.run`` in a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.jupyter.live_kernel import LiveKernel
from support.patience import HOUR


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the working directory of the kernel and its ranks."""
    return tmp_path_factory.mktemp("kernel")


@pytest.fixture(scope="module")
def kernel(directory: Path) -> Iterator[LiveKernel]:
    kernel = LiveKernel(directory)
    yield kernel
    kernel.close()


def test_functions_of_a_notebook(kernel: LiveKernel, directory: Path) -> None:
    cell = kernel.send(
        "import os, time, hvdlab\n"
        "factor = 3\n"
        "def work(seconds):\n"
        "    print('begun', flush=True)\n"
        "    until = time.monotonic() + seconds\n"
        "    while time.monotonic() < until and not os.path.exists('shown'):\n"
        "        time.sleep(0.01)\n"
        "    return factor * int(os.environ['RANK'])\n"
        f"hvdlab.run(work, ({HOUR},), np=2)"
    )
    kernel.until(lambda: len(cell.lines()) == 2)  # while the ranks run
    (directory / "shown").touch()
    kernel.finish(cell)
    assert cell.error is None
    assert cell.of("execute_result")[0]["data"]["text/plain"] == "[0, 3]"
    assert sorted(cell.lines()) == ["[0]<stdout>:begun", "[1]<stdout>:begun"]
    (directory / "shown").unlink()

    cell = kernel.send("hvdlab.run(work, (100,), np=2)")
    kernel.until(lambda: len(cell.lines()) == 2)
    kernel.interrupt()
    kernel.finish(cell)
    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt"

    cell = kernel.run("hvdlab.run(lambda: 1 / 0, np=2)")
    assert cell.error is not None
    assert cell.error["ename"] == "ZeroDivisionError"
    assert "raised ZeroDivisionError: division by zero" in cell.error["evalue"]
