"""Every notebook of ``examples/`` runs as a user would run it, in a real kernel."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from spmd_kernel import offer_kernel

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.name)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.name.startswith("keras") and find_spec("tensorflow") is None:
        pytest.skip("needs TensorFlow")
    offer_kernel(tmp_path, monkeypatch)
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(EXAMPLES)}}).execute()


def test_notebooks_are_committed_without_outputs() -> None:
    for path in EXAMPLES.glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        dirty = [cell.id for cell in notebook.cells if cell.cell_type == "code" and cell.outputs]
        assert not dirty, f"{path.name}: {dirty}"
