"""How kernels with ranks begin and end: restarts, kills, and clients without stdin or a terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import pexpect  # type: ignore[import-untyped]  # has no types
import psutil
import pytest
from jupyter_client.provisioning.local_provisioner import LocalProvisioner
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from support.jupyter.live_kernel import LiveKernel
from support.patience import GONE

PIDS = "import os\nos.getpid()"


def rank_processes(kernel: LiveKernel) -> list[psutil.Process]:
    (result,) = kernel.run(PIDS).of("execute_result")
    lines = result["data"]["text/plain"].splitlines()
    return [psutil.Process(int(line.rpartition(" ")[2])) for line in lines]


def pid_of(kernel: LiveKernel) -> int:
    provisioner = kernel.manager.provisioner
    assert isinstance(provisioner, LocalProvisioner)
    assert provisioner.pid is not None
    return provisioner.pid


def family(kernel: LiveKernel) -> list[psutil.Process]:
    return psutil.Process(pid_of(kernel)).children(recursive=True)


def test_a_restart_brings_new_ranks_and_a_kill_leaves_no_process(tmp_path: Path) -> None:
    kernel = LiveKernel(tmp_path, name="hvdlab")
    try:
        before = rank_processes(kernel)
        old = family(kernel)
        kernel.run("x = 1")
        kernel.manager.restart_kernel()
        kernel.client.wait_for_ready(timeout=60)
        assert not psutil.wait_procs(old, timeout=GONE)[1]
        after = rank_processes(kernel)
        assert len(after) == len(before) == 2
        assert not set(before) & set(after)
        assert kernel.run("x").reply["ename"] == "NameError"

        processes = family(kernel)
        assert len(processes) >= 4
        kernel.send("import time\ntime.sleep(60)")
        os.kill(pid_of(kernel), signal.SIGKILL)
        assert not psutil.wait_procs(processes, timeout=GONE)[1]
    finally:
        kernel.close()


def test_a_kernel_that_is_shut_down_while_its_ranks_start_leaves_no_process(tmp_path: Path) -> None:
    kernel = LiveKernel(tmp_path, name="hvdlab")
    processes = family(kernel)
    kernel.close()
    assert not psutil.wait_procs(processes, timeout=GONE)[1]


def test_a_notebook_stops_at_the_first_error_and_its_metadata_says_how_many_ranks(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(
                "import os\nrank = int(os.environ['RANK'])\nint(os.environ['WORLD_SIZE'])"
            ),
            nbformat.v4.new_code_cell("assert rank != 2, 'a bad batch'"),
            nbformat.v4.new_code_cell("'never'"),
        ],
        metadata={"kernelspec": {"name": "hvdlab", "display_name": ""}, "hvdlab": {"np": 3}},
    )
    nbformat.write(notebook, tmp_path / "a.ipynb")
    client = NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}})
    with pytest.raises(CellExecutionError, match="a bad batch") as raised:
        client.execute(env=os.environ | {"JPY_SESSION_NAME": "a.ipynb"})
    assert raised.value.ename == "AssertionError"
    assert notebook.cells[0].outputs[-1].data["text/plain"] == "3"
    assert notebook.cells[2].execution_count is None


def test_what_is_wrong_with_the_wish_is_told_in_a_sentence(tmp_path: Path) -> None:
    kernel = LiveKernel(tmp_path, name="hvdlab", environment={"HVDLAB_NP": "many"})
    try:
        cell = kernel.run("1")
        assert cell.text("stderr") == "UsageError: HVDLAB_NP is to be a number of ranks from 1, not 'many'\n"
        assert kernel.run("%%local\n2").reply["status"] == "ok"
    finally:
        kernel.close()


def test_papermill_runs_a_notebook_and_its_parameters_reach_all_ranks(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell("x = 1", metadata={"tags": ["parameters"]}),
            nbformat.v4.new_code_cell("print(x)"),
        ],
        metadata={"kernelspec": {"name": "hvdlab", "display_name": "", "language": "python"}},
    )
    nbformat.write(notebook, tmp_path / "in.ipynb")
    command = [
        sys.executable,
        "-m",
        "papermill",
        "in.ipynb",
        "out.ipynb",
        "-p",
        "x",
        "5",
        "--no-progress-bar",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    out = json.loads((tmp_path / "out.ipynb").read_text())
    assert out["cells"][-1]["outputs"][0]["text"] == ["[0,1] 5\n"]


def test_a_console_works_and_leaves_nothing(tmp_path: Path) -> None:
    console = pexpect.spawn(
        sys.executable,
        ["-m", "jupyter_console", "--kernel", "hvdlab", "--simple-prompt"],
        cwd=str(tmp_path),
        timeout=60,
        encoding="utf-8",
        env=os.environ | {"TERM": "dumb"},
    )
    try:
        console.expect_exact("hvdlab")
        console.expect(r"In \[1\]:")
        console.sendline("print('he' + 'llo')")
        console.expect_exact("[0,1] hello")
        console.expect(r"In \[2\]:")
        console.sendline("6 * 7")
        console.expect(r"Out\[2\]: 42")
        console.expect(r"In \[3\]:")
        children = psutil.Process(console.pid).children(recursive=True)
        console.sendline("exit")
        console.expect(pexpect.EOF)
        assert not psutil.wait_procs(children, timeout=GONE)[1]
    finally:
        console.close(force=True)
