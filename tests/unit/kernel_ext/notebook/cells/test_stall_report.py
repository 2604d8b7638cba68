"""Lines under a cell that waits: the waiting ranks, those awaited, the time, and the places of these."""

from __future__ import annotations

import pytest

from hvdlab.collectives.types import OpKind, Stall
from hvdlab.kernel_ext.notebook.cells.cell_events import (
    AskStacks,
    CollectiveStalled,
    DeadlineReached,
    DoneArrived,
    Effect,
    InterruptRequested,
    LookAt,
    ProcessSeen,
    ShowStatus,
    StackArrived,
)
from hvdlab.kernel_ext.notebook.cells.cell_state import CellState
from hvdlab.kernel_ext.wire.cells import CellDone, CellError
from hvdlab.kernel_ext.wire.status import PendingNow, Stack, StackFrame

STEP = StackFrame("train_step", "cell [7]", 12, "loader.next()")
DEEP = StackFrame("__next__", "/site-packages/data/loader.py", 630, "return q.get()")


def stalled(name: str = "loss", missing: tuple[int, ...] = (2,), seconds: float = 10.0) -> CollectiveStalled:
    waited = tuple(rank for rank in range(4) if rank not in missing)
    sites = ("cell [7] line 4",) * len(waited)
    return CollectiveStalled(Stall(0, seconds, int(OpKind.ALLREDUCE), name, waited, missing, sites))


def waiting(rank: int, seconds: float, *names: str, cell: str = "c1") -> StackArrived:
    pending = tuple(PendingNow("allreduce", name, "cell [7] line 4", seconds) for name in names or ("loss",))
    return StackArrived(rank, Stack(0, cell, (), pending))


def elsewhere(rank: int, *frames: StackFrame) -> StackArrived:
    return StackArrived(rank, Stack(0, "c1", frames or (STEP,)))


class Played:
    def __init__(self, stall_time: float | None = 10.0) -> None:
        self.run = CellState("c1", range(4), now=0.0, stall_time=stall_time)
        self.status: list[ShowStatus] = []

    def happen(self, now: float, *events: object) -> list[Effect]:
        found: list[Effect] = []
        for event in events:
            found += self.run.handle(event, now)  # type: ignore[arg-type]
        self.status += [e for e in found if isinstance(e, ShowStatus)]
        return found

    def stall(self, now: float = 10.0) -> None:
        self.happen(now, stalled(), elsewhere(2), *(waiting(rank, now) for rank in (0, 1, 3)))


def done(rank: int, error: CellError | None = None) -> DoneArrived:
    return DoneArrived(rank, CellDone("c1", error, 0.1))


def test_it_is_told_who_waits_for_whom_and_where_that_is() -> None:
    played = Played()
    assert played.happen(10.0, stalled()) == [AskStacks((0, 1, 2, 3))]
    played.happen(10.0, elsewhere(2, STEP, DEEP), *(waiting(rank, 10.0) for rank in (0, 1, 3)))
    assert played.status == [
        ShowStatus(
            "allreduce `loss` (cell [7] line 4): ranks 0,1,3 have waited 10 s for rank 2\n"
            "  rank 2: cell [7] line 12 in train_step: loader.next() (at data/loader.py line 630 in __next__)"
        )
    ]


def test_it_is_told_anew_each_second_and_at_last_that_it_went_on() -> None:
    played = Played()
    played.stall()
    assert played.run.deadline == 11.0
    assert played.happen(11.0, DeadlineReached()) == [AskStacks((0, 1, 2, 3))]
    played.happen(11.0, elsewhere(2), *(waiting(rank, 11.0) for rank in (0, 1, 3)))
    assert "have waited 11 s" in played.status[-1].text
    played.happen(12.0, DeadlineReached(), *(elsewhere(rank) for rank in range(4)))
    played.happen(13.0, DeadlineReached(), *(elsewhere(rank) for rank in range(4)))
    assert played.status[-1] == ShowStatus(
        "allreduce `loss` (cell [7] line 4) went on after about 12 s: ranks 0,1,3 waited for rank 2",
        final=True,
    )
    assert played.run.deadline == 23.0, "nothing is looked at each second any more"


