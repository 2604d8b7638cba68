"""``%hvd_diff`` in a notebook."""

from __future__ import annotations

from typing import Any

import pytest

from hvdlab.kernel_ext.notebook.variables.diff import Diff, DiffRow, ValueGroup
from hvdlab.kernel_ext.wire.compare import ComparisonOpened, Leaf
from support.fakes.notebook import Notebook


def found(name: str, *groups: tuple[int, ...], rows: int = 0) -> Diff:
    leaf = Leaf(".w", "array", "torch.Tensor", b"", "float32", (2, 3), "cpu", 24, 4)
    difference = DiffRow(".w", (1,), (0,), ("values",), leaf, leaf)
    return Diff(
        name,
        tuple(
            ValueGroup(ranks, ComparisonOpened(1, bytes([number]), "Net", 3, 2, 48))
            for number, ranks in enumerate(groups)
        ),
        (difference,) * rows,
    )


@pytest.fixture
def asked(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return the comparisons asked of a notebook's pool."""
    calls: list[tuple[Any, ...]] = []

    def diff(name: str, ranks: list[int], *, special: str) -> Diff:
        calls.append((name, ranks, special))
        return found(name or special, (0,), (1,), rows=25)

    notebook.run("%hvd_pool start 2")
    monkeypatch.setattr(notebook.pool, "diff", diff, raising=False)
    return calls


def test_variables_are_compared(notebook: Notebook, asked: list[tuple[Any, ...]]) -> None:
    ran = notebook.run("%hvd_diff model opt.state --ranks 1 --rng")
    assert asked == [("model", [1], ""), ("opt.state", [1], ""), ("", [1], "rng")]
    assert [one.name for one in ran.result] == ["model", "opt.state", "rng"]
    # One output, so that its prompt stands beside the first.
    shown = [output.data["text/plain"] for output in ran.displays]
    assert shown in ([], [repr(ran.result)])
    assert [text.split(":")[0] for text in repr(ran.result).split("\n\n")] == ["model", "opt.state", "rng"]
    assert ran.result._repr_html_().count("<table>") == 3


def test_the_table_is_not_longer_than_a_screen(notebook: Notebook, asked: list[tuple[Any, ...]]) -> None:
    result = notebook.run("%hvd_diff model").result
    assert len(repr(result).splitlines()) == 23
    assert repr(result).endswith("5 more differ; `.rows` has all")
    assert result._repr_html_().count("<tr>") == 21


def test_names_may_have_quotes(notebook: Notebook, asked: list[tuple[Any, ...]]) -> None:
    notebook.run("%hvd_diff state['rate'] \"a + b\" state['the rate']")
    assert [name for name, _, _ in asked] == ["state['rate']", "a + b", "state['the rate']"]


def test_something_must_be_named(notebook: Notebook, asked: list[tuple[Any, ...]]) -> None:
    assert "say what to compare" in str(notebook.run("%hvd_diff").error)
    assert "did you mean --rng?" in str(notebook.run("%hvd_diff --rgn").error)
    assert "--env" in notebook.run("%hvd_diff --help").stdout
    assert not asked


def test_headlines() -> None:
    assert found("x", (0, 1, 2)).headline() == "x: ranks 0-2 agree (Net, 2 arrays, 48 bytes)"
    assert found("x", (0, 2, 3), (1,)).headline().endswith("; rank 1 differs")
    assert found("x", (0,), (1,), (2,)).headline() == "x: all ranks differ: 0 · 1 · 2"
    assert found("x", (0, 1), (2, 3)).headline().endswith("; ranks 2,3 differ")
    assert found("x", (3,)).headline() == "x: rank 3 has it (Net, 2 arrays, 48 bytes)"
