"""Elastic training over drawn changes of its ranks: a short campaign in the normal run, five hundred on each plane in the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.elastic import CHANGES, ElasticCampaign
from chaos.figures import Outcome, rows, table
from chaos.journal import replayed

pytestmark = pytest.mark.usefixtures("own_compiler_cache")

BRIEF = (
    "grow",
    "kill_in_phase",
    "shrink",
    "kill_while_joining",
    "interrupt_while_joining",
    "kill_coordinator",
)
"""Plays of the normal run: each brings together what no other one does."""


@pytest.fixture
def own_compiler_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def play(seed: int, plane: str, names: tuple[str, ...], count: int, *, views: bool) -> list[Outcome]:
    """Play a campaign; fail with the whole story of any error."""
    changes = [change for change in CHANGES if change.play in names]
    with ElasticCampaign(seed, plane, changes=changes, views=views) as campaign:
        outcomes = list(campaign.play(count))
        left = campaign.stop()
    print(table(rows(outcomes)))
    stories = [str(outcome) for outcome in outcomes if not outcome.ok]
    assert not stories, "\n\n".join(stories)
    assert left == []
    return outcomes


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("plane", "seed"), [("shm", 21), ("gloo", 22)])
def test_training_goes_on_whatever_comes_and_goes(plane: str, seed: int) -> None:
    pytest.importorskip("anywidget")
    outcomes = play(seed, plane, BRIEF, len(BRIEF), views=plane == "shm")
    assert {outcome.fault for outcome in outcomes} == {c.name for c in CHANGES if c.play in BRIEF}


def test_what_was_trained_can_be_calculated_again() -> None:
    # Sums of the gradients: 1 + 2 = 3 of two ranks, times 1 and 2 in the first two steps; then 1, times 3.
    assert replayed([((0, 1), 2), ((0,), 1)]) == (-(3 + 9 + 12), 12)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("plane", "seed"), [("shm", 201), ("gloo", 202)])
def test_five_hundred_changes(plane: str, seed: int) -> None:
    play(seed, plane, tuple(change.play for change in CHANGES), 500, views=True)