def test_the_next_one_of_the_same_name_is_not_the_same() -> None:
    played = Played()
    played.stall()
    played.happen(11.0, DeadlineReached(), *(waiting(rank, 0.3) for rank in range(4)))
    played.happen(12.0, DeadlineReached(), *(waiting(rank, 1.3) for rank in range(4)))
    assert played.status[-1].final


def test_the_end_of_the_cell_ends_it() -> None:
    played = Played()
    played.stall()
    effects = played.happen(10.8, *map(done, range(4)))
    assert isinstance(effects[-3], ShowStatus), "before the last rank's end, which ends the output"
    assert "went on after about 10 s" in played.status[-1].text


def test_a_rank_that_falls_silent_is_told_with_its_last_place() -> None:
    played = Played()
    played.stall()
    played.happen(11.0, DeadlineReached(), *(waiting(rank, 11.0) for rank in (0, 1, 3)))
    played.happen(11.6, DeadlineReached(), ProcessSeen(2, "stopped (SIGSTOP)"))
    place = "cell [7] line 12 in train_step: loader.next()"
    assert played.status[-1].text.endswith(f"\n  rank 2: stopped (SIGSTOP); it was last at {place}")


def test_what_failed_did_not_go_on() -> None:
    played = Played()
    played.stall()
    played.happen(11.0, DeadlineReached(), *(elsewhere(rank) for rank in range(4)))
    assert "went on" not in played.status[-1].text
    error = CellError("AbortedError", "", (), 1, aborted=True)
    played.happen(11.2, *(done(rank, error) for rank in range(4)))
    assert played.status[-1].text.startswith(
        "allreduce `loss` (cell [7] line 4): ranks 0,1,3 waited 11 s for rank 2\n"
    )


def test_after_an_interrupt_it_stays_as_it_is() -> None:
    played = Played()
    played.stall()
    played.happen(10.5, InterruptRequested())
    assert len(played.status) == 1
    error = CellError("KeyboardInterrupt", "", (), 1, interrupted=True)
    played.happen(10.9, *(done(rank, error) for rank in range(4)))
    assert played.status[-1].final
    assert "waited 11 s for rank 2\n  rank 2: cell [7] line 12" in played.status[-1].text


def test_many_collectives_are_one_line() -> None:
    played = Played()
    names = [f"g.{i}" for i in range(100)]
    played.happen(10.0, *(stalled(name) for name in names), elsewhere(2))
    played.happen(10.0, *(waiting(rank, 10.0, *names) for rank in (0, 1, 3)))
    assert played.status[-1].text.splitlines()[0] == (
        "allreduce `g.0` (cell [7] line 4) and 99 more: ranks 0,1,3 have waited 10 s for rank 2"
    )


def test_a_process_that_says_nothing_is_looked_at() -> None:
    played = Played()
    played.happen(10.0, stalled(), *(waiting(rank, 10.0) for rank in (0, 1, 3)))
    assert played.run.deadline is not None
    assert played.happen(played.run.deadline, DeadlineReached()) == [LookAt((2,))]
    played.happen(10.4, ProcessSeen(2, "stopped (SIGSTOP)"))
    assert played.status[-1].text.endswith("\n  rank 2: stopped (SIGSTOP)")


def inside(rank: int, seconds: float) -> StackArrived:
    pending = (PendingNow("allreduce", "loss", "cell [7] line 4", seconds, executing=True),)
    return StackArrived(rank, Stack(0, "c1", (), pending))


