"""Whose state is the one to go on from."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdlab.collectives import context
from hvdlab.collectives.elastic import state
from hvdlab.collectives.elastic.state import (
    ATTEMPT,
    BEFORE_THE_JOB,
    Election,
    Lineage,
    Standing,
    ahead,
    next_attempt,
)
from hvdlab.collectives.protocol.messages import MOST_RANKS
from hvdlab.collectives.settings import CONSECUTIVE

JOB, OTHER_JOB = "unix:/job", "unix:/other"


@dataclass
class Rank:
    """A process, and the counts of its state."""

    saves: int = 0
    commits: int = 0
    lineage: Lineage = field(default_factory=Lineage)


def of_lineage(began: int, saves: int = ATTEMPT, commits: int = 0, *, job: str = JOB) -> Rank:
    rank = Rank(saves, commits)
    rank.lineage.join(job, began)
    return rank


def elections(
    ranks: dict[int, Rank], monkeypatch: pytest.MonkeyPatch, generation: int = 9, numbers: str = "stable"
) -> dict[int, Election]:
    """Return each rank's result, in a world of this generation. By seniority the ranks are in the order given."""
    monkeypatch.setattr(context, "is_initialized", lambda: True)
    sent: list[Any] = []

    def on_each(gathered: Any) -> dict[int, Election]:
        monkeypatch.setattr(state, "_run", gathered)
        found = {}
        for number, rank in ranks.items():
            engine = SimpleNamespace(
                size=len(ranks),
                rank=number,
                settings=SimpleNamespace(coordinator=JOB, rank_numbers=numbers),
                processes=lambda: (generation, ()),
                ranks=lambda: tuple(ranks),
            )
            monkeypatch.setattr(context, "engine", lambda engine=engine: engine)
            monkeypatch.setattr(state, "process_lineage", rank.lineage)
            found[number] = state.elect(rank.saves, rank.commits)
        return found

    def submit(request: Any) -> Any:
        sent.append(request.input)
        return request.input

    on_each(submit)
    return on_each(lambda request: np.concatenate(sent))


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
    found = elections({number: Rank(count) for number, count in saves.items()}, monkeypatch)
    assert [(e.source.rank, e.source.saves) for e in found.values()] == [expected] * len(saves)
    assert {e.saves for e in found.values()} == {next_attempt(expected[1])}


