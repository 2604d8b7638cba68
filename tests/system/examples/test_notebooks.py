"""Every notebook of ``examples/`` and of the tutorial runs as a user would run it, in a real kernel."""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from support.jupyter.spmd_kernel import offer_kernel

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
TUTORIAL = EXAMPLES.parent / "docs" / "tutorial"


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


def tutorial_script() -> ModuleType:
    spec = spec_from_file_location("execute_tutorial", TUTORIAL / "execute.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", tutorial_script().ORDER)
def test_a_tutorial_runs_and_fails_only_where_it_says_so(name: str) -> None:
    tutorial_script().execute(TUTORIAL / f"{name}.ipynb")


@pytest.mark.timeout(300)
def test_a_cell_of_a_tutorial_that_does_not_fail_as_announced_is_found(tmp_path: Path) -> None:
    script = tutorial_script()
    cell = new_code_cell("1 + 1", metadata={"tags": [script.FAILS]})
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(new_notebook(cells=[cell], metadata={"kernelspec": kernel}), tmp_path / "calm.ipynb")
    with pytest.raises(script.TutorialError, match=r"1 \+ 1"):
        script.execute(tmp_path / "calm.ipynb")


def test_tutorials_are_committed_with_their_outputs() -> None:
    script = tutorial_script()
    assert sorted(path.stem for path in TUTORIAL.glob("*.ipynb")) == sorted(script.ORDER)
    for name in script.ORDER:
        cells = nbformat.read(TUTORIAL / f"{name}.ipynb", as_version=4).cells
        counts = [cell.execution_count for cell in cells if cell.cell_type == "code"]
        assert counts == list(range(1, len(counts) + 1)), f"{name}: run `make tutorial`"
        outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
        failed = [output for output in outputs if output.output_type == "error"]
        expected = [cell for cell in cells if script.FAILS in cell.metadata.get("tags", ())]
        assert len(failed) == len(expected), name
        assert str(TUTORIAL.parents[1]) not in str(outputs), (
            f"{name}: it shows a path of the machine that ran it"
        )
