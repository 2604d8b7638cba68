"""Output of %hvd_debug without any rank that has stopped."""

from __future__ import annotations

import pytest

from support.fakes.notebook import Notebook


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "no cell has failed; `%hvd_debug R` looks at rank R"),
        ("7", "rank 7 is out of range"),
        ("0-1", "one rank at a time"),
    ],
)
def test_what_is_wrong_is_told_in_a_sentence(notebook: Notebook, line: str, said: str) -> None:
    notebook.run("%hvd_pool start -np 2")
    error = notebook.run(f"%hvd_debug {line}").error
    assert type(error).__name__ == "UsageError"
    assert said in str(error)


def test_a_rank_that_is_gone_can_not_be_looked_at(notebook: Notebook) -> None:
    notebook.run("%hvd_pool start -np 2")
    notebook.pool.first_to_fail = 5
    assert "rank 5, which failed first, is gone" in str(notebook.run("%hvd_debug").error)


def test_without_ranks_there_is_nothing_to_debug(notebook: Notebook) -> None:
    assert "no ranks are running" in str(notebook.run("%hvd_debug").error)


def test_a_rank_whose_last_cell_went_well_is_asked_before_anything_is_shown(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook.run("%hvd_pool start -np 2")
    notebook.pool.first_to_fail = 1
    monkeypatch.setattr(notebook.pool, "pull", lambda expression, ranks: dict.fromkeys(ranks, False))
    ran = notebook.run("%hvd_debug")
    assert "nothing to debug: the last cell of rank 1 did not fail" in ran.usage_error
    assert ran.stdout == ""
