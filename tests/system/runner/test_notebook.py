"""``hvdlab.run`` in a notebook."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.jupyter.live_kernel import LiveKernel


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveKernel]:
    kernel = LiveKernel(tmp_path_factory.mktemp("kernel"))
    yield kernel
    kernel.close()


def test_functions_of_a_notebook(kernel: LiveKernel) -> None:
    cell = kernel.run(
        "import os, time, hvdlab\n"
        "factor = 3\n"
        "def work(seconds):\n"
        "    print('begun', flush=True)\n"
        "    time.sleep(seconds)\n"
        "    return factor * int(os.environ['RANK'])\n"
        "hvdlab.run(work, (1.5,), np=2)"
    )
    assert cell.error is None
    assert cell.of("execute_result")[0]["data"]["text/plain"] == "[0, 3]"
    assert sorted(cell.lines()) == ["[0]<stdout>:begun", "[1]<stdout>:begun"]
    ended = max(at for at, kind, _ in cell.messages if kind == "execute_result") - cell.begun
    assert ended - cell.first("[1]<stdout>:begun") > 1.0  # it was shown while it ran

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
