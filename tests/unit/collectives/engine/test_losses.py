"""Loss of a member of a process set: the other ranks' programs raise it once, also if nothing was pending. No coordinator, no process."""

from __future__ import annotations

import numpy as np
import pytest

from hvdlab.collectives.engine.entries import Effect, Entry, Fail
from hvdlab.collectives.engine.rank_state import RankState
from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import AbortedError, Cause, CauseKind
from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import SUM, DType, OpKind

MEMBERS = tuple(m.Member(rank, "host", 100 + rank) for rank in range(3))
DIED = m.Abort(0, 1, CauseKind.RANK_DIED.value, (2,), "rank 2 died: killed by SIGKILL", "")


def configure(generation: int, *ranks: int, process_set: int = 0) -> m.Configure:
    members = tuple(MEMBERS[rank] for rank in ranks)
    return m.Configure(process_set, generation, members, "gloo", {}, False)


def member() -> RankState:
    """Return rank 0 of three, in a cell."""
    state = RankState(0)
    state.handle(configure(1, 0, 1, 2), 0)
    state.begin_cell("first")
    return state


def entry(name: str, process_set: int = 0) -> Entry:
    request = Request(
        OpKind.ALLREDUCE,
        name,
        np.zeros(4, np.float32),
        dtype=DType.F32,
        reduction=SUM,
        process_set=process_set,
    )
    return Entry(request, "line 1", 0)


def failures(effects: list[Effect]) -> dict[str, str]:
    """Return the texts of failed entries, by name."""
    return {effect.entry.name: str(effect.error) for effect in effects if isinstance(effect, Fail)}


def raised(state: RankState, name: str, process_set: int = 0) -> AbortedError:
    with pytest.raises(AbortedError) as error:
        state.submit(entry(name, process_set))
    state.validate()
    return error.value


@pytest.mark.parametrize("configured", [False, True], ids=["before the next generation", "in it"])
def test_the_next_submission_raises_it_if_nothing_was_pending(*, configured: bool) -> None:
    state = member()
    assert failures(state.handle(DIED, 0)) == {}
    if configured:
        state.handle(configure(2, 0, 1), 0)
    error = raised(state, "a")
    assert (error.cause.kind, error.cause.ranks, error.generation) == (
        CauseKind.RANK_DIED,
        (2,),
        1 + configured,
    )
    assert "allreduce `a` (line 1): rank 2 died: killed by SIGKILL" in str(error)
    state.submit(entry("a"))  # a program that has caught it goes on
    state.validate()


def test_what_is_pending_raises_it_and_nothing_after_that() -> None:
    state = member()
    state.submit(entry("a"))
    assert failures(state.handle(DIED, 0)).keys() == {"a"}
    state.submit(entry("b"))
    assert failures(state.handle(configure(2, 0, 1), 0)) == {}
    state.submit(entry("c"))


def test_an_entry_that_an_interrupted_program_has_given_up_does_not_count() -> None:
    """It has given the entry up, caught its interrupt, and goes on."""
    state = member()
    state.submit(entry("a"))
    state.withdraw(0, CauseKind.INTERRUPTED, "rank 0 was interrupted")
    assert failures(state.handle(DIED, 0)).keys() == {"a"}
    assert raised(state, "b").cause.kind is CauseKind.RANK_DIED


def test_an_entry_that_is_held_for_the_next_generation_fails_as_well() -> None:
    state = member()
    state.withdraw(0, CauseKind.INTERRUPTED, "rank 0 was interrupted")
    state.submit(entry("b"))
    assert "rank 2 died" in failures(state.handle(DIED, 0))["b"]
    state.handle(configure(2, 0, 1), 0)
    state.submit(entry("c"))


@pytest.mark.parametrize("kind", [CauseKind.RANK_LEFT, CauseKind.MEMBERSHIP])
def test_so_does_a_member_that_left(kind: CauseKind) -> None:
    state = member()
    state.handle(m.Abort(0, 1, kind.value, (2,), "rank 2 left the job", ""), 0)
    assert raised(state, "a").cause.kind is kind


def test_an_abort_that_costs_no_member_is_for_what_is_pending_alone() -> None:
    state = member()
    state.handle(m.Abort(0, 1, CauseKind.CELL_FAILED.value, (2,), "rank 2 raised ValueError", ""), 0)
    state.submit(entry("a"))


def test_a_cell_that_begins_later_knows_the_smaller_world() -> None:
    state = member()
    state.handle(DIED, 0)
    state.handle(configure(2, 0, 1), 0)
    state.end_cell("first", "")
    state.begin_cell("second")
    state.submit(entry("a"))


