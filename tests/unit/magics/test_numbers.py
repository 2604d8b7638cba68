"""The number of a cell, as the notebook shows it."""

from __future__ import annotations

from support.fakes.notebook import Notebook


def test_ranks_know_the_cell_by_the_number_of_the_notebook(notebook: Notebook) -> None:
    notebook.run("%%hvd_run -np 2\nx = 1")
    ran = notebook.run("%%hvd_run --out r\nx")
    assert ran.stdout.startswith("Out[2]: ")
    assert notebook.shell.user_ns["r"].label == "[2]"
