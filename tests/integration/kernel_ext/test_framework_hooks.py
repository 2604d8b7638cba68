"""The notebook side knows frameworks through one registry of hooks, and their names only there."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdlab.bindings import framework_hooks
from hvdlab.bindings.framework_hooks import (
    FrameworkHooks,
    devices_in_use,
    hooks_of,
    loaded,
    names,
    set_environment,
)
from hvdlab.kernel_ext.rank.object_tree import leaves_of

ROOMS = Path(__file__).parents[3]
NAMES = re.compile(r"\b(torch|tensorflow|jax|jaxlib|cupy)\b")
"""pandas and numpy are also what tables are given in, and what is computed with."""


def texts(tree: ast.AST) -> list[tuple[int, str]]:
    """Return names and texts of a module's code, without its docstrings."""
    found: list[tuple[int, str]] = []
    described = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in described:
            found.append((line, node.value))
        elif isinstance(node, ast.Name):
            found.append((line, node.id))
        elif isinstance(node, ast.Attribute):
            found.append((line, node.attr))
        elif isinstance(node, ast.Import):
            found += [(line, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((line, node.module or ""))
    return found


def named_in(files: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOMS)}:{line}: {text}"
        for path in files
        for line, text in texts(ast.parse(path.read_text(encoding="utf-8")))
        if NAMES.search(text)
    ]


def test_the_notebook_side_names_no_framework() -> None:
    assert (
        named_in([*(ROOMS / "kernel_ext").rglob("*.py"), ROOMS / "collectives" / "metrics" / "sampler.py"])
        == []
    )


def test_names_are_found_where_they_are() -> None:
    assert named_in([ROOMS / "src" / "hvdlab" / "bindings" / "framework_hooks" / "torch.py"])


def test_hooks_import_no_framework() -> None:
    script = (
        "import sys; from hvdlab.bindings import framework_hooks as f; [f.hooks_of(name) for name in f.names()]; "
        "assert list(f.loaded()) == []; print(sorted({*f.names(), 'hvdlab.torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_framework_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "madeup.py").write_text(
        "from hvdlab.bindings.framework_hooks import FrameworkHooks, NotOurs\n"
        "class Hooks(FrameworkHooks):\n"
        "    def parts(self, value):\n"
        "        if type(value).__name__ != 'MadeUp':\n"
        "            raise NotOurs\n"
        "        return [('.inside', value.inside())]\n"
        "    def current_device(self):\n"
        "        return 'madeup:0'\n"
        "HOOKS = Hooks()\n"
    )
    monkeypatch.setattr(framework_hooks, "__path__", [*framework_hooks.__path__, str(tmp_path)])
    monkeypatch.setitem(sys.modules, "madeup", None)
    names.cache_clear()
    try:
        assert "madeup" in names()
        before = list(loaded())
        monkeypatch.setitem(sys.modules, "madeup", SimpleNamespace())
        (new,) = set(loaded()) - set(before)
        assert new.current_device() == "madeup:0"
        kind: Any = type("MadeUp", (), {"inside": lambda self: 7, "__module__": "madeup"})
        assert [found.path for found in leaves_of(kind()).found] == ["", ".inside"]
    finally:
        names.cache_clear()
        hooks_of.cache_clear()
        sys.modules.pop(f"{framework_hooks.__name__}.madeup", None)


def test_half_imported_frameworks_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in names():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    for hooks in loaded():
        assert (hooks.array(object()), hooks.is_plain(int), hooks.current_device()) == (None, False, "")
        assert hooks.reduce(object(), move=True, apart=None) is NotImplemented
    assert devices_in_use() is None
    assert [found.kind for found in leaves_of([1]).found] == ["value", "value"]


def test_memory_on_gpus_is_what_torch_holds_on_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {0: 5 << 20, 1: 7 << 20}
    cuda = SimpleNamespace(
        is_initialized=lambda: True, device_count=lambda: 2, memory_reserved=held.__getitem__
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert framework_hooks.device_memory() == 12 << 20
    cuda.is_initialized = lambda: False
    assert framework_hooks.device_memory() == 0
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    assert framework_hooks.device_memory() == 0


def test_finding_live_tensors_leaves_tuples_that_are_being_filled_alone() -> None:
    """A thread that fills a tuple from a generator meanwhile would get a SystemError if anything referred to the tuple."""
    torch = pytest.importorskip("torch")
    hooks = framework_hooks.hooks_of("torch")
    tensor, parameter = torch.zeros(3), torch.nn.Parameter(torch.ones(2))

    def search(_: int) -> set[int]:
        return {id(one) for one in hooks.live_arrays()}

    for found in tuple(search(index) for index in range(5)):
        assert {id(tensor), id(parameter)} <= found


def test_each_has_hooks_of_its_own() -> None:
    assert {"numpy", "torch", "pandas"} <= set(names())
    assert all(type(hooks_of(name)) is not FrameworkHooks for name in names())
    assert [name for name in names() if hooks_of(name).preload] == ["numpy", "torch"]


def test_the_environment_that_frameworks_want_leaves_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = hooks_of("tensorflow").environment
    assert wanted
    for name in wanted:
        monkeypatch.delenv(name, raising=False)
    set_environment()
    assert {name: os.environ[name] for name in wanted} == dict(wanted)
    for name in wanted:
        monkeypatch.setenv(name, "the user's")
    set_environment()
    assert {os.environ[name] for name in wanted} == {"the user's"}
