"""The compiler of cells, and their transformation to Python."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from hvdlab.kernel_ext.rank.cell_source import LONGEST_KNOWN, MOST_KNOWN, CellCompiler, StaticTransforms

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


@pytest.mark.usefixtures("eager_collector")
def test_a_cell_is_parsed_though_another_thread_parses_at_the_same_time() -> None:
    compiler = CellCompiler()
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
