"""A real InteractiveShell with the magics loaded over a fake pool."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from hvdlab.magics.extension import Extension
from hvdlab.magics.notebook_pool import NotebookPool
from jupyter_loop import jupyter_loop  # noqa: F401  # fixture
from magics_fakes import FakePool, Notebook


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance(config=config)
    extension = Extension(shell, NotebookPool(shell, FakePool))  # type: ignore[arg-type]
    extension.load()
    yield Notebook(shell, extension)
    extension.unload()
    shell.atexit_operations()
    atexit.unregister(shell.atexit_operations)
    InteractiveShell.clear_instance()
