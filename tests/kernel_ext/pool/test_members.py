"""The life of ranks, without processes."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hvdlab.kernel_ext.members import (
    Answered,
    Died,
    Effect,
    Ended,
    Expect,
    Gone,
    Leave,
    LetGo,
    Members,
    MemberState,
    Resized,
    Start,
    Started,
    Wanted,
)


def ready_members(count: int) -> Members:
    members = Members()
    members.handle(Wanted(tuple(range(count))))
    for rank in range(count):
        members.handle(Started(rank, 100 + rank))
        members.handle(Answered(rank))
    return members


def test_first_ranks_are_expected_before_they_are_started() -> None:
    members = Members()
    assert members.handle(Wanted((0, 1))) == [Expect((0, 1)), Start((0, 1), 2)]
    assert members.ready == ()


def test_growing_starts_only_the_new_ranks_and_tells_the_others() -> None:
    members = ready_members(2)
    assert members.handle(Wanted((0, 1, 2, 3))) == [
        Expect((0, 1, 2, 3)),
        Resized((0, 1), 4),
        Start((2, 3), 4),
    ]


def test_shrinking_lets_the_last_ranks_leave() -> None:
    members = ready_members(3)
    assert members.handle(Wanted((0, 1))) == [Expect((0, 1)), Leave(2), Resized((0, 1), 2)]
    assert members.living() == {0: 100, 1: 101, 2: 102}
    assert members.handle(Ended(2, 102, "exit code 0")) == [Gone(2)]
    assert members.living() == {0: 100, 1: 101}


def test_a_rank_that_is_wanted_again_while_it_leaves_is_started_after_its_end() -> None:
    members = ready_members(2)
    members.handle(Wanted((0,)))
    assert Start((1,), 2) not in members.handle(Wanted((0, 1)))
    assert members.handle(Ended(1, 101, "exit code 0")) == [Gone(1), Start((1,), 2)]


def test_ranks_that_leave_at_a_commit_are_let_go_and_not_sent_away() -> None:
    members = ready_members(3)
    assert members.handle(Wanted((0, 1), at_commit=True)) == [LetGo((2,)), Leave(2), Resized((0, 1), 2)]
    assert members.ready == (0, 1)
    assert members.handle(Ended(2, 102, "exit code 0")) == [Gone(2)]


def test_a_ready_rank_s_death_is_told_once() -> None:
    members = ready_members(2)
    assert members.handle(Ended(1, 101, "killed by SIGKILL")) == [Died(1, 101, "killed by SIGKILL")]
    assert members.handle(Ended(1, 101, "killed by SIGKILL")) == []
    assert members.lost == (1,)
    assert members.ready == (0,)


def test_repair_starts_the_lost_rank_under_its_number() -> None:
    members = ready_members(2)
    members.handle(Ended(1, 101, "killed by SIGKILL"))
    assert members.handle(Wanted((0, 1))) == [Expect((0, 1))]
    assert members.handle(Wanted((0, 1), replace_lost=True)) == [Expect((0, 1)), Start((1,), 2)]


def test_news_of_an_earlier_process_is_not_the_replacement_s() -> None:
    members = ready_members(1)
    members.handle(Ended(0, 100, "killed by SIGKILL"))
    members.handle(Wanted((0,), replace_lost=True))
    members.handle(Started(0, 200))
    members.handle(Answered(0))
    assert members.handle(Ended(0, 100, "killed by SIGKILL")) == []
    assert members.ready == (0,)


class MembersMachine(RuleBasedStateMachine):
    """Any order of wishes and events: what is started and told fits what happened."""

    def __init__(self) -> None:
        super().__init__()
        self.members = Members()
        self.processes: dict[int, int] = {}  # rank to pid, what really runs
        self.ordered: set[int] = set()
        self.next_pid = 1

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Start):
                for rank in effect.ranks:
                    assert rank not in self.processes, "a number runs once"
                    assert rank not in self.ordered
                    assert rank in self.members.wanted
                    self.ordered.add(rank)
            elif isinstance(effect, Leave):
                assert effect.rank not in self.members.wanted
            elif isinstance(effect, Died):
                assert effect.rank in self.members.wanted

    @rule(size=st.integers(0, 5), replace=st.booleans())
    def want(self, size: int, replace: bool) -> None:
        self.take(self.members.handle(Wanted(tuple(range(size)), replace)))

    @precondition(lambda self: self.ordered)
    @rule(data=st.data(), fails=st.booleans())
    def start(self, data: st.DataObject, fails: bool) -> None:
        rank = data.draw(st.sampled_from(sorted(self.ordered)))
        self.ordered.discard(rank)
        if fails:
            self.take(self.members.handle(Ended(rank, 0, "could not be forked")))
            return
        self.processes[rank] = self.next_pid
        self.next_pid += 1
        self.take(self.members.handle(Started(rank, self.processes[rank])))

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(sorted(self.processes)))
        self.take(self.members.handle(Answered(rank)))

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(sorted(self.processes)))
        self.take(self.members.handle(Ended(rank, self.processes.pop(rank), "exit code 1")))

    @invariant()
    def wanted_ranks_are_known(self) -> None:
        for rank in self.members.wanted:
            assert self.members.get(rank) is not None

    @invariant()
    def running_processes_are_known(self) -> None:
        assert {r: p for r, p in self.members.living().items() if p} == self.processes

    @invariant()
    def ready_ranks_run(self) -> None:
        for rank in self.members.ready:
            assert rank in self.processes

    @invariant()
    def no_wanted_rank_is_forgotten(self) -> None:
        for rank in self.members.in_state(MemberState.STARTING):
            assert rank in self.processes or rank in self.ordered


TestMembersMachine = MembersMachine.TestCase