def test_a_collective_that_all_have_submitted_and_that_does_not_end_is_found_by_asking() -> None:
    played = Played(stall_time=5.0)
    assert played.happen(5.0, DeadlineReached()) == [AskStacks((0, 1, 2, 3))]
    played.happen(5.0, *(inside(rank, 1.0) for rank in range(4)))
    assert played.run.deadline == 9.0
    assert played.status == []
    played.happen(10.0, DeadlineReached(), *(inside(rank, 6.0) for rank in (0, 1, 3)))
    played.happen(10.6, DeadlineReached(), ProcessSeen(2, "stopped (SIGSTOP)"))
    assert played.status == [
        ShowStatus(
            "allreduce `loss` (cell [7] line 4): ranks 0,1,3 have waited 6 s for rank 2\n  rank 2: stopped (SIGSTOP)"
        )
    ]
    played.happen(11.6, DeadlineReached(), *(inside(rank, 7.6) for rank in range(4)))
    assert played.status[-1].text == (
        "allreduce `loss` (cell [7] line 4): ranks 0-3 have been in it for 7 s, its data is under way"
    )
    played.happen(12.6, DeadlineReached(), *(elsewhere(rank) for rank in range(4)))
    played.happen(13.6, DeadlineReached(), *(elsewhere(rank) for rank in range(4)))
    assert played.status[-1].final
    assert "went on after about 8 s" in played.status[-1].text


@pytest.mark.parametrize("first", ["report", "question"])
def test_what_is_reported_and_found_is_told_once(first: str) -> None:
    played = Played(stall_time=5.0)
    if first == "report":
        played.happen(9.0, stalled())
    played.happen(9.0, DeadlineReached(), *(inside(rank, 9.0) for rank in (0, 1, 3)))
    played.happen(9.6, DeadlineReached(), ProcessSeen(2, "stopped (SIGSTOP)"))
    played.happen(9.7, stalled())
    played.happen(10.6, DeadlineReached(), *(inside(rank, 10.0) for rank in (0, 1, 3)))
    played.happen(11.2, DeadlineReached(), ProcessSeen(2, "stopped (SIGSTOP)"))
    heads = [shown.text.splitlines()[0] for shown in played.status]
    assert heads
    assert all(head.endswith("s for rank 2") and "more" not in head for head in heads), heads


def test_another_cells_collective_is_not_told_here() -> None:
    played = Played()
    played.happen(10.0, stalled(), elsewhere(2), *(waiting(rank, 10.0, cell="other") for rank in (0, 1, 3)))
    assert played.status == []


@pytest.mark.parametrize("answers", [(), (elsewhere(2),)], ids=["nobody", "the one who is missing"])
def test_it_is_told_although_those_who_wait_do_not_answer_in_time(answers: tuple[StackArrived, ...]) -> None:
    played = Played()
    played.happen(10.0, stalled(), *answers)
    played.happen(10.6, DeadlineReached())
    played.happen(10.9, DeadlineReached())
    (status,) = played.status
    assert status.text.startswith(
        "allreduce `loss` (cell [7] line 4): ranks 0,1,3 have waited 11 s for rank 2\n  rank 2: "
    )
    assert ("it does not answer" in status.text) == (not answers)
    played.happen(11.9, DeadlineReached())
    played.happen(12.0, elsewhere(2), *(waiting(rank, 12.0, cell="c2") for rank in (0, 1, 3)))
    assert len(played.status) == 1, "they answer that it is in another cell"


def test_ranks_that_stay_behind_are_told() -> None:
    played = Played(stall_time=5.0)
    played.happen(1.0, done(0), done(1), done(3))
    played.happen(5.0, DeadlineReached(), elsewhere(2))
    assert played.run.deadline == 6.0
    assert played.happen(6.0, DeadlineReached()) == [AskStacks((2,))]
    played.happen(6.0, elsewhere(2))
    assert played.status == [
        ShowStatus(
            "ranks 0,1,3 ended this cell 5 s ago; rank 2 is still in it\n  rank 2: cell [7] line 12 in train_step: loader.next()"
        )
    ]
    played.happen(6.5, done(2))
    assert played.status[-1] == ShowStatus("", final=True)


def test_nothing_is_told_of_ranks_behind_if_stalls_are_not_to_be_told() -> None:
    played = Played(stall_time=None)
    played.happen(1.0, done(0))
    assert played.run.deadline is None