def test_one_that_others_have_begun_again_without_is_overtaken(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {
        0: of_lineage(1, ATTEMPT + 9, 9),
        1: of_lineage(1, 2 * ATTEMPT, 8),
        2: of_lineage(1, 2 * ATTEMPT + 1, 9),
        3: Rank(),
    }
    found = elections(ranks, monkeypatch)
    assert {number: (e.overtaken, e.replaced) for number, e in found.items()} == {
        0: (True, False),
        1: (False, False),
        2: (False, False),
        3: (True, False),
    }
    assert {(e.source.rank, e.lineage) for e in found.values()} == {(2, 1)}


def test_no_rank_is_overtaken_where_training_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that was loaded has a record of samples that counts."""
    found = elections({0: Rank(), 1: Rank(1), 2: Rank()}, monkeypatch)
    assert not any(e.overtaken or e.replaced for e in found.values())
    assert {(e.source.rank, e.lineage) for e in found.values()} == {(1, 9)}


@pytest.mark.parametrize(
    "newcomers",
    [
        {1: (ATTEMPT + 5, 5)},
        {1: (ATTEMPT + 18, 18)},  # it has committed more often
        {1: (2 * ATTEMPT, 5), 2: (2 * ATTEMPT, 5)},  # a second one has joined it
        {1: (4 * ATTEMPT + 1, 30), 2: (4 * ATTEMPT, 29)},
    ],
)
@pytest.mark.parametrize("number", [0, 3])
def test_the_first_training_goes_on_if_a_rank_has_it(
    number: int, newcomers: dict[int, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    later = {rank: of_lineage(5, *counts) for rank, counts in newcomers.items()}
    found = elections({**later, number: of_lineage(1, ATTEMPT + 12, 12), 4: Rank()}, monkeypatch)
    assert {(e.source.rank, e.lineage, e.source.commits) for e in found.values()} == {(number, 1, 12)}
    for rank in later:
        assert found[rank].replaced
        assert found[rank].overtaken
    assert not found[number].overtaken
    assert not found[4].replaced  # it has lost nothing
    most = max(counts for counts, _ in newcomers.values())
    assert {e.saves for e in found.values()} == {next_attempt(max(most, ATTEMPT + 12))}


def test_a_training_without_a_commit_gives_way_to_a_later_one_with_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = elections({0: of_lineage(1, 3 * ATTEMPT), 1: of_lineage(5, ATTEMPT + 2, 2)}, monkeypatch)
    assert {e.source.rank for e in found.values()} == {1}
    assert [e.replaced for e in found.values()] == [True, False]
    found = elections({0: of_lineage(5, 3 * ATTEMPT), 1: of_lineage(1, ATTEMPT)}, monkeypatch)
    assert {e.source.rank for e in found.values()} == {1}


@pytest.mark.parametrize(("numbers", "source"), [("stable", 0), (CONSECUTIVE, 1)])
def test_training_begins_with_the_state_of_the_rank_that_its_script_knows_as_0(
    numbers: str, source: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of the core's rank 0 was lost before, and the one in its place has loaded no checkpoint."""
    found = elections({1: Rank(), 2: Rank(), 0: Rank()}, monkeypatch, numbers=numbers)
    assert {e.source.rank for e in found.values()} == {source}
    found = elections({1: Rank(), 2: Rank(1), 0: Rank()}, monkeypatch, numbers=numbers)
    assert {e.source.rank for e in found.values()} == {2}


def test_restarts_count_before_commits_within_a_training() -> None:
    """The commit of rank 0 is void: the others have gone back behind it."""
    cut_off, restarted = Standing(0, 1, ATTEMPT + 1, 1, 0), Standing(1, 1, 2 * ATTEMPT, 0, 1)
    assert ahead([cut_off, restarted]) == restarted


def test_a_process_that_has_trained_continues_its_lineage_with_another_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that was cut off in the training before must not bring that back as the first one."""
    ranks = {0: Rank(), 1: of_lineage(3, 0)}
    found = elections(ranks, monkeypatch)
    assert {(e.source.rank, e.lineage) for e in found.values()} == {(0, 3)}
    monkeypatch.setattr(state, "process_lineage", ranks[0].lineage)
    found[0].join()
    assert ranks[0].lineage.number(JOB, 20, begun=True) == 3


def test_training_of_before_the_job_is_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generations of another job are no measure."""
    apart = Lineage()
    assert apart.number(JOB, 20, begun=True) == BEFORE_THE_JOB
    assert apart.number(JOB, 20, begun=False) == 20
    ranks = {0: of_lineage(1, 3 * ATTEMPT, 1), 1: of_lineage(7, ATTEMPT, 4, job=OTHER_JOB)}
    found = elections(ranks, monkeypatch)
    assert {(e.source.rank, e.lineage) for e in found.values()} == {(1, BEFORE_THE_JOB)}


def test_one_without_others_is_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    lineage = Lineage()
    monkeypatch.setattr(state, "process_lineage", lineage)
    monkeypatch.setattr(context, "is_initialized", lambda: False)
    found = state.elect(ATTEMPT + 2, 2)
    assert (found.source, found.overtaken, found.saves) == (found.own, False, 2 * ATTEMPT)
    found.join()
    assert lineage.number(JOB, 20, begun=False) == 20
    (alone,) = elections({3: Rank()}, monkeypatch).values()
    assert (alone.source.rank, alone.lineage) == (3, 9)
