"""Whose state is the one to go on from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvdlab.collectives import context
from hvdlab.collectives.elastic import state
from hvdlab.collectives.elastic.state import ATTEMPT, is_overtaken, next_attempt
from hvdlab.collectives.protocol.messages import MOST_RANKS


def elected(ranks: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return each rank's result; ``ranks`` has how often each of them has saved."""
    monkeypatch.setattr(context, "is_initialized", lambda: True)

    def on_each(least: Any) -> list[tuple[int, int]]:
        found = []
        for rank, saves in ranks.items():
            engine = SimpleNamespace(size=len(ranks), rank=rank)
            monkeypatch.setattr(context, "engine", lambda engine=engine: engine)
            monkeypatch.setattr(state, "_reduced", least)
            found.append(state.elect(saves))
        return found

    sent: list[Any] = []

    def submit(values: Any, *_: Any) -> Any:
        sent.append(values)
        return values

    on_each(submit)
    return on_each(lambda *_: min(sent))


@pytest.mark.parametrize(
    ("saves", "expected"),
    [
        ({0: 3, MOST_RANKS - 1: 4}, (MOST_RANKS - 1, 4)),
        ({0: 3, MOST_RANKS - 1: 3}, (0, 3)),
        ({2: 7, 5: 0, 1: 7}, (1, 7)),
        ({1: 0, 4: 0}, (1, 0)),
        (
            {0: ATTEMPT + 9, 2: next_attempt(ATTEMPT + 8)},
            (2, 2 * ATTEMPT),
        ),  # rank 0 was cut off, and the others have begun again
        ({1: 1 << 40, MOST_RANKS - 1: (1 << 40) + 1}, (MOST_RANKS - 1, (1 << 40) + 1)),
    ],
)
def test_all_agree_on_the_one_that_saved_most_often(
    saves: dict[int, int], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert elected(saves, monkeypatch) == [expected] * len(saves)


def test_one_that_others_have_begun_again_without_is_overtaken() -> None:
    assert is_overtaken(ATTEMPT + 9, next_attempt(ATTEMPT + 8))
    assert is_overtaken(0, next_attempt(0))
    assert not is_overtaken(ATTEMPT + 8, ATTEMPT + 9)
    assert not is_overtaken(0, 0)
