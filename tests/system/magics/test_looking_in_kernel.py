"""Looking into ranks from a real kernel, also while a cell runs on them."""

from __future__ import annotations

from pathlib import Path

from support.jupyter.live_kernel import LiveKernel

SETUP = """%%hvd_run -np 2
import os, time, threading
rank = int(os.environ['RANK'])
state = {'step': 3, 'rate': 0.1 * (1 + rank)}
class Endless:
    def __repr__(self):
        while True: pass
endless = Endless()
"""


def test_ranks_are_looked_into_while_they_run(tmp_path: Path) -> None:
    kernel = LiveKernel(tmp_path)
    try:
        kernel.run("%load_ext hvdlab")
        assert kernel.run(SETUP).error is None
        (shown,) = kernel.run("%hvd_diff state").of("execute_result")
        assert "state['rate']" in shown["data"]["text/plain"]
        assert "<th" in shown["data"]["text/html"]
        assert (
            kernel.run("%hvd_diff endless")
            .of("execute_result")[0]["data"]["text/plain"]
            .startswith("endless: ranks 0,1 agree")
        )
        assert "unknown option --nothing" in kernel.run("%hvd_diff --nothing").text("stderr")

        kernel.run("%%hvd_run --background\nwaiting = True\ntime.sleep(60)")
        table = ""
        while "waiting" not in table or "rank 0 is running" in table or "rank 1 is running" in table:
            table = kernel.run("%hvd_whos").of("execute_result")[0]["data"]["text/plain"]
        assert "are running a cell, so it may be changing" in table
        view = kernel.run("%hvd_whos 1").of("execute_result")[0]["data"]["text/plain"]
        assert "on rank 1" in view
        where = kernel.run("%hvd_where").of("execute_result")[0]["data"]["text/plain"]
        assert "time.sleep(60)" in where
        kernel.run("%hvd_pool stop")
    finally:
        kernel.close()
