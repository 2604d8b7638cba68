"""The compiler of cells, and their transformation to Python."""

from __future__ import annotations

import ast
import asyncio
import gc
import inspect
import linecache
from collections.abc import Iterator
from types import CodeType
from typing import Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.macro import Macro
from IPython.core.prefilter import PrefilterChecker, PrefilterTransformer
from traitlets.config import Config

from hvdlab.kernel_ext.rank.cell_source import (
    LONGEST_KNOWN,
    LONGEST_PARSED,
    MOST_KNOWN,
    MOST_PARSED,
    CellCompiler,
    LinePrefilter,
    StaticTransforms,
)

MANY = 20


class Parser:
    """Garbage that parses when it is collected, as another thread does that goes on meanwhile."""

    collected = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        ast.parse("y = 2")
        Parser.collected += 1


@pytest.fixture
def eager_collector() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.collect()
    gc.set_threshold(20, 1, 1)
    yield
    gc.set_threshold(*thresholds)


@pytest.fixture
def shell() -> Any:
    shell = InteractiveShell(config=Config(HistoryManager={"enabled": False}))
    shell.user_ns.update(f=print, macro=Macro("x = 1\ny = 2\n"), env="a variable that hides a magic")
    return shell


@pytest.mark.usefixtures("eager_collector")
def test_a_cell_is_parsed_though_another_thread_parses_at_the_same_time(shell: Any) -> None:
    compiler = CellCompiler(shell)
    within = 0
    for _ in range(MANY):
        Parser()
        collected = Parser.collected
        tree = compiler.ast_parse("x = [" + "1, " * 100 + "]")
        within += Parser.collected > collected
        assert ast.unparse(tree).startswith("x = [1, 1")
    assert within


class CountedTransforms(TransformerManager):
    """IPython's transformers, with the number of cells whose tokens were looked at."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # IPython gives it no types
        self.tokenized = 0

    def do_token_transforms(self, lines: list[str]) -> list[str]:
        self.tokenized += 1
        done: list[str] = super().do_token_transforms(lines)  # type: ignore[no-untyped-call]  # as above
        return done


SOURCES = "x = 1", "x = %env HOME\ny = !ls", "%%time\npass", "print?", ">>> x = 1\n... \n"


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_that_comes_again_is_transformed_once(source: str) -> None:
    manager = CountedTransforms()
    transforms = StaticTransforms(manager)
    expected = TransformerManager().transform_cell(source)
    assert [transforms.transform_cell(source) for _ in range(3)] == [expected] * 3
    assert manager.tokenized == 1


@pytest.mark.parametrize("from_the_start", [True, False])
def test_a_users_transformer_is_called_for_each_cell(from_the_start: bool) -> None:
    manager = CountedTransforms()
    calls = []

    def number(lines: list[str]) -> list[str]:
        calls.append(lines)
        return [f"call = {len(calls)}\n", *lines]

    if from_the_start:
        manager.cleanup_transforms.append(number)
        transforms = StaticTransforms(manager)
    else:
        transforms = StaticTransforms(manager)
        transforms.transform_cell("x = 1")
        manager.cleanup_transforms.append(number)
    texts = [transforms.transform_cell("x = 1") for _ in range(2)]
    manager.cleanup_transforms.remove(number)
    assert texts == ["call = 1\nx = 1\n", "call = 2\nx = 1\n"]
    assert transforms.transform_cell("x = 1") == "x = 1\n"


def test_a_transformer_that_takes_the_place_of_ipythons_is_called() -> None:
    manager = CountedTransforms()
    transforms = StaticTransforms(manager)
    assert transforms.transform_cell("%env HOME") == "get_ipython().run_line_magic('env', 'HOME')\n"
    manager.token_transformers = []
    assert transforms.transform_cell("%env HOME") == "%env HOME\n"


def test_a_refused_source_is_refused_again() -> None:
    transforms = StaticTransforms(TransformerManager())
    for _ in range(2):
        with pytest.raises(SyntaxError):
            transforms.transform_cell("if x:\n  !ls\n y")


def test_a_long_source_is_not_kept() -> None:
    manager = CountedTransforms()
    transforms = StaticTransforms(manager)
    for source in ("x" * LONGEST_KNOWN, "x" * (LONGEST_KNOWN + 1)):
        for _ in range(2):
            transforms.transform_cell(source)
    assert manager.tokenized == 1 + 2


def test_sources_that_came_long_ago_are_forgotten() -> None:
    manager = CountedTransforms()
    transforms = StaticTransforms(manager)
    transforms.transform_cell("x = 'often'")
    for n in range(MOST_KNOWN + 10):
        transforms.transform_cell(f"x = {n}")
        transforms.transform_cell("x = 'often'")
    assert manager.tokenized == MOST_KNOWN + 11
    transforms.transform_cell("x = 0")
    assert manager.tokenized == MOST_KNOWN + 12


# -- lines ------------------------------------------------------------------------------------------------------------


class CountedLines:
    """IPython's own prefilter of a shell, with the number of its calls."""

    def __init__(self, shell: Any) -> None:
        self._prefilter = shell.prefilter_manager.prefilter_lines
        self.calls = 0
        shell.prefilter_manager.prefilter_lines = self.prefilter_lines

    def prefilter_lines(self, lines: str, continue_prompt: bool = False) -> str:
        self.calls += 1
        text: str = self._prefilter(lines, continue_prompt)
        return text


