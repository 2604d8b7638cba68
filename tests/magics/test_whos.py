"""``%hvd_whos`` in a notebook."""

from __future__ import annotations

from typing import Any

import pytest

from hvdlab.kernel_ext.inspect.messages import Tensor, Tensors, Variable, Variables
from hvdlab.kernel_ext.inspect.overview import Overview, TensorTable
from magics_fakes import Notebook


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
