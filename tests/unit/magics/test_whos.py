"""``%hvd_whos`` in a notebook."""

from __future__ import annotations

from typing import Any

import pytest

from hvdlab.kernel_ext.notebook.variables.overview import Overview, TensorTable
from hvdlab.kernel_ext.wire.compare import Tensor, Tensors, Variable, Variables
from support.fakes.notebook import Notebook


def test_variables_are_listed(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def variables(ranks: list[int] | None) -> Overview:
        asked.append(ranks)
        return Overview(
            {r: Variables(1, (Variable("x", "int", str(r), 28, bytes([r])),), "c" * r) for r in (0, 1)}, (2,)
        )

    def tensors(ranks: list[int] | None, *, most: int) -> TensorTable:
        asked.append(most)
        return TensorTable({0: Tensors(1, (Tensor("w", "float32", (2, 3), "cpu", 24),), 1, 24)})

    notebook.run("%hvd_pool start 3")
    monkeypatch.setattr(notebook.pool, "variables", variables, raising=False)
    monkeypatch.setattr(notebook.pool, "tensors", tensors, raising=False)
    lines = repr(notebook.run("%hvd_whos").result).splitlines()
    assert lines[0] == "1 variable on ranks 0,1, 1 of them not alike"
    assert [line.split()[-1] for line in lines[2:4]] == ["0", "1"]
    assert lines[4:] == ["rank 1 is running a cell, so it may be changing", "rank 2: no answer"]
    assert "24 bytes  all" in repr(notebook.run("%hvd_whos 0-1 --tensors -n 5").result)
    assert asked == [None, 5]


def rows_of(*values: tuple[str, str, bytes]) -> list[str]:
    """Return the rows of a variable ``cfg`` with a type, a text and a digest for each rank."""
    found = {
        rank: Variables(1, (Variable("cfg", kind, text, 64, digest),))
        for rank, (kind, text, digest) in enumerate(values)
    }
    return [" ".join(line.split()) for line in repr(Overview(found)).splitlines()[2:]]


def test_values_that_differ_and_look_alike_are_no_identical_rows() -> None:
    alike = ("dict", "dict of 2")
    assert rows_of((*alike, b"0"), (*alike, b"1"), ("int", "5", b"2")) == [
        "cfg dict dict of 2 64 bytes 0",
        "dict differs from rank 0's: `%hvd_diff cfg` shows where 64 bytes 1",
        "int 5 64 bytes 2",
    ]
    assert rows_of((*alike, b"0"), (*alike, b"0")) == ["cfg dict dict of 2 64 bytes alike"]


def test_a_value_that_was_not_compared_on_all_ranks_is_not_called_different() -> None:
    alike = ("Tensor", "float32[9]")
    assert rows_of((*alike, b"0"), (*alike, b"0"), (*alike, b"")) == [
        "cfg Tensor float32[9] 64 bytes 0,1",
        "Tensor not compared with rank 0's: `%hvd_diff cfg` does so 64 bytes 2",
    ]
