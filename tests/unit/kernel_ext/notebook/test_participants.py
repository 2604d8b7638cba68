"""An elastic cell as a state machine: joins, deaths and leaves, the messages about them, and the outcomes that count as
a failure."""

from __future__ import annotations

import pytest

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.kernel_ext.notebook.cells.cell_events import (
    DeadlineReached,
    DoneArrived,
    Effect,
    Finished,
    Note,
    OutputArrived,
    RankBegan,
    RankDied,
    RankEnded,
    RanksJoined,
    RanksReleased,
    TakenOver,
)
from hvdlab.kernel_ext.notebook.cells.cell_state import ANNOUNCE, CellState
from hvdlab.kernel_ext.notebook.cells.results import CellResults
from hvdlab.kernel_ext.notebook.elastic import Bounds
from hvdlab.kernel_ext.wire.cells import CellDone, CellError, Stream


def elastic(ranks: int, at_least: int = 1, at_most: int | None = None) -> CellState:
    return CellState("c1", range(ranks), now=0.0, elastic=Bounds(at_least, at_most))


def ends(rank: int, ename: str = "", **kwargs: bool) -> DoneArrived:
    error = CellError(ename, "", (), 1, **kwargs) if ename else None  # type: ignore[arg-type]  # flags
    return DoneArrived(rank, CellDone("c1", error, 0.1))


def results_of(effects: list[Effect]) -> CellResults:
    (finished,) = [effect for effect in effects if isinstance(effect, Finished)]
    return finished.results


def notes(effects: list[Effect]) -> list[str]:
    return [effect.text for effect in effects if isinstance(effect, Note)]


def test_a_death_that_was_survived_is_told_and_is_no_failure() -> None:
    cell = elastic(2)
    cell.handle(RankDied(1, "killed by SIGKILL", 1), 1.0)
    effects = cell.handle(ends(0), 1.1)
    assert notes(effects) == ["rank 1 died: killed by SIGKILL"]  # although it ended before that was due
    assert results_of(effects).ok
    assert results_of(effects).ranks == (0,)


def test_deaths_of_all_are_a_failure() -> None:
    cell = elastic(2)
    cell.handle(RankDied(0, "killed by SIGKILL", 1), 1.0)
    results = results_of(cell.handle(RankDied(1, "killed by SIGKILL", 2), 1.1))
    assert not results.ok
    assert set(results.deaths) == {0, 1}


def test_a_replaced_rank_writes_and_is_waited_for_again() -> None:
    cell = elastic(2)
    cell.handle(OutputArrived(1, (Stream("stdout", "x"),), 5000), 0.5)
    cell.handle(RankDied(1, "killed by SIGKILL", 1), 1.0)
    effects = cell.handle(RanksJoined((1,)), 1.1)
    assert effects == [
        Note("rank 1 died: killed by SIGKILL", warning=True),
        RankBegan(1),
        Note("rank 1 joins at the others' next commit"),
    ]
    assert cell.handle(ends(0), 2.0) == [RankEnded(0, ends(0).done)]
    results = results_of(cell.handle(ends(1), 3.0))
    assert results.ok
    assert results.ranks == (0, 1)


def test_too_few_ranks_are_told_once_until_there_were_enough() -> None:
    cell = elastic(3, at_least=2)

    def die(rank: int, now: float) -> list[str]:
        cell.handle(RankDied(rank, "killed", 1), now)
        return notes(cell.handle(DeadlineReached(), now + ANNOUNCE))

    assert die(2, 1.0) == ["rank 2 died: killed"]
    told = die(1, 2.0)
    assert told[0] == "rank 1 died: killed"
    assert told[1].startswith("1 of at least 2 ranks is left: training waits until `%hvd_pool repair`")
    assert notes(cell.handle(RanksJoined((1, 2)), 3.0)) == ["ranks 1,2 join at the others' next commit"]
    die(1, 4.0)
    assert "1 of at least 2" in die(2, 5.0)[1]


@pytest.mark.parametrize(
    "end", [ends(2, "SystemExit"), ends(2, "KeyboardInterrupt"), RankDied(2, "it left", 1, left=True)]
)
def test_a_rank_that_was_let_go_leaves_without_a_failure(end: DoneArrived | RankDied) -> None:
    cell = elastic(3)
    assert notes(cell.handle(RanksReleased((2,)), 1.0)) == ["rank 2 leaves at the next commit"]
    assert cell.handle(end, 2.0) == [RankEnded(2, None), Note("rank 2 has left; nothing is lost by that")]
    cell.handle(ends(0), 3.0)
    results = results_of(cell.handle(ends(1), 3.0))
    assert results.ok
    assert results.ranks == (0, 1)


def test_a_rank_that_dies_on_the_way_to_the_commit_at_which_it_is_let_go_has_died() -> None:
    """The others go back to their last commit, so something is lost by that."""
    cell = elastic(2)
    cell.handle(RanksReleased((1,)), 1.0)
    assert cell.handle(RankDied(1, "killed by SIGKILL", 1), 2.0) == [RankEnded(1, None)]
    assert notes(cell.handle(DeadlineReached(), 2.0 + ANNOUNCE)) == ["rank 1 died: killed by SIGKILL"]
    results = results_of(cell.handle(ends(0), 3.0))
    assert (results.ok, results.ranks) == (True, (0,))


def test_an_error_of_the_users_is_a_failure_also_where_a_rank_was_let_go() -> None:
    cell = elastic(2)
    cell.handle(RanksReleased((1,)), 1.0)
    cell.handle(ends(1, "ValueError"), 2.0)
    assert results_of(cell.handle(ends(0), 2.1)).errors[1].ename == "ValueError"


def test_ranks_join_only_elastic_cells() -> None:
    cell = CellState("c1", range(2), now=0.0)
    assert cell.handle(RanksJoined((2,)), 1.0) == []
    assert cell.handle(RanksReleased((1,)), 1.0) == []
    assert cell.running == {0, 1}


def test_bounds_that_no_number_fulfils() -> None:
    with pytest.raises(InvalidRequestError, match="--min-np 3 is more than --max-np 2"):
        Bounds(3, 2).check()
    Bounds(2, 2).check()


def test_a_cell_that_is_taken_over_says_which_ranks_leave_and_that_too_few_are_left() -> None:
    cell = elastic(2, at_least=3)
    leaves, too_few = notes(cell.handle(TakenOver((1, 5)), 1.0))
    assert leaves == "rank 1 leaves at the next commit"  # and rank 5 is not in the cell
    assert too_few.startswith("2 of at least 3 ranks are left: training waits until")
    assert notes(cell.handle(RankDied(1, "it left the pool", 1, left=True), 1.1)) == [
        "rank 1 has left; nothing is lost by that"
    ]


def test_a_cell_that_is_taken_over_whole_says_nothing() -> None:
    assert elastic(2).handle(TakenOver(()), 1.0) == []
