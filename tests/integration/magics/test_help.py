"""``%magic?`` of every magic: its usage, its options, and an example that works."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from hvdlab.magics.arguments import PARSERS
from hvdlab.magics.extension import MAGICS
from support.fakes.notebook import Notebook

NAMES = sorted({name for names in MAGICS.values() for name in names})

LOADED = """
import sys
from IPython.core.interactiveshell import InteractiveShell
from hvdlab.magics.extension import Extension
shell = InteractiveShell.instance()
Extension(shell).load()
print(*sys.modules)
"""
HEAVY = {
    "numpy",
    "anywidget",
    "hvdlab.collectives.engine.engine",
    "hvdlab.collectives.client",
    "hvdlab.kernel_ext.notebook.cells.driver",
    "hvdlab.kernel_ext.notebook.output.merge",
    "hvdlab.kernel_ext.notebook.pool",
    "hvdlab.launch.forkserver.children",
    "hvdlab.magics.cell_view",
    "hvdlab.magics.cell_strip",
    "hvdlab.magics.screens",
}
"""Modules that a thread imports while the user types the first cell, or that no cell may ever need."""


def docstrings(notebook: Notebook, name: str) -> list[str]:
    kinds = notebook.shell.magics_manager.magics.values()
    return [inspect.getdoc(magics[name]) or "" for magics in kinds if name in magics]


@pytest.mark.parametrize("name", NAMES)
def test_a_magic_explains_its_usage_with_an_example(notebook: Notebook, name: str) -> None:
    found = docstrings(notebook, name)
    assert found
    for text in found:
        assert f"usage: {PARSERS[name].prog}" in text
        assert f"example:\n  {PARSERS[name].prog}" in text


@pytest.mark.parametrize("name", NAMES)
def test_a_magic_explains_each_of_its_options(notebook: Notebook, name: str) -> None:
    for text in docstrings(notebook, name):
        for action in PARSERS[name]._actions:
            assert action.help, action.dest
            for option in action.option_strings:
                assert option in text
            for choice in action.choices or ():
                assert str(choice) in text


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_a_magic_is_accepted_by_it(name: str) -> None:
    parser = PARSERS[name]
    magic, _, line = parser.example.partition(" ")
    assert magic == parser.prog
    parsed = parser.parse(line)
    assert not parsed.help
    # An example without any option or word would explain nothing.
    defaults = {action.dest: action.default for action in parser._actions}
    assert vars(parsed) != defaults or len(parser._actions) == 1


@pytest.mark.parametrize("name", MAGICS["line"])
def test_a_line_magic_prints_its_help(notebook: Notebook, name: str) -> None:
    assert f"example:\n  %{name}" in notebook.run(f"%{name} --help").stdout


@pytest.mark.parametrize("name", MAGICS["cell"])
def test_a_cell_magic_prints_its_help(notebook: Notebook, name: str) -> None:
    ran = notebook.run(f"%%{name} --help\nx = 1")
    assert f"example:\n  %%{name}" in ran.stdout
    assert "x" not in notebook.shell.user_ns


def test_loading_imports_nothing_that_only_a_pool_needs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert HEAVY & loaded == set()