PLAIN = (
    "pass",
    "f(1)",
    "f 1",
    "x = 2",
    "f.a",
    "  x",
    "x  # y",
    "if f: f(2)",
    "unknown",
    "über = 1",
    "f; ",
    "ls.x = 3",
)
SPECIAL = "pwd", "cd ..", "who int", "pwd = 3", "env HOME", "macro", "exit", "exit()", "f*", "(1)", "'x'", "?"


@pytest.mark.parametrize("line", [*PLAIN, *SPECIAL])
def test_a_line_is_prefiltered_as_by_ipython(shell: Any, line: str) -> None:
    expected = [shell.prefilter_manager.prefilter_lines(text) for text in (line, f"{line}\n", f"x\n{line}")]
    counted = CountedLines(shell)
    lines = LinePrefilter(shell)
    assert [lines.prefilter_lines(text) for text in (line, f"{line}\n", f"x\n{line}")] == expected
    assert counted.calls == (1 if line in PLAIN else 3)


def test_autocall_makes_each_line_one_for_ipython(shell: Any) -> None:
    lines = LinePrefilter(shell)
    assert lines.prefilter_lines("f 1") == "f 1"
    shell.autocall = 2
    assert lines.prefilter_lines("f 1") == "f(1)"
    shell.autocall = 0
    assert lines.prefilter_lines("f 1") == "f 1"


def test_automagic_that_is_off_leaves_magics_names_alone(shell: Any) -> None:
    lines = LinePrefilter(shell)
    assert "run_line_magic" in lines.prefilter_lines("pwd")
    shell.automagic = False
    assert lines.prefilter_lines("pwd") == "pwd"


def test_a_users_checker_and_transformer_see_each_line_while_they_are_on(shell: Any) -> None:
    lines = LinePrefilter(shell)
    assert lines.prefilter_lines("x") == "x"

    class ByEnd(PrefilterChecker):
        def check(self, line_info: Any) -> Any:
            manager: Any = self.prefilter_manager
            return manager.get_handler_by_name("magic") if line_info.line.endswith("!") else None

    make: Any = ByEnd  # IPython gives it no types
    checker = make(shell=shell, prefilter_manager=shell.prefilter_manager)
    assert "run_line_magic" in lines.prefilter_lines("x y!")
    checker.enabled = False
    assert lines.prefilter_lines("x y!") == "x y!"
    checker.enabled = True
    assert "run_line_magic" in lines.prefilter_lines("x y!")
    shell.prefilter_manager.unregister_checker(checker)

    class Doubled(PrefilterTransformer):
        def transform(self, line: str, continue_prompt: bool) -> str:
            return f"{line}; {line}"

    make = Doubled
    make(shell=shell, prefilter_manager=shell.prefilter_manager)
    assert lines.prefilter_lines("x") == "x; x"


# -- names ------------------------------------------------------------------------------------------------------------


def test_a_cell_without_label_has_one_name_for_its_text_and_lines(shell: Any) -> None:
    compiler = CellCompiler(shell)
    name = compiler.expect("f()", "", 0)
    for _ in range(3):
        assert compiler.expect("f()", "", 0) == name
        assert compiler.cache("f()", 1, "f()") == name
    assert list(compiler.cells()) == [name]
    others = {compiler.expect("g()", "", 0), compiler.expect("f()", "", 2), compiler.expect("f()", "[1]", 0)}
    assert len(others | {name}) == 4
    assert linecache.getline(name, 1) == "f()\n"
    compiler.forget()


# -- code -------------------------------------------------------------------------------------------------------------


