"""Completion behind a magic: its options, sub-commands, ranks and names, in a real shell over a pool without processes."""

from __future__ import annotations

import pytest
from IPython.core.completer import provisionalcompleter

from hvdlab.kernel_ext.wire.status import UserNames
from hvdlab.magics.arguments import Values, run_parser
from hvdlab.magics.pool_magics import pool_parser
from support.fakes.notebook import Notebook


def completions(notebook: Notebook, text: str) -> list[str]:
    completer = notebook.shell.Completer
    assert completer is not None
    with provisionalcompleter():
        return [found.text for found in completer.completions(text, len(text))]


@pytest.fixture
def three(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> Notebook:
    notebook.run("%%hvd_run -np 3\nmodel = rank")
    known = {rank: UserNames(0, ("model", "momentum"), ("torch",)) for rank in range(3)}
    monkeypatch.setattr(notebook.pool, "names", lambda: known)
    return notebook


@pytest.mark.parametrize(
    ("text", "some"),
    [
        ("%%hvd_run --", {"--ranks", "--sync", "--output", "--elastic"}),
        ("%%hvd_run -np 3 --out", {"--output", "--out"}),
        ("%%hvd_run --output ", {"grouped", "none"}),
        ("%%hvd_run --plane sh", {"shm"}),
        ("%hvd_pool ", {"start", "resize", "attach"}),
        ("x = 1\n%hvd_pool re", {"resize", "repair", "restart"}),
        ("%hvd_pool restart ", {"0", "1", "2"}),
        ("%%hvd_run --ranks 0,", {"1", "2"}),
        ("%%hvd_rank ", {"0", "1", "2"}),
        ("%hvd_diff mo", {"model", "momentum"}),
        ("%hvd_diff model mo", {"model", "momentum"}),
        ("%hvd_pull ", {"model", "momentum"}),
        ("%hvd_pool sync 2 --without ", {"model"}),
    ],
)
def test_options_commands_ranks_and_names_complete(three: Notebook, text: str, some: set[str]) -> None:
    found = completions(three, text)
    assert some <= set(found)
    fragment = text.rpartition(" ")[2].rpartition(",")[2]
    assert all(one.startswith(fragment) for one in found), "nothing of Python's own names"


def test_variables_of_the_notebook_complete_for_a_push(three: Notebook) -> None:
    three.shell.user_ns["learning_rate"] = 1
    assert completions(three, "%hvd_push learn") == ["learning_rate"]


def test_without_a_pool_options_complete_and_ranks_do_not(notebook: Notebook) -> None:
    assert "--ranks" in completions(notebook, "%%hvd_run --")
    assert not {"0", "1"} & set(completions(notebook, "%%hvd_run --ranks "))


def test_code_behind_the_options_is_left_to_the_others(three: Notebook) -> None:
    assert run_parser("%hvd_run").candidates(["-np", "3", "impor"]) == []


def test_an_option_that_takes_no_value_is_followed_by_anything() -> None:
    found = pool_parser().candidates(["--keep", "x", "re"])
    assert isinstance(found, list)
    assert "resize" in found
    assert pool_parser().candidates(["restart", ""]) is Values.RANKS
    assert pool_parser().candidates(["restart", "1", ""]) == []


def test_a_wrong_command_comes_with_the_nearest(notebook: Notebook) -> None:
    error = notebook.run("%hvd_pool resise 2").usage_error
    assert error.startswith(
        "%hvd_pool: `resise` is no command; did you mean `resize`? There are start, status"
    )
