"""Whole notebooks, and no leftovers when their kernel ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import nbformat
import pexpect  # type: ignore[import-untyped]  # has no types
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from support.jupyter.live_kernel import LiveKernel
from support.patience import GONE, PATIENCE


def test_a_notebook_stops_at_a_failed_cell_and_leaves_no_process(tmp_path: Path) -> None:
    cells = ["%load_ext hvdlab", "%%hvd_run -np 2\nprint('a')\n1 / 0", "print('never')"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    client = NotebookClient(
        notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    with pytest.raises(CellExecutionError) as failure:
        asyncio.run(client.async_execute())
    assert (failure.value.ename, failure.value.evalue) == ("ZeroDivisionError", "division by zero")
    assert "ranks 0,1 failed with the same error" in str(failure.value)
    assert notebook.cells[1].outputs[0].text == "[0,1] a\n"
    assert notebook.cells[2].outputs == []


def test_ending_the_kernel_ends_the_ranks(tmp_path: Path) -> None:
    kernel = LiveKernel(tmp_path)
    kernel.run("%load_ext hvdlab")
    kernel.run("%%hvd_run -np 2 --out pids\nimport os; os.getpid()")
    pids = [int(p) for p in kernel.run("print(*pids)").text().split()]
    processes = [psutil.Process(pid) for pid in pids]
    kernel.close()
    gone, alive = psutil.wait_procs(processes, timeout=GONE)
    assert len(gone) == 2, alive


SESSION = r"""
%load_ext hvdlab
%hvd_run -np 2 print('hello')
x = 3
%hvd_run 1 / 0
%hvd_run 5
"""


def _terminal(directory: Path) -> pexpect.spawn[str]:
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(directory),
        "IPYTHONDIR": str(directory),
        "TERM": "xterm",
        "PYTHONUNBUFFERED": "1",
    }
    arguments = ["-m", "IPython", "--colors=nocolor", "--no-banner", "--no-confirm-exit", "--simple-prompt"]
    return pexpect.spawn(
        sys.executable, arguments, cwd=str(directory), env=environment, encoding="utf-8", timeout=PATIENCE
    )


def test_ctrl_c_in_a_terminal_interrupts_the_ranks_once(tmp_path: Path) -> None:
    terminal = _terminal(tmp_path)
    try:
        terminal.expect("In ")
        terminal.sendline("%load_ext hvdlab")
        terminal.sendline("%hvd_run -np 2 import time; x = 7; print('begun'); time.sleep(60)")
        terminal.expect_exact("[0,1] begun")
        terminal.sendintr()
        terminal.expect("KeyboardInterrupt: ranks 0,1 were interrupted")
        terminal.sendline("%hvd_run print('x is', x)")
        terminal.expect_exact("[0,1] x is 7")
        terminal.sendline(
            "%hvd_run import os, sys; sys.stderr.write('\\r10%'); "
            "[time.sleep(.01) for _ in iter(lambda: os.path.exists('shown'), True)]; sys.stderr.write('\\r20%\\n')"
        )
        terminal.expect_exact("[0,1] 10%")
        (tmp_path / "shown").touch()
        terminal.expect_exact("\r\x1b[K")
        terminal.expect_exact("[0,1] 20%\r\n")
        terminal.sendline("exit")
        terminal.expect(pexpect.EOF)
    finally:
        terminal.close(force=True)


def test_a_terminal_session_shows_the_same(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "IPython",
        "--colors=nocolor",
        "--no-banner",
        "--no-confirm-exit",
        "--quick",
    ]
    ran = subprocess.run(
        command,
        input=SESSION,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "IPYTHONDIR": str(tmp_path)},
        check=False,
    )
    assert "[0,1] hello" in ran.stdout
    assert "ranks 0,1 failed with the same error" in ran.stdout
    assert "[0,1] 5" in ran.stdout
