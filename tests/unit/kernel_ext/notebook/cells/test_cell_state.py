"""The state machine of a run: it always ends, reports each rank once, and finds the first cause."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlab.collectives.types import Stall
from hvdlab.kernel_ext.notebook.cells.cell_events import (
    AtPrompts,
    CollectiveStalled,
    DeadlineReached,
    Deliver,
    DoneArrived,
    Effect,
    Finished,
    InterruptCell,
    InterruptRequested,
    Note,
    OutputArrived,
    ProcessSeen,
    RankDied,
    RankEnded,
    SendAcknowledge,
    ShowStatus,
    StackArrived,
)
from hvdlab.kernel_ext.notebook.cells.cell_state import ANNOUNCE, GRACE, CellState
from hvdlab.kernel_ext.notebook.cells.results import CellResults
from hvdlab.kernel_ext.wire.cells import CellDone, CellError, Display, Stream
from hvdlab.kernel_ext.wire.status import PendingNow, Stack


def run(ranks: int = 4, **kwargs: object) -> CellState:
    return CellState("c1", range(ranks), now=0.0, **kwargs)  # type: ignore[arg-type]


def error(ename: str = "ValueError", when: int = 1, **kwargs: object) -> CellError:
    return CellError(ename, "bad", (f"{ename}: bad",), when, **kwargs)  # type: ignore[arg-type]


def done(rank: int, err: CellError | None = None, value: object = None) -> DoneArrived:
    sent = None if value is None else pickle.dumps(value)
    return DoneArrived(rank, CellDone("c1", err, 0.1, value is not None, sent, repr(value)))


def results_of(effects: list[Effect]) -> CellResults:
    (finished,) = [e for e in effects if isinstance(e, Finished)]
    return finished.results


def finish(machine: CellState, *events: object, now: float = 0.1) -> CellResults:
    effects: list[Effect] = []
    for event in events:
        effects += machine.handle(event, now)  # type: ignore[arg-type]
    return results_of(effects)


def test_values_are_kept_by_rank() -> None:
    results = finish(CellState("c1", [2, 5], now=0), done(5, value=50), done(2, value=20))
    assert results[5] == 50
    assert list(results) == [20, 50]
    assert results.ok
    assert results.root_cause is None


def test_a_rank_that_did_not_take_part_is_named() -> None:
    results = finish(CellState("c1", [2, 5], now=0), done(5, value=50), done(2, value=20))
    with pytest.raises(IndexError, match="did not run on rank 0, only on ranks 2,5"):
        results[0]


def test_the_others_get_a_moment_after_a_failure_and_are_then_interrupted() -> None:
    machine = run()
    machine.handle(done(3, error()), 10.0)
    assert machine.deadline == 10.0 + GRACE
    assert machine.handle(DeadlineReached(), 10.0 + GRACE) == [InterruptCell((0, 1, 2))]


def test_no_interrupt_is_sent_when_the_others_end_in_time() -> None:
    machine = run(2)
    machine.handle(done(1, error()), 10.0)
    effects = machine.handle(done(0, error("AbortedError", 2, aborted=True)), 10.1)
    assert not [e for e in effects if isinstance(e, InterruptCell)]
    assert machine.finished


def test_root_cause_is_first_also_if_hosts_clocks_differ() -> None:
    def failed(rank: int, name: str, when: int, host: str, arrived: int) -> DoneArrived:
        return DoneArrived(rank, CellDone("c1", CellError(name, "", (), when), 0.1), host, arrived)

    # Host b was started long before this one, host c long after. Their reports take 20 and 5 or more.
    first = failed(1, "ValueError", 9_000_100, "b", 1_120)
    second = failed(2, "KeyError", -8_999_850, "c", 1_155)
    third = failed(3, "TypeError", -8_999_840, "c", 1_165)
    death = RankDied(0, "killed by SIGKILL", 1_130)
    results = finish(run(4), death, third, second, first)
    assert results.root_cause is not None
    assert results.root_cause.ename == "ValueError"
    results = finish(run(3), RankDied(0, "killed by SIGKILL", 1_110), first, second)
    assert results.root_cause is not None
    assert results.root_cause.ename == "RankDied"
    # The older error of host c has the slower report: by its host's clock it is the first one all the same.
    late = failed(2, "KeyError", -8_999_850, "c", 1_199)
    results = finish(
        run(4),
        RankDied(0, "killed by SIGKILL", 1_300),
        third,
        late,
        DoneArrived(1, CellDone("c1", None, 0.1)),
    )
    assert results.root_cause is not None
    assert results.root_cause.ename == "KeyError"


def test_the_root_cause_is_the_first_error_of_its_own() -> None:
    aborted = error("AbortedError", when=5, aborted=True, collective="allreduce `x`", culprits=(3,))
    results = finish(
        run(), done(0, aborted), done(1, aborted), done(2, error("KeyError", 30)), done(3, error(when=20))
    )
    assert results.root_cause is not None
    assert results.root_cause.ranks == (3,)
    assert results.root_cause.ename == "ValueError"


def test_interrupts_sent_by_the_run_are_no_cause() -> None:
    machine = run(2)
    machine.handle(done(1, error(when=50)), 0.0)
    machine.handle(DeadlineReached(), GRACE)
    results = finish(machine, done(0, error("KeyboardInterrupt", 10, interrupted=True)))
    assert results.root_cause is not None
    assert results.root_cause.ranks == (1,)


def test_equal_errors_are_one_cause() -> None:
    results = finish(run(), *(done(r, error(when=r + 1, mismatch=True)) for r in range(4)))
    assert results.root_cause is not None
    assert results.root_cause.ranks == (0, 1, 2, 3)


def test_a_death_that_came_first_is_the_cause() -> None:
    machine = run(2)
    effects = machine.handle(RankDied(1, "killed by SIGKILL", 5), 0.0)
    assert effects == [RankEnded(1, None)], "the report tells it, if the run ends soon"
    results = finish(machine, done(0, error("AbortedError", 6, aborted=True, culprits=(1,))))
    assert results.root_cause is not None
    assert results.root_cause.evalue == "rank 1 died: killed by SIGKILL"


def test_a_death_is_told_at_once_only_if_the_others_go_on() -> None:
    machine = run(3)
    machine.handle(RankDied(1, "killed by SIGKILL", 5), 0.0)
    machine.handle(RankDied(2, "exited with status 3", 6), 0.5)
    assert machine.deadline == ANNOUNCE
    assert machine.handle(DeadlineReached(), ANNOUNCE) == [
        Note("rank 1 died: killed by SIGKILL", warning=True),
        Note("rank 2 died: exited with status 3", warning=True),
    ]
    assert machine.deadline is None, "survivors go on until they fail themselves"


def test_an_error_before_the_death_is_the_cause() -> None:
    results = finish(run(2), RankDied(1, "killed by SIGKILL", 50), done(0, error(when=5)))
    assert results.root_cause is not None
    assert results.root_cause.ename == "ValueError"


def test_the_time_limit_interrupts_and_is_the_cause() -> None:
    machine = run(2, timeout=3.0)
    machine.handle(done(0, value=1), 1.0)
    assert machine.deadline == 3.0
    effects = machine.handle(DeadlineReached(), 3.0)
    assert effects == [
        Note("timeout of 3 s reached; interrupting rank 1", warning=True),
        InterruptCell((1,)),
    ]
    results = finish(machine, done(1, error("KeyboardInterrupt", interrupted=True)))
    assert results.root_cause is not None
    assert results.root_cause.ename == "TimeoutError"
    assert "rank 1 did not end within 3 s" in results.root_cause.evalue


def test_credit_is_given_as_output_is_taken() -> None:
    machine = run(1, ack_bytes=100)
    chunk = (Stream("stdout", "x"),)
    assert machine.handle(OutputArrived(0, chunk, 60), 0) == [Deliver(0, chunk)]
    assert machine.handle(OutputArrived(0, chunk, 120), 0) == [Deliver(0, chunk), SendAcknowledge(0, 120)]
    assert machine.handle(OutputArrived(0, chunk, 180), 0) == [Deliver(0, chunk)]


def test_the_value_is_shown_with_the_results_only() -> None:
    machine = run(2)
    shown = Display({"text/plain": "3"}, {}, result=True)
    assert machine.handle(OutputArrived(0, (shown,), 10), 0) == []
    machine.handle(OutputArrived(1, (shown, Stream("stdout", "x\n")), 10), 0)
    results = finish(machine, done(0, value=3), done(1, value=3))
    assert repr(results) == "[0,1] 3"


def test_a_value_that_was_not_sent_is_explained() -> None:
    missing = CellDone(
        "c1", None, 0.1, True, None, "tensor(...)", "larger than 5 bytes when pickled; %hvd_pull sends it"
    )
    results = finish(run(1), DoneArrived(0, missing))
    assert repr(results) == "[0] tensor(...)"
    with pytest.raises(LookupError, match="rank 0's value was not sent: larger than 5 bytes"):
        results[0]


def test_different_values_are_shown_by_group() -> None:
    results = finish(run(3), done(0, value=3), done(1, value=4), done(2, value=3))
    assert repr(results) == "[0,2] 3\n[1]   4"


def test_the_time_limit_stands_still_while_the_user_is_asked() -> None:
    machine = run(2, timeout=5.0, stall_time=2.0)
    machine.handle(AtPrompts((0,)), 3.0)
    assert machine.deadline is None
    assert machine.handle(DeadlineReached(), 100.0) == []
    machine.handle(AtPrompts(()), 103.0)
    assert not [e for e in machine.handle(DeadlineReached(), 104.9) if isinstance(e, InterruptCell)]
    assert InterruptCell((0, 1)) in machine.handle(DeadlineReached(), 105.0)


def test_a_rank_that_fails_does_not_interrupt_one_that_is_looked_at() -> None:
    machine = run(2)
    machine.handle(AtPrompts((0,)), 1.0)
    machine.handle(done(1, error()), 2.0)
    assert machine.handle(DeadlineReached(), 50.0) == []
    machine.handle(AtPrompts(()), 60.0)
    assert machine.handle(DeadlineReached(), 60.0 + GRACE) == [InterruptCell((0,))]


def test_an_interrupt_works_at_a_prompt() -> None:
    machine = run(2)
    machine.handle(AtPrompts((0, 1)), 1.0)
    assert machine.handle(InterruptRequested(), 2.0) == [InterruptCell((0, 1))]


def stall(waited: set[int]) -> Stall:
    sites = tuple("cell [1] line 2" for _ in waited)
    return Stall(0, 10.0, 0, "x", tuple(waited), tuple(set(range(RANKS)) - waited), sites)


def stack(cell: str) -> Stack:
    return Stack(0, cell, (), (PendingNow("allreduce", "x", "cell [1] line 2", 11.0),))


errors = st.one_of(
    st.none(),
    st.builds(lambda when: error(when=when), st.integers(1, 100)),
    st.just(error("AbortedError", 3, aborted=True, collective="allreduce `x`", culprits=(1,))),
    st.just(error("KeyboardInterrupt", 4, interrupted=True)),
)
RANKS = 3
events = st.one_of(
    st.builds(
        lambda r, n: OutputArrived(r, (Stream("stdout", "x" * n),), n),
        st.integers(0, RANKS - 1),
        st.integers(0, 9),
    ),
    st.builds(lambda r, e: done(r, e), st.integers(0, RANKS - 1), errors),
    st.builds(lambda r, w: RankDied(r, "gone", w), st.integers(0, RANKS - 1), st.integers(1, 100)),
    st.just(InterruptRequested()),
    st.just(DeadlineReached()),
    st.builds(lambda waited: CollectiveStalled(stall(waited)), st.sets(st.integers(0, RANKS - 1))),
    st.builds(lambda r, c: StackArrived(r, stack(c)), st.integers(0, RANKS - 1), st.sampled_from(["", "c1"])),
    st.builds(lambda r: ProcessSeen(r, "stopped"), st.integers(0, RANKS - 1)),
    st.builds(lambda ranks: AtPrompts(tuple(sorted(ranks))), st.sets(st.integers(0, RANKS - 1))),
)


@given(st.lists(st.tuples(events, st.floats(0, 1)), max_size=40), st.one_of(st.none(), st.floats(0.1, 5)))
def test_any_schedule_ends_with_each_rank_reported_once(schedule: list[Any], timeout: float | None) -> None:
    machine = CellState("c1", range(RANKS), now=0.0, timeout=timeout, stall_time=2.0)
    now, effects = 0.0, []
    for event, step in schedule:
        now += step
        effects += machine.handle(event, now)
    for rank in range(RANKS):
        effects += machine.handle(done(rank), now)
    assert machine.finished
    assert isinstance(effects[-1], Finished)
    assert [type(e) for e in effects].count(Finished) == 1
    ended = [e.rank for e in effects if isinstance(e, RankEnded)]
    assert sorted(ended) == list(range(RANKS))
    for rank in range(RANKS):
        end = next(i for i, e in enumerate(effects) if isinstance(e, RankEnded) and e.rank == rank)
        assert not [e for e in effects[end:] if isinstance(e, Deliver) and e.rank == rank]
    results = effects[-1].results
    assert (results.root_cause is None) == results.ok
    told = [e for e in effects if isinstance(e, ShowStatus)]
    assert not told or told[-1].final


@given(st.lists(st.tuples(events, st.floats(0, 1)), max_size=20))
def test_only_running_ranks_are_interrupted(schedule: list[Any]) -> None:
    machine, now = CellState("c1", range(RANKS), now=0.0), 0.0
    for event, step in schedule:
        now += step
        for effect in machine.handle(event, now):
            if isinstance(effect, InterruptCell):
                assert effect.ranks
                assert set(effect.ranks) == machine.running


@given(st.lists(st.tuples(events, st.floats(0, 1)), max_size=20))
def test_time_that_has_passed_is_not_waited_for_again(schedule: list[Any]) -> None:
    machine, now = CellState("c1", range(RANKS), now=0.0, timeout=3.0, stall_time=2.0), 0.0
    for event, step in schedule:
        now += step
        machine.handle(event, now)
        for _ in range(8):
            if machine.deadline is None or machine.deadline > now:
                break
            machine.handle(DeadlineReached(), now)
        assert machine.deadline is None or machine.deadline > now
