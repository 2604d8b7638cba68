"""The compiler of cells."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator

import pytest

from hvdlab.kernel_ext.rank.cell_source import CellCompiler

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
