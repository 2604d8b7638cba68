"""Fate of ranks that do not answer an interrupt."""

from __future__ import annotations

from hvdlab.kernel_ext.notebook.cells.cell_events import (
    AskStacks,
    DeadlineReached,
    DoneArrived,
    Effect,
    Finished,
    InterruptCell,
    InterruptRequested,
    LookAt,
    Note,
    PoolReleased,
    ProcessSeen,
    StackArrived,
)
from hvdlab.kernel_ext.notebook.cells.cell_state import AFTER_TIMEOUT, GRACE, LAST_CHANCE, PATIENCE, CellState
from hvdlab.kernel_ext.notebook.cells.results import CellResults
from hvdlab.kernel_ext.notebook.output.error_report import report
from hvdlab.kernel_ext.wire.cells import CellDone, CellError
from hvdlab.kernel_ext.wire.status import Stack, StackFrame

HERE = Stack(0, "c1", (StackFrame("<module>", "cell [4]", 5, "svd(x)"),))


class Played:
    """Run of three ranks; time goes from one of its deadlines to the next."""

    def __init__(self, **kwargs: float) -> None:
        self.run = CellState("c1", range(3), now=0.0, **kwargs)  # type: ignore[arg-type]
        self.now = 0.0
        self.effects: list[Effect] = []

    def happen(self, *events: object) -> list[Effect]:
        found: list[Effect] = []
        for event in events:
            found += self.run.handle(event, self.now)  # type: ignore[arg-type]
        self.effects += found
        return found

    def until(self, when: float) -> list[Effect]:
        found: list[Effect] = []
        while self.run.deadline is not None and self.run.deadline <= when:
            self.now = max(self.now, self.run.deadline)
            found += self.happen(DeadlineReached())
        self.now = when
        return found

    @property
    def notes(self) -> list[str]:
        return [e.text for e in self.effects if isinstance(e, Note)]

    @property
    def results(self) -> CellResults:
        (finished,) = [e for e in self.effects if isinstance(e, Finished)]
        return finished.results


def interrupted(rank: int) -> DoneArrived:
    error = CellError("KeyboardInterrupt", "", ("KeyboardInterrupt: ",), 1, interrupted=True)
    return DoneArrived(rank, CellDone("c1", error, 0.1))


def test_who_does_not_answer_is_named_with_its_place() -> None:
    played = Played()
    assert played.happen(InterruptRequested()) == [InterruptCell((0, 1, 2))]
    played.happen(interrupted(0))
    assert AskStacks((1, 2)) in played.until(PATIENCE - 0.5)
    played.happen(StackArrived(1, HERE), StackArrived(2, HERE))
    assert not played.notes
    played.until(PATIENCE)
    assert played.notes == [
        (
            "ranks 1,2 have not answered the interrupt; interrupt again to stop waiting\n"
            "  ranks 1,2: cell [4] line 5: svd(x)"
        )
    ]


def test_a_process_that_says_nothing_is_looked_at() -> None:
    played = Played()
    played.happen(InterruptRequested(), interrupted(0), interrupted(1))
    assert LookAt((2,)) in played.until(PATIENCE - 0.2)
    played.happen(ProcessSeen(2, "stopped (SIGSTOP)"))
    played.until(PATIENCE)
    assert played.notes[0].endswith("rank 2: stopped (SIGSTOP)")


def test_the_second_interrupt_is_the_last() -> None:
    played = Played()
    played.happen(InterruptRequested(), interrupted(0), interrupted(1))
    played.until(PATIENCE + 1)
    effects = played.happen(InterruptRequested())
    assert effects == [InterruptCell((2,)), AskStacks((2,))]
    played.happen(StackArrived(2, HERE))
    played.until(PATIENCE + 1 + LAST_CHANCE)
    assert played.results.unanswered == {2: "cell [4] line 5: svd(x)"}
    assert report(played.results, colours=False)[-2:] == [
        (
            "rank 2: no answer to the interrupt, not waited for any longer; `%hvd_pool restart 2` replaces it, "
            "`--ranks 0,1` leaves it out"
        ),
        "  rank 2: cell [4] line 5: svd(x)",
    ]


def test_where_single_ranks_can_not_be_started_another_remedy_is_named() -> None:
    played = Played(replaceable=False)
    played.happen(InterruptRequested(), interrupted(0), InterruptRequested(), InterruptRequested())
    assert "waited for any longer; `%hvd_pool stop` ends the pool, `--ranks 0`" in "\n".join(
        report(played.results)
    )


def test_who_clicks_twice_in_a_hurry_gives_nobody_up_too_soon() -> None:
    played = Played()
    played.happen(InterruptRequested(), InterruptRequested())
    played.until(PATIENCE - 0.1)
    assert not played.run.finished
    played.happen(interrupted(0), interrupted(1), interrupted(2))
    assert not played.results.unanswered


def test_a_third_interrupt_waits_no_longer() -> None:
    played = Played()
    played.happen(InterruptRequested(), InterruptRequested(), InterruptRequested())
    assert sorted(played.results.unanswered) == [0, 1, 2]


def test_a_rank_that_stays_after_anothers_failure_can_be_given_up_at_once() -> None:
    played = Played()
    error = CellError("ValueError", "bad", ("ValueError: bad",), 1)
    played.happen(DoneArrived(0, CellDone("c1", error, 0.1)), interrupted(1))
    played.until(GRACE + PATIENCE)
    played.happen(ProcessSeen(2, "stopped"))
    assert played.notes[0].startswith(
        "rank 0 failed with ValueError: bad, and rank 2 has not answered the interrupt; interrupt to stop waiting"
    )
    played.happen(InterruptRequested())
    played.until(GRACE + PATIENCE + LAST_CHANCE)
    assert list(played.results.unanswered) == [2]
    assert played.results.root_cause is not None
    assert played.results.root_cause.ename == "ValueError"


def test_a_time_limit_gives_up_without_being_asked() -> None:
    played = Played(timeout=3.0)
    played.until(3.0 + PATIENCE)
    assert "have not answered the interrupt" in played.notes[-1]
    played.happen(interrupted(0), interrupted(1))
    played.until(3.0 + AFTER_TIMEOUT)
    assert list(played.results.unanswered) == [2]
    assert played.results.timed_out == (0, 1, 2)


def test_a_delayed_interrupt_comes_once_and_not_when_the_pool_is_released_before() -> None:
    played = Played()
    assert played.happen(InterruptRequested(0.3), InterruptRequested(0.3)) == []
    assert played.until(0.29) == []
    assert played.until(0.3) == [InterruptCell((0, 1, 2))]
    assert played.happen(*map(interrupted, range(3)))[-1] == Finished(played.results)
    assert played.results.interrupted

    for order in ((InterruptRequested(0.3), PoolReleased()), (PoolReleased(), InterruptRequested(0.3))):
        released = Played()
        released.happen(*order)
        assert released.until(1.0) == []
        released.happen(*(DoneArrived(rank, CellDone("c1", None, 1.0)) for rank in range(3)))
        assert not released.results.interrupted


def test_an_interrupt_that_is_not_delayed_comes_in_place_of_one_that_is() -> None:
    played = Played()
    assert played.happen(InterruptRequested(0.3), InterruptRequested()) == [InterruptCell((0, 1, 2))]
    assert not any(isinstance(effect, InterruptCell) for effect in played.until(1.0))
