"""Numbers by which scripts know ranks, where these come and go. No engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hvdlab.collectives import context
from hvdlab.collectives.context import core_rank, own_number, shown_number
from hvdlab.collectives.errors import AbortedError, Cause, CauseKind, InvalidRequestError
from hvdlab.collectives.settings import CONSECUTIVE


def world(monkeypatch: pytest.MonkeyPatch, *ranks: int, failure: Cause | None = None) -> None:
    """This is rank 7 of a world of these ranks, in this order."""
    settings = SimpleNamespace(rank_numbers=CONSECUTIVE)
    engine = SimpleNamespace(rank=7, settings=settings, failure=failure, ranks=lambda: ranks)
    monkeypatch.setattr(context, "engine", lambda what="": engine)


def test_numbers_are_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    world(monkeypatch, 5, 7, 2)
    assert own_number() == 1
    assert [shown_number(rank) for rank in (5, 7, 2)] == [0, 1, 2]
    assert [core_rank(number) for number in range(3)] == [5, 7, 2]


def test_a_number_that_no_rank_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world(monkeypatch, 5, 7)
    with pytest.raises(InvalidRequestError, match="no rank 2; they are 0 to 1"):
        core_rank(2)


def test_a_number_of_a_world_that_has_ended_fails_as_its_collectives_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise elastic training would end by an error of the program's, where it has to continue with the ranks that
    are left."""
    died = Cause(CauseKind.RANK_DIED, (2,), "rank 2 died")
    world(monkeypatch, 5, 7, failure=died)
    assert core_rank(1) == 7
    with pytest.raises(AbortedError, match=r"hvd\.broadcast\(\): rank 2 died") as raised:
        core_rank(2, "hvd.broadcast()")
    assert raised.value.cause == died
