"""A kept pool in real kernels: one is restarted, one is killed, and the next cell has the variables."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from support.jupyter.live_kernel import LiveKernel
from support.patience import GONE, PATIENCE

SET_UP = "%%hvd_run\nimport os\nx = {'rank': int(os.environ['RANK']), 'pid': os.getpid()}\nx['pid']"
LATER = "%%hvd_run --background\nprint('began')\nopen(os.environ['DOOR']).read()\nprint('meanwhile')\n6 * 7"
TRAIN = """\
%%hvd_run
import time
print('training')
for step in range(10 ** 9):
    if os.path.exists(os.environ['DOOR']):
        break
    time.sleep(0.01)
print('trained', flush=True)
step > 0"""
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
                psutil.wait_procs(
                    [p for p in psutil.Process().children() if p.pid == int(pid)], timeout=PATIENCE
                )
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
        _, alive = psutil.wait_procs(ranks_of(tmp_path), timeout=GONE)
        assert alive == []
    finally:
        kernel.close()
        for process in ranks_of(tmp_path):
            process.kill()


@pytest.mark.soak
def test_what_a_cell_does_while_no_kernel_is_there_appears_under_the_attach(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HVDLAB_PRELOAD", "")
    monkeypatch.setenv("DOOR", str(tmp_path / "door"))
    os.mkfifo(tmp_path / "door")
    kernel = LiveKernel(tmp_path)
    try:
        kernel.run("%load_ext hvdlab")
        kernel.run("%hvd_pool start 1 --keep mine")
        kernel.run(SET_UP)
        kernel.run(LATER)
        kernel.manager.restart_kernel(now=True)
        kernel.client.wait_for_ready(timeout=60)
        (tmp_path / "door").write_text("go")
        kernel.run("%load_ext hvdlab")
        cell = kernel.run(
            "%hvd_pool attach\n"
            "from hvdlab.magics.extension import extension_of\n"
            "_ = extension_of(get_ipython()).session.pool.resumed[0].wait(60)"
        )
        assert cell.error is None, cell.error
        assert "of the notebook before" in cell.text()
        assert "meanwhile" in cell.text()
        assert "42" in cell.text()
        kernel.run("%hvd_pool stop")
        kernel.run("%unload_ext hvdlab")
    finally:
        kernel.close()
        for process in ranks_of(tmp_path):
            process.kill()


def test_a_restart_leaves_the_cell_in_the_foreground_running(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Jupyter's server interrupts a kernel before it asks it to shut down."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HVDLAB_PRELOAD", "")
    monkeypatch.setenv("DOOR", str(tmp_path / "door"))
    kernel = LiveKernel(tmp_path)
    try:
        kernel.run("%load_ext hvdlab")
        kernel.run("%hvd_pool start 2 --keep mine")
        assert kernel.run(SET_UP).error is None
        cell = kernel.send(TRAIN)
        kernel.until(lambda: "training" in cell.text())
        kernel.manager.restart_kernel(now=False)
        kernel.client.wait_for_ready(timeout=60)
        kernel.run("%load_ext hvdlab")
        cell = kernel.run("%hvd_pool attach")
        assert "cell [4] of the notebook before still runs on ranks 0,1" in cell.text()
        assert "interrupted" not in cell.text()
        (tmp_path / "door").touch()
        cell = kernel.run(LOOK)
        assert cell.error is None, cell.error
        cell = kernel.run("%%hvd_run\nassert step > 0\nprint('went on')")
        assert cell.lines() == ["[0,1] went on"]
        kernel.run("%hvd_pool stop")
        kernel.run("%unload_ext hvdlab")
    finally:
        kernel.close()
        for process in ranks_of(tmp_path):
            process.kill()
