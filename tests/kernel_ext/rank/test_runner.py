from __future__ import annotations

from typing import Any


def test_a_cell_prints_and_returns_its_value(rank: Any) -> None:
    ran = rank.run("print('hello')\n6 * 7")
    assert ran.text() == "hello\n"
    assert ran.done.error is None
    assert ran.done.value_repr == "42"


def test_traceback_has_the_notebooks_line_numbers(rank: Any) -> None:
    ran = rank.run("x = 1\n\nx / 0\n", label="[7]")
    assert ran.error.ename == "ZeroDivisionError"
    print("\n".join(ran.error.traceback))
    assert "Cell In[7], line 4" in "\n".join(ran.error.traceback)