class Cells:
    """A shell that runs cells by a rank's compiler, and keeps the code of each statement that it ran."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.compiler = shell.compile = CellCompiler(shell)
        self.codes: list[CodeType] = []
        self._plain = shell.run_code
        shell.run_code = self.run_code

    async def run_code(self, code: CodeType, result: Any = None, *, async_: bool = False) -> bool:
        self.codes.append(code)
        return bool(await self._plain(code, result, async_=async_))

    def run(self, source: str, label: str = "") -> list[CodeType]:
        """Run a cell, of a program where it has no label, and return the code of its statements."""
        self.codes = []
        self.compiler.expect(source, label, 0)
        transformed = self.shell.transform_cell(source)
        asyncio.run(self.shell.run_cell_async(source, transformed_cell=transformed)).raise_error()
        return self.codes


def test_a_statement_that_comes_again_is_compiled_once(shell: Any) -> None:
    cells = Cells(shell)
    first = cells.run("n = 1\nfor _ in range(3):\n    n += 1\nn")
    assert len(first) == 3
    again = cells.run("n = 1\nfor _ in range(3):\n    n += 1\nn")
    assert all(old is new for old, new in zip(first, again, strict=True))
    assert shell.user_ns["n"] == 4
    assert all(old is not new for old, new in zip(first, cells.run("n = 1\n\nn = 2\nn"), strict=True))
    assert shell.user_ns["n"] == 2


def test_only_a_few_short_cells_are_kept_compiled(shell: Any) -> None:
    cells = Cells(shell)
    (first,) = cells.run("n = 0")
    for n in range(1, MOST_PARSED):
        cells.run(f"n = {n}")
    assert cells.run("n = 0") == [first]
    assert cells.run("n = 0")[0] is first
    for n in range(MOST_PARSED):
        cells.run(f"n = -{n}")
    assert cells.run("n = 0")[0] is not first
    long = f"n = '{'x' * LONGEST_PARSED}'"
    assert cells.run(long)[0] is not cells.run(long)[0]


def test_cells_of_a_notebook_are_not_kept_compiled(shell: Any) -> None:
    cells = Cells(shell)
    (kept,) = cells.run("n = 0")
    assert cells.run("n = 0", "[1]")[0] is not cells.run("n = 0", "[1]")[0]
    for n in range(MOST_PARSED):  # nor do they take the places of a program's
        cells.run(f"n = -{n}", f"[{n}]")
    assert cells.run("n = 0")[0] is kept


def test_the_last_expression_of_a_cell_that_comes_again_is_its_value(shell: Any) -> None:
    cells = Cells(shell)
    shell.user_ns["n"] = 0
    for n in (1, 2, 3):
        cells.compiler.expect("n += 1\nn", "", 0)
        assert shell.run_cell("n += 1\nn").result == n


def test_a_function_that_is_defined_again_has_code_of_its_own(shell: Any) -> None:
    cells = Cells(shell)
    codes = []
    for _ in range(2):
        cells.run("def g():\n    return 1\nh = lambda: 2\nclass A:\n    pass")
        codes += [shell.user_ns["g"].__code__, shell.user_ns["h"].__code__]
    assert len(set(map(id, codes))) == 4


def test_awaits_of_a_cell_that_comes_again_are_compiled_with_and_without_autoawait(
    shell: Any,
) -> None:
    cells = Cells(shell)
    source = "import asyncio\nawait asyncio.sleep(0)\nx = 1"
    (_, first, _), (_, again, _) = cells.run(source), cells.run(source)
    assert first is again
    assert first.co_flags & inspect.CO_COROUTINE
    shell.autoawait = False
    with pytest.raises(SyntaxError):
        cells.run(source)
    shell.autoawait = True
    assert cells.run(source)[1] is first


def test_flags_are_set_for_a_while_and_others_stay(shell: Any) -> None:
    compiler = CellCompiler(shell)
    before = compiler.flags
    with compiler.extra_flags(ast.PyCF_ALLOW_TOP_LEVEL_AWAIT):
        assert compiler.flags == before | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        with compiler.extra_flags(ast.PyCF_ALLOW_TOP_LEVEL_AWAIT):
            pass
        compiler("from __future__ import annotations", "<future>", "exec")
    assert compiler.flags == before | annotations.compiler_flag
    with pytest.raises(KeyError), compiler.extra_flags(ast.PyCF_TYPE_COMMENTS):
        raise KeyError
    assert compiler.flags == before | annotations.compiler_flag


def test_a_future_statement_holds_for_later_cells_that_came_before_it(shell: Any) -> None:
    cells = Cells(shell)
    for expected in (int, "int"):
        cells.run("k: int = 1")
        assert shell.user_ns["__annotations__"]["k"] == expected
        cells.run("from __future__ import annotations")


def test_a_transformer_of_trees_sees_each_cell_as_it_was_written(shell: Any) -> None:
    cells = Cells(shell)
    cells.run("x = 1")

    class More(ast.NodeTransformer):
        def visit_Constant(self, node: ast.Constant) -> ast.Constant:
            return ast.copy_location(ast.Constant(2), node)

    more = More()
    shell.ast_transformers.append(more)
    for _ in range(2):
        cells.run("x = 1")
        assert shell.user_ns["x"] == 2
    shell.ast_transformers.remove(more)
    cells.run("x = 1")
    assert shell.user_ns["x"] == 1


def test_assignments_as_values_do_not_add_to_a_cell_that_comes_again(shell: Any) -> None:
    cells = Cells(shell)
    shell.ast_node_interactivity = "last_expr_or_assign"
    for _ in range(3):
        assert len(cells.run("y = 5")) == 2


def test_statements_of_other_trees_are_compiled_each_time(shell: Any) -> None:
    cells = Cells(shell)
    source = "for n in range(300):\n    exec(get_ipython().compile(ast.parse(f'found.append({n})'), '<made>', 'exec'))"
    shell.user_ns.update(found=[], ast=ast)
    for _ in range(2):
        cells.run(source)
    assert shell.user_ns["found"] == [*range(300)] * 2