def test_a_submission_of_hvdlab_s_own_leaves_the_loss_to_the_program() -> None:
    state = member()
    state.handle(DIED, 0)
    state.handle(configure(2, 0, 1), 0)
    own = entry("own")
    own.request.internal = True
    state.submit(own)
    assert raised(state, "a").cause.kind is CauseKind.RANK_DIED


def test_a_program_that_has_acknowledged_a_loss_does_not_raise_it() -> None:
    state = member()
    state.handle(DIED, 0)
    state.acknowledge_losses()
    state.handle(configure(2, 0, 1), 0)
    state.submit(entry("a"))


def test_a_cell_within_another_does_not_hide_it() -> None:
    state = member()
    state.handle(DIED, 0)
    state.begin_cell("second")
    assert raised(state, "a").cause.kind is CauseKind.RANK_DIED


def test_elastic_training_handles_losses_by_itself() -> None:
    state = member()
    state.handle(DIED, 0)
    state.set_elastic(True)
    state.handle(configure(2, 0, 1), 0)
    state.submit(entry("a"))
    died = m.Abort(0, 2, CauseKind.RANK_DIED.value, (1,), "rank 1 died: exit code 1", "")
    assert failures(state.handle(died, 0)).keys() == {"a"}
    assert "rank 1 died" in str(raised(state, "b"))
    assert "rank 1 died" in str(raised(state, "b"))  # until all restart
    state.restarted()
    state.handle(configure(3, 0), 0)
    state.submit(entry("c"))


def test_each_process_set_raises_its_own_loss() -> None:
    state = member()
    state.handle(configure(1, 0, 1, process_set=1), 0)
    state.handle(DIED, 0)
    state.submit(entry("a", 1))
    assert raised(state, "a").cause.ranks == (2,)


def test_a_member_that_is_lost_with_a_generation_of_another_end_is_missed() -> None:
    """Rank 2 fails, and dies before the next generation begins."""
    state = member()
    state.handle(m.Abort(0, 1, CauseKind.CELL_FAILED.value, (2,), "rank 2 raised ValueError", ""), 0)
    state.submit(entry("a"))
    assert failures(state.handle(configure(2, 0, 1), 0)) == {
        "a": "allreduce `a` (line 1): rank 2 is gone\nRun this again with the ranks and process sets that there are now."
    }
    state.submit(entry("b"))


def test_a_successor_of_the_coordinator_begins_without_some() -> None:
    state = member()
    state.submit(entry("a"))
    state.disconnect(Cause(CauseKind.COORDINATOR_LOST, (), "the coordinator is gone"))
    state.reconnect((0, 1, 2))
    state.handle(configure(9, 0), 0)
    error = raised(state, "b")
    assert (error.cause.ranks, str(error).splitlines()[0]) == (
        (1, 2),
        "allreduce `b` (line 1): ranks 1,2 are gone",
    )
    state.submit(entry("b"))


def test_a_successor_causes_errors_only_for_losses_that_were_not_raised() -> None:
    state = member()
    state.submit(entry("a"))
    state.handle(DIED, 0)
    state.disconnect(Cause(CauseKind.COORDINATOR_LOST, (), "the coordinator is gone"))
    state.reconnect((0, 1))
    state.handle(configure(9, 0, 1), 0)
    state.submit(entry("b"))
    state.disconnect(Cause(CauseKind.COORDINATOR_LOST, (), "the coordinator is gone"))
    state.reconnect((0, 1))
    state.handle(configure(17, 0), 0)
    assert raised(state, "c").cause.ranks == (1,)


def test_another_process_with_the_number_of_a_member_is_not_that_member() -> None:
    state = member()
    state.disconnect(Cause(CauseKind.COORDINATOR_LOST, (), "the coordinator is gone"))
    state.reconnect((0, 1, 2))
    replaced = m.Configure(0, 9, (*MEMBERS[:2], m.Member(2, "host", 500)), "gloo", {}, False)
    state.handle(replaced, 0)
    assert raised(state, "a").cause.ranks == (2,)


def test_members_that_leave_in_order_are_not_lost() -> None:
    state = member()
    state.submit(entry("a"))
    assert failures(state.handle(configure(2, 0, 1), 0)) == {}
    state.submit(entry("b"))


def test_two_that_die_together_are_one_loss() -> None:
    """The coordinator ends a generation once, and names the first."""
    state = member()
    state.submit(entry("a"))
    state.handle(DIED, 0)
    state.handle(configure(2, 0), 0)
    state.submit(entry("a"))
