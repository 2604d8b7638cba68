"""Ranks that ask, in plain IPython, in `jupyter console`, and where no user can be asked."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import nbformat
import pexpect  # type: ignore[import-untyped]  # has no types
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from support.patience import PATIENCE


def spawn(tmp_path: Path, *arguments: str) -> pexpect.spawn[str]:
    environment = os.environ | {
        "IPYTHONDIR": str(tmp_path),
        "TERM": "xterm",
        "JUPYTER_CONFIG_DIR": str(tmp_path),
    }
    return pexpect.spawn(
        sys.executable,
        ["-m", *arguments],
        env=environment,
        encoding="utf-8",
        timeout=PATIENCE,
        dimensions=(40, 150),
        cwd=str(tmp_path),
    )


def interrupt_input(child: pexpect.spawn[str]) -> None:
    """Press Ctrl-C at a prompt.

    Python's input() loses a signal that comes after it has shown the prompt and before it waits for typed text.
    """
    stat = Path(f"/proc/{child.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "S":  # of its main thread
        time.sleep(0.01)
    child.sendintr()


@pytest.mark.parametrize(
    "arguments",
    [
        ("IPython", "--no-banner", "--simple-prompt"),
        ("jupyter_console", "--simple-prompt"),
    ],
    ids=["ipython", "console"],
)
def test_ranks_ask_where_one_types(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    child = spawn(tmp_path, *arguments)
    try:
        child.expect(r"In \[?.*1")
        child.sendline("%load_ext hvdlab")
        child.expect(r"In \[?.*2")
        child.sendline("%hvd_run -np 2 print('got', input('name? '))")
        child.expect_exact("[rank 0] (others wait, @? tells) name? ")
        child.sendline("all: Ada")
        child.expect_exact("[0,1] got Ada")
        child.expect(r"In \[?.*3")
        child.sendline(
            "%hvd_run import os; rank = int(os.environ['RANK']); rank and breakpoint(); print(rank)"
        )
        child.expect_exact("[rank 1] ipdb> ")
        child.sendline("p 'ra' + 'nk', rank")
        child.expect_exact("('rank', 1)")
        child.expect_exact("[rank 1] ipdb> ")
        interrupt_input(child)
        child.expect("KeyboardInterrupt")
        child.expect(r"In \[?.*4")
        child.sendline("%hvd_run print(6 * 7)")  # the ranks are well
        child.expect_exact("[0,1] 42")
        child.expect(r"In \[?.*5")
        child.sendline("exit")
        child.expect(pexpect.EOF)
    finally:
        child.close(force=True)


def test_a_program_that_runs_notebooks_is_told_what_to_do(tmp_path: Path) -> None:
    cells = ["%load_ext hvdlab", "%%hvd_run -np 2\ninput('name? ')"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    client = NotebookClient(notebook, timeout=PATIENCE, resources={"metadata": {"path": str(tmp_path)}})
    with pytest.raises(CellExecutionError) as caught:
        client.execute()
    assert "input() can't ask: what runs this notebook takes no input" in str(caught.value)
    assert "%hvd_push" in str(caught.value)
