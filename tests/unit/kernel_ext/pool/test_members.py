"""The life of ranks, without processes."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hvdlab.kernel_ext.notebook.rank_states import (
    AgentReady,
    AskReady,
    AwaitLeaving,
    Effect,
    ExpectRanks,
    LeaveAtCommit,
    PoolSizeSet,
    RankPhase,
    RanksAdopted,
    RankStates,
    Reconnected,
    ReportRankLeft,
    ReportRankLost,
    Resized,
    SpawnRanks,
)
from hvdlab.launch.starter import Ended, Started


def ready_members(count: int) -> RankStates:
    members = RankStates()
    members.handle(PoolSizeSet(tuple(range(count))))
    for rank in range(count):
        members.handle(Started(rank, 100 + rank))
        members.handle(AgentReady(rank))
    return members


def test_first_ranks_are_expected_before_they_are_started() -> None:
    members = RankStates()
    assert members.handle(PoolSizeSet((0, 1))) == [ExpectRanks((0, 1)), SpawnRanks((0, 1), 2)]
    assert members.ready == ()


def test_growing_starts_only_the_new_ranks_and_tells_the_others() -> None:
    members = ready_members(2)
    assert members.handle(PoolSizeSet((0, 1, 2, 3))) == [
        ExpectRanks((0, 1, 2, 3)),
        Resized((0, 1), 4),
        SpawnRanks((2, 3), 4),
    ]


def test_shrinking_lets_the_last_ranks_leave() -> None:
    members = ready_members(3)
    assert members.handle(PoolSizeSet((0, 1))) == [ExpectRanks((0, 1)), AwaitLeaving(2), Resized((0, 1), 2)]
    assert members.living() == {0: 100, 1: 101, 2: 102}
    assert members.handle(Ended(2, 102, "exit code 0")) == [ReportRankLeft(2, 102)]
    assert members.living() == {0: 100, 1: 101}


def test_a_rank_that_is_wanted_again_while_it_leaves_is_started_after_its_end() -> None:
    members = ready_members(2)
    members.handle(PoolSizeSet((0,)))
    assert SpawnRanks((1,), 2) not in members.handle(PoolSizeSet((0, 1)))
    assert members.handle(Ended(1, 101, "exit code 0")) == [ReportRankLeft(1, 101), SpawnRanks((1,), 2)]


def test_ranks_that_leave_at_a_commit_are_let_go_and_not_sent_away() -> None:
    members = ready_members(3)
    assert members.handle(PoolSizeSet((0, 1), at_commit=True)) == [
        LeaveAtCommit((2,)),
        AwaitLeaving(2),
        Resized((0, 1), 2),
    ]
    assert (members.ready, members.let_go) == ((0, 1), (2,))
    # The coordinator has taken it out of the world. Its successor must not wait for it, either.
    assert members.handle(Ended(2, 102, "exit code 0")) == [ReportRankLeft(2, 102), ExpectRanks((0, 1))]
    assert members.let_go == ()


def test_a_rank_that_dies_before_the_commit_at_which_it_is_let_go_has_not_just_left() -> None:
    members = ready_members(3)
    members.handle(PoolSizeSet((0,), at_commit=True))
    assert members.handle(Ended(2, 102, "killed by SIGKILL")) == [
        ReportRankLeft(2, 102, "killed by SIGKILL"),
        ExpectRanks((0, 1)),
        LeaveAtCommit((1,)),
    ]


def test_a_successor_of_the_coordinator_lets_ranks_go_at_their_commit_as_well() -> None:
    """Without them in the world they would be sent away in the middle of a step."""
    members = ready_members(4)
    members.handle(PoolSizeSet((0, 1, 2)))
    members.handle(PoolSizeSet((0, 1), at_commit=True))
    # Rank 3 was to leave at once, and still is.
    assert members.handle(Reconnected()) == [ExpectRanks((0, 1, 2)), LeaveAtCommit((2,)), Resized((0, 1), 2)]


def test_a_successor_of_the_coordinator_hears_from_ranks_that_were_starting() -> None:
    members = ready_members(1)
    members.handle(PoolSizeSet((0, 1)))
    assert members.handle(Reconnected()) == [ExpectRanks((0, 1)), Resized((0,), 2), AskReady((1,))]


def test_other_changes_leave_a_rank_that_leaves_at_a_commit_its_time() -> None:
    members = ready_members(3)
    members.handle(PoolSizeSet((0, 1), at_commit=True))
    members.handle(Ended(0, 100, "killed by SIGKILL"))
    world = [ExpectRanks((0, 1, 2)), LeaveAtCommit((2,))]
    assert members.handle(PoolSizeSet((0, 1), replace_lost=True)) == [*world, SpawnRanks((0,), 2)]


def test_a_rank_that_is_wanted_again_before_its_commit_is_expected_when_it_starts() -> None:
    members = ready_members(3)
    members.handle(PoolSizeSet((0, 1), at_commit=True))
    members.handle(PoolSizeSet((0, 1, 2)))
    gone = members.handle(Ended(2, 102, "exit code 0"))
    assert gone == [ReportRankLeft(2, 102), ExpectRanks((0, 1, 2)), SpawnRanks((2,), 3)]


def test_a_rank_that_another_process_has_let_go_leaves_at_its_commit() -> None:
    members = RankStates()
    members.handle(RanksAdopted((0, 1), {0: 100, 1: 101, 2: 102}, (2, 3)))
    assert (members.wanted, members.let_go) == ((0, 1), (2,))
    assert members.living() == {0: 100, 1: 101, 2: 102}
    assert members.handle(Reconnected()) == [
        ExpectRanks((0, 1, 2)),
        LeaveAtCommit((2,)),
        Resized((), 2),
        AskReady((0, 1)),
    ]
    assert members.handle(Ended(2, 102, "exit code 0")) == [ReportRankLeft(2, 102), ExpectRanks((0, 1))]


def test_a_ready_rank_s_death_is_told_once() -> None:
    members = ready_members(2)
    assert members.handle(Ended(1, 101, "killed by SIGKILL")) == [ReportRankLost(1, 101, "killed by SIGKILL")]
    assert members.handle(Ended(1, 101, "killed by SIGKILL")) == []
    assert members.lost == (1,)
    assert members.ready == (0,)


def test_repair_starts_the_lost_rank_under_its_number() -> None:
    members = ready_members(2)
    members.handle(Ended(1, 101, "killed by SIGKILL"))
    assert members.handle(PoolSizeSet((0, 1))) == [ExpectRanks((0, 1))]
    assert members.handle(PoolSizeSet((0, 1), replace_lost=True)) == [
        ExpectRanks((0, 1)),
        SpawnRanks((1,), 2),
    ]


def test_news_of_an_earlier_process_is_not_the_replacement_s() -> None:
    members = ready_members(1)
    members.handle(Ended(0, 100, "killed by SIGKILL"))
    members.handle(PoolSizeSet((0,), replace_lost=True))
    members.handle(Started(0, 200))
    members.handle(AgentReady(0))
    assert members.handle(Ended(0, 100, "killed by SIGKILL")) == []
    assert members.ready == (0,)


class MembersMachine(RuleBasedStateMachine):
    """Machine of any order of requests and events: starts and reports fit the events."""

    def __init__(self) -> None:
        super().__init__()
        self.members = RankStates()
        self.processes: dict[int, int] = {}  # rank to pid, the real process
        self.ordered: set[int] = set()
        self.next_pid = 1
        self.expected: tuple[
            int, ...
        ] = ()  # as the coordinator has heard it last, but for those it has let go
        self.sent_away: set[int] = set()  # ranks that were ordered to leave at once
        self.let_go: set[int] = set()  # ranks that may train until their commit

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, ExpectRanks):
                self.expected = effect.ranks
                self.sent_away |= {*self.processes, *self.ordered} - {*effect.ranks}
                assert self.let_go <= {*effect.ranks}, "none is sent away before its commit"
            elif isinstance(effect, LeaveAtCommit):
                self.let_go |= {*effect.ranks} & self.processes.keys() - self.sent_away
            elif isinstance(effect, ReportRankLeft):
                self.let_go.discard(effect.rank)
                self.sent_away.discard(effect.rank)
            elif isinstance(effect, SpawnRanks):
                assert {*effect.ranks} <= {*self.expected}, "the coordinator refuses others"
                for rank in effect.ranks:
                    assert rank not in self.processes, "a number runs once"
                    assert rank not in self.ordered
                    assert rank in self.members.wanted
                    self.ordered.add(rank)
            elif isinstance(effect, AwaitLeaving):
                assert effect.rank not in self.members.wanted
            elif isinstance(effect, ReportRankLost):
                assert effect.rank in self.members.wanted

    @rule(size=st.integers(0, 5), replace=st.booleans())
    def want(self, size: int, replace: bool) -> None:
        self.take(self.members.handle(PoolSizeSet(tuple(range(size)), replace)))

    @rule(size=st.integers(0, 5))
    def let_some_go(self, size: int) -> None:
        wanted = tuple(rank for rank in self.members.wanted if rank < size)
        self.take(self.members.handle(PoolSizeSet(wanted, at_commit=True)))

    @rule()
    def reconnect(self) -> None:
        effects = self.members.handle(Reconnected())
        self.take(effects)
        told = {rank for effect in effects if isinstance(effect, LeaveAtCommit) for rank in effect.ranks}
        assert self.let_go <= told, "a successor has to know of all"
        assert {*self.members.wanted} <= {*self.expected} <= {*self.members.wanted, *told}

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
        self.take(self.members.handle(AgentReady(rank)))

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
        for rank in self.members.in_state(RankPhase.STARTING):
            assert rank in self.processes or rank in self.ordered


TestMembersMachine = MembersMachine.TestCase
