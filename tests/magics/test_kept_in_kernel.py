"""A kept pool in real kernels: one is restarted, one is killed, and the next cell has the variables."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from live_kernel import LiveKernel

SET_UP = "%%hvd_run\nimport os\nx = {'rank': int(os.environ['RANK']), 'pid': os.getpid()}\nx['pid']"
LOOK = "%%hvd_run\nassert x == {'rank': int(os.environ['RANK']), 'pid': os.getpid()}\nprint('intact')"


def ranks_of(runtime: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["name"]):
        try:
            ours = process.environ().get("XDG_RUNTIME_DIR") == str(runtime)
        except psutil.Error:
            continue
        if ours and process.info["name"].startswith("hvd-") and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.mark.soak
def test_variables_outlive_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HVDLAB_PRELOAD", "")
    kernel = LiveKernel(tmp_path)
    try:
        kernel.run("%load_ext hvdlab")
        cell = kernel.run("%hvd_pool start 2 --keep mine")
        assert "ranks 0,1 are ready; `%hvd_pool attach mine` in another notebook finds them" in cell.text()
        assert kernel.run(SET_UP).error is None
        for end in ("restart", "kill"):
            if end == "kill":
                (pid,) = kernel.run("import os\nprint(os.getpid())").lines()
                os.kill(int(pid), signal.SIGKILL)
                psutil.wait_procs([p for p in psutil.Process().children() if p.pid == int(pid)], timeout=10)
            kernel.manager.restart_kernel(now=end == "kill")
            kernel.client.wait_for_ready(timeout=60)
            kernel.run("%load_ext hvdlab")
            assert "process" not in kernel.run("%hvd_pool list").text()
            assert kernel.run("%hvd_pool attach").lines() == ["ranks 0,1 are ready, with all variables"]
            cell = kernel.run(LOOK)
            assert cell.error is None, cell.error
            assert cell.lines() == ["[0,1] intact"]
        assert kernel.run("%hvd_pool stop").lines() == ["all ranks have ended"]
        kernel.run("%unload_ext hvdlab")
        _, alive = psutil.wait_procs(ranks_of(tmp_path), timeout=5)
        assert alive == []
    finally:
        kernel.close()
        for process in ranks_of(tmp_path):
            process.kill()
