"""A rank's error names the place of the notebook's magics and views."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.kernel_ext.rank.shell_setup import NOTEBOOKS_MAGICS
from hvdlab.magics.extension import MAGICS
from hvdlab.widgets.views import recording_of

if TYPE_CHECKING:
    from integration.kernel_ext.rank.conftest import Rank


@pytest.mark.parametrize(
    "source",
    ["%hvd_pool status", "%%hvd_run -np 2\n1", "x = 1\n%%hvd_run -np 2\n1", "x = %hvd_pull y", "%%local\n1"],
)
def test_a_magic_of_the_notebook_says_where_it_belongs(rank: Rank, source: str) -> None:
    error = rank.run(source).done.error
    assert error is not None
    assert error.ename == "UsageError"
    assert "is a magic of the notebook, and this is a rank" in error.evalue
    assert error.traceback == (f"UsageError: {error.evalue}",)


def test_all_magics_of_the_notebook_are_known() -> None:
    assert set(NOTEBOOKS_MAGICS) == {*MAGICS["line"], *MAGICS["cell"]}


def test_a_view_does_not_claim_that_no_ranks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "in_rank_of_pool", lambda: True)
    with pytest.raises(InvalidRequestError, match="this is a rank, which does not see the others"):
        recording_of(None, coming=True)
