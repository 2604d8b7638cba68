"""The launcher's decisions, without processes."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlab.launch.processes import ExitStatus
from hvdlab.runner import events as e
from hvdlab.runner.supervisor import Growth, JobPhase, Policy, Supervisor, origin_of
from support.effort import examples

OK = ExitStatus()
BAD = ExitStatus(1)
KILLED = ExitStatus(signal=signal.SIGKILL)


class Script:
    """Supervisor with a clock of its own, and all its requests."""

    def __init__(self, size: int, **policy: Any) -> None:
        self.now = 0.0
        self.supervisor = Supervisor(Policy(("localhost",) * size, **policy), self.now)
        self.done: list[e.Effect] = []
        for rank in range(size):
            self.tell(e.Spawned(rank, 100 + rank))

    def tell(self, *events: e.Event) -> list[e.Effect]:
        new: list[e.Effect] = []
        for event in events:
            new += self.supervisor.handle(event, self.now)
        self.done += new
        return new

    def wait(self) -> list[e.Effect]:
        """Until the next deadline."""
        assert self.supervisor.deadline is not None
        self.now = max(self.now, self.supervisor.deadline)
        return self.tell(e.JobTick())

    def of(self, kind: type) -> list[Any]:
        return [effect for effect in self.done if isinstance(effect, kind)]


def test_all_well() -> None:
    script = Script(2)
    script.tell(e.ProcessEnded(1, OK))
    assert not script.of(e.Finish)
    assert script.tell(e.ProcessEnded(0, OK))[-1] == e.Finish(0)
    assert script.supervisor.deadline is None


def test_the_first_failure_ends_the_others_at_once() -> None:
    script = Script(3)
    effects = script.tell(e.ProcessEnded(1, ExitStatus(3)))
    assert e.FailureReport(1, ExitStatus(3)) in effects
    assert e.SendSignal((0, 2), signal.SIGTERM) in effects
    script.tell(
        e.ProcessEnded(0, ExitStatus(signal=signal.SIGTERM)),
        e.ProcessEnded(2, ExitStatus(signal=signal.SIGTERM)),
    )
    assert script.of(e.Finish) == [e.Finish(3)]
    assert len(script.of(e.FailureReport)) == 1


def test_what_does_not_end_is_killed() -> None:
    script = Script(2, grace=5.0)
    script.tell(e.ProcessEnded(0, BAD))
    effects = script.wait()
    assert script.now == 5.0
    assert e.SendSignal((1,), signal.SIGKILL) in effects
    assert script.tell(e.ProcessEnded(1, KILLED))[-1] == e.Finish(1)


def test_what_can_not_be_killed_is_left_behind() -> None:
    script = Script(2)
    script.tell(e.ProcessEnded(0, BAD))
    script.wait()
    assert script.wait()[-1] == e.Finish(1)
    assert "rank 1 can't be killed" in script.of(e.Notice)[-1].text


def test_a_follower_that_ends_first_is_not_to_blame() -> None:
    script = Script(3)
    script.tell(*(e.Connected(rank) for rank in range(3)))
    script.tell(e.Reported(1, "ValueError: boom"))
    script.tell(e.Reported(0, "AbortedError: rank 1 left", (1,)))
    script.tell(e.ProcessEnded(0, BAD), e.RankDisconnected(0))
    assert script.supervisor.phase is JobPhase.SETTLING
    script.tell(e.Reported(2, "AbortedError: rank 0 left", (0,)), e.ProcessEnded(1, ExitStatus(7)))
    assert script.of(e.FailureReport) == [e.FailureReport(1, ExitStatus(7), "ValueError: boom", (0, 2))]
    script.tell(e.ProcessEnded(2, BAD))
    assert script.of(e.Finish) == [e.Finish(7)]


def test_rank_that_takes_seconds_to_end_is_still_the_first_to_fail() -> None:
    script = Script(2)
    script.tell(e.Connected(0), e.Connected(1), e.RankDisconnected(1))
    script.tell(e.Reported(0, "AbortedError: rank 1 left", (1,)), e.RankDisconnected(0))
    script.tell(e.ProcessEnded(0, BAD))
    script.now = 4.0
    script.tell(e.JobTick(), e.ProcessEnded(1, ExitStatus(3)))
    assert script.of(e.FailureReport) == [e.FailureReport(1, ExitStatus(3), "", (0,))]
    assert script.of(e.Finish) == [e.Finish(3)]


def test_an_elastic_job_whose_ranks_all_fail_alike_is_not_started_anew_again_and_again() -> None:
    script = Script(3, min_ranks=1)
    script.tell(*(e.Connected(rank) for rank in range(3)))
    for rank in range(3):
        script.tell(
            e.Reported(rank, "TypeError: no such argument"),
            e.RankDisconnected(rank),
            e.ProcessEnded(rank, BAD),
        )
    assert len(script.of(e.RestartRank)) == 2
    assert script.of(e.FailureReport)[0].rank == 2
    assert "all ranks failed with the same exception" in script.of(e.Notice)[-1].text


@pytest.mark.parametrize(
    "last",
    [e.Reported(1, "OSError: something of its own"), e.Reported(1, "AbortedError: rank 0 left", (0,))],
)
def test_elastic_starts_ranks_anew_that_fail_for_different_reasons(last: e.Reported) -> None:
    script = Script(2, min_ranks=1)
    script.tell(e.Connected(0), e.Connected(1))
    script.tell(e.Reported(0, "TypeError: no such argument"), e.RankDisconnected(0), e.ProcessEnded(0, BAD))
    script.tell(last, e.RankDisconnected(1), e.ProcessEnded(1, BAD))
    assert len(script.of(e.RestartRank)) == 2
    assert not script.of(e.FailureReport)


def test_report_after_the_new_start_of_its_rank_is_of_the_old_one() -> None:
    """The coordinator passes the report on, and the agent of the host the end: the latter can come first."""
    script = Script(2, min_ranks=1, hang=30.0)
    script.tell(e.Connected(0), e.Connected(1), e.ProcessEnded(1, BAD))
    assert script.of(e.RestartRank) == [e.RestartRank(1)]
    script.tell(e.Reported(1, "ValueError: boom"), e.RankDisconnected(1))
    script.tell(e.Spawned(1, 300), e.Connected(1))
    script.now = 100.0
    script.tell(e.JobTick())
    assert not script.of(e.SendSignal), "a rank that trains is killed"
    script.tell(e.Reported(1, "ValueError: again"))
    script.wait()
    assert script.of(e.SendSignal) == [e.SendSignal((1,), signal.SIGKILL)]


def test_elastic_forgets_a_failure_once_a_rank_has_joined_again() -> None:
    script = Script(2, min_ranks=1)
    script.tell(e.Connected(0), e.Connected(1))
    script.tell(e.Reported(0, "OSError: now and then"), e.RankDisconnected(0), e.ProcessEnded(0, BAD))
    script.tell(e.Spawned(0, 300), e.Connected(0))
    script.tell(e.Reported(1, "OSError: now and then"), e.RankDisconnected(1), e.ProcessEnded(1, BAD))
    assert len(script.of(e.RestartRank)) == 2
    assert not script.of(e.FailureReport)


def test_a_failure_is_followed_to_the_rank_that_failed_for_a_reason_of_its_own() -> None:
    assert origin_of(0, {0: (1,), 1: (2,), 2: ()}) == 2
    assert origin_of(0, {0: (1,), 1: (0,)}) == 1, "ranks that blame each other end the search"
    assert origin_of(0, {0: (3,), 1: ()}) == 0, "a rank that has not failed is no cause"


def test_the_culprit_is_not_waited_for_for_ever() -> None:
    script = Script(2, settle=1.0)
    script.tell(e.Reported(0, "AbortedError: …", (1,)), e.ProcessEnded(0, BAD))
    assert not script.of(e.FailureReport)
    assert e.FailureReport(0, BAD, "AbortedError: …") in script.wait()
    assert script.now == 1.0


def test_last_words_that_are_still_on_their_way_are_waited_for() -> None:
    script = Script(2)
    script.tell(e.Connected(0), e.Connected(1))
    script.tell(e.ProcessEnded(1, KILLED))
    assert not script.of(e.FailureReport)
    script.tell(e.RankDisconnected(1))
    assert script.of(e.FailureReport) == [e.FailureReport(1, KILLED)]


def test_what_the_coordinator_knows_is_said_if_the_rank_said_nothing() -> None:
    script = Script(2)
    script.tell(
        e.Connected(0),
        e.Connected(1),
        e.RankDisconnected(1, "no sign of life for 30 s"),
        e.ProcessEnded(1, BAD),
    )
    assert script.of(e.FailureReport) == [e.FailureReport(1, BAD, "no sign of life for 30 s")]


def test_a_culprit_that_the_coordinator_has_given_up_is_not_waited_for() -> None:
    script = Script(2)
    script.tell(e.Connected(0), e.Connected(1), e.RankDisconnected(1, "no sign of life for 30 s"))
    script.tell(
        e.Reported(0, "AbortedError: rank 1 died", (1,)), e.RankDisconnected(0), e.ProcessEnded(0, BAD)
    )
    assert script.of(e.FailureReport) == [e.FailureReport(1, None, "no sign of life for 30 s", (0,))]
    assert e.SendSignal((1,), signal.SIGTERM) in script.done


def test_who_left_early_is_named() -> None:
    script = Script(2)
    script.tell(e.ProcessEnded(1, OK))
    script.tell(e.Reported(0, "AbortedError: rank 1 left", (1,)), e.ProcessEnded(0, BAD))
    assert script.of(e.FailureReport) == [e.FailureReport(0, BAD, "AbortedError: rank 1 left", (), (1,))]
    assert script.of(e.Finish) == [e.Finish(1)]


def test_ranks_that_blame_each_other() -> None:
    script = Script(2)
    script.tell(e.Reported(0, "a", (1,)), e.Reported(1, "b", (0,)))
    script.tell(e.ProcessEnded(0, BAD), e.ProcessEnded(1, BAD))
    assert len(script.of(e.FailureReport)) == 1
    assert script.of(e.Finish) == [e.Finish(1)]


def test_a_rank_whose_program_failed_but_does_not_end() -> None:
    script = Script(2, hang=10.0)
    script.tell(e.Reported(1, "ValueError: boom"))
    effects = script.wait()
    assert script.now == 10.0
    assert e.FailureReport(1, None, "ValueError: boom") in effects
    assert e.SendSignal((0, 1), signal.SIGTERM) in effects


def test_interrupt_then_again() -> None:
    script = Script(2)
    effects = script.tell(e.Stopped(signal.SIGINT))
    assert e.SendSignal((0, 1), signal.SIGINT) in effects
    assert len([effect for effect in effects if isinstance(effect, e.Notice)]) == 1
    assert e.SendSignal((0, 1), signal.SIGKILL) in script.tell(e.Stopped(signal.SIGINT))
    script.tell(e.ProcessEnded(0, KILLED), e.ProcessEnded(1, KILLED))
    assert script.of(e.Finish) == [e.Finish(130)]
    assert not script.of(e.FailureReport)


def test_sigterm_is_passed_on() -> None:
    script = Script(1)
    assert e.SendSignal((0,), signal.SIGTERM) in script.tell(e.Stopped(signal.SIGTERM))
    assert script.tell(e.ProcessEnded(0, ExitStatus(signal=signal.SIGTERM)))[-1] == e.Finish(143)


def test_no_rank_is_late_while_none_can_be_started() -> None:
    """A batch system's queue takes hours: the time limit begins when it is over."""
    supervisor = Supervisor(Policy(("", ""), start_timeout=30.0), 0.0)
    assert supervisor.handle(e.RanksWaiting("job 7 is PENDING"), 1.0) == []
    assert supervisor.deadline is None
    assert supervisor.handle(e.JobTick(), 7200.0) == []
    assert supervisor.handle(e.RanksWaiting(""), 7200.0) == []
    assert supervisor.deadline == 7230.0
    said = [effect.text for effect in supervisor.handle(e.JobTick(), 7230.0) if isinstance(effect, e.Notice)]
    assert any("could not be started" in text for text in said)


def test_hosts_that_do_not_answer_are_named() -> None:
    supervisor = Supervisor(Policy(("a", "b", "b"), start_timeout=30.0), 0.0)
    supervisor.handle(e.Spawned(0, 1), 1.0)
    effects = supervisor.handle(e.JobTick(), 30.0)
    assert e.Notice("ranks 1,2 could not be started on b within 30 s") in effects
    assert e.SendSignal((0, 1, 2), signal.SIGTERM) in effects


def test_ranks_that_do_not_join_are_named() -> None:
    script = Script(3, join_timeout=5.0)
    script.tell(e.Connected(1))
    effects = script.wait()
    assert e.Notice("ranks 0,2 did not come to hvd.init() within 5 s") in effects
    assert script.supervisor.phase is JobPhase.ENDING


def test_ranks_that_never_join_are_no_failure_by_themselves() -> None:
    script = Script(2, join_timeout=5.0)
    assert script.supervisor.deadline is None
    script.tell(e.ProcessEnded(0, OK), e.ProcessEnded(1, OK))
    assert script.of(e.Finish) == [e.Finish(0)]


def test_a_lost_host() -> None:
    script = Script(3)
    script.tell(e.Unstartable((1, 2), "the connection to b is lost"))
    assert script.of(e.FailureReport)[0].rank == 1
    assert str(script.of(e.FailureReport)[0].outcome) == "the connection to b is lost"
    script.tell(e.ProcessEnded(0, KILLED))
    assert script.of(e.Finish) == [e.Finish(1)]


def test_a_lost_coordinator() -> None:
    script = Script(2)
    script.tell(e.CoordinatorLost("the coordinator is lost"))
    assert e.SendSignal((0, 1), signal.SIGTERM) in script.done


def test_elastic_replaces_up_to_the_limit() -> None:
    script = Script(2, min_ranks=2, reset_limit=1)
    script.tell(e.Connected(0), e.Connected(1))
    effects = script.tell(e.ProcessEnded(1, KILLED))
    assert e.RestartRank(1) in effects
    assert e.SetExpectedRanks((0, 1)) in effects
    assert not script.of(e.SendSignal)
    script.tell(e.Spawned(1, 300), e.Connected(1), e.ProcessEnded(1, KILLED), e.RankDisconnected(1))
    assert script.of(e.FailureReport)[0].rank == 1
    assert e.SendSignal((0,), signal.SIGTERM) in script.done


def test_elastic_goes_on_without_a_failed_rank_that_does_not_end() -> None:
    script = Script(3, min_ranks=1, reset_limit=0)
    script.tell(e.Connected(0), e.Connected(1), e.Connected(2), e.Reported(1, "OSError: no space"))
    assert script.wait() == [
        e.Notice("rank 1 has failed (OSError: no space) and did not end within 30 s; killing it"),
        e.SendSignal((1,), signal.SIGKILL),
    ]
    script.tell(e.ProcessEnded(1, KILLED))
    assert script.supervisor.phase is JobPhase.RUNNING
    script.tell(e.ProcessEnded(0, OK), e.ProcessEnded(2, OK))
    assert script.done[-1] == e.Finish(0)


def test_elastic_goes_on_with_fewer() -> None:
    script = Script(3, min_ranks=2, reset_limit=0)
    script.tell(*(e.Connected(rank) for rank in range(3)))
    assert e.SetExpectedRanks((0, 2)) in script.tell(e.ProcessEnded(1, KILLED))
    script.tell(e.ProcessEnded(0, OK), e.ProcessEnded(2, OK))
    assert script.of(e.Finish) == [e.Finish(0)]


def test_elastic_replaces_a_rank_that_is_lost_again_before_it_is_back() -> None:
    script = Script(2, min_ranks=1)
    script.tell(e.Connected(0), e.Connected(1), e.ProcessEnded(1, KILLED), e.Spawned(1, 300))
    effects = script.tell(e.ProcessEnded(1, KILLED))
    assert e.RestartRank(1) in effects
    assert e.SetExpectedRanks((0, 1)) in effects


def test_elastic_expects_nobody_who_was_given_up() -> None:
    script = Script(3, min_ranks=1, reset_limit=2)
    script.tell(*(e.Connected(rank) for rank in range(3)))
    script.tell(e.ProcessEnded(0, KILLED), e.Spawned(0, 300), e.ProcessEnded(0, KILLED), e.Spawned(0, 301))
    assert e.SetExpectedRanks((1, 2)) in script.tell(e.ProcessEnded(0, KILLED))
    assert script.of(e.RestartRank) == [e.RestartRank(0)] * 2


def test_elastic_ends_what_came_back_too_late() -> None:
    script = Script(2, min_ranks=2)
    script.tell(e.Connected(0), e.Connected(1), e.ProcessEnded(1, KILLED), e.Spawned(1, 300))
    assert e.SendSignal((1,), signal.SIGTERM) in script.tell(e.ProcessEnded(0, OK))
    script.tell(e.ProcessEnded(1, KILLED))
    assert script.of(e.Finish) == [e.Finish(0)]


def test_elastic_lets_what_takes_part_again_come_to_its_end() -> None:
    script = Script(2, min_ranks=1)
    script.tell(e.Connected(0), e.Connected(1), e.ProcessEnded(1, KILLED), e.Spawned(1, 300), e.Connected(1))
    assert not any(isinstance(effect, e.SendSignal) for effect in script.tell(e.ProcessEnded(0, OK)))
    script.tell(e.ProcessEnded(1, OK))
    assert script.of(e.Finish) == [e.Finish(0)]


def test_elastic_ends_ranks_that_have_joined_when_all_others_had_left() -> None:
    script = Script(4, min_ranks=2)
    script.tell(*(e.Connected(rank) for rank in range(4)))
    for rank in (1, 3):
        script.tell(e.RankDisconnected(rank, ""), e.ProcessEnded(rank, KILLED), e.Spawned(rank, 300 + rank))
    script.tell(*(e.RankDisconnected(rank) for rank in (0, 2)), *(e.Connected(rank) for rank in (1, 3)))
    assert e.SendSignal((1, 3), signal.SIGTERM) in script.tell(e.ProcessEnded(2, OK))
    script.tell(e.ProcessEnded(0, OK), e.ProcessEnded(1, KILLED), e.ProcessEnded(3, KILLED))
    assert script.of(e.Finish) == [e.Finish(0)]


def test_elastic_lets_a_rank_train_on_with_one_that_is_still_there() -> None:
    script = Script(3, min_ranks=1)
    script.tell(*(e.Connected(rank) for rank in range(3)))
    script.tell(e.RankDisconnected(1), e.ProcessEnded(1, KILLED), e.Spawned(1, 300))
    script.tell(e.RankDisconnected(0), e.Connected(1))
    assert not any(isinstance(effect, e.SendSignal) for effect in script.tell(e.ProcessEnded(0, OK)))
    script.tell(e.RankDisconnected(2), e.ProcessEnded(2, OK), e.RankDisconnected(1), e.ProcessEnded(1, OK))
    assert script.of(e.Finish) == [e.Finish(0)]


def test_elastic_spares_a_rank_that_was_alone_until_the_others_were_started_anew() -> None:
    script = Script(2, min_ranks=1)
    script.tell(
        e.Connected(0), e.Connected(1), e.RankDisconnected(1), e.ProcessEnded(1, KILLED), e.Spawned(1, 300)
    )
    script.tell(
        e.RankDisconnected(0), e.Connected(1), e.ProcessEnded(0, KILLED), e.Spawned(0, 301), e.Connected(0)
    )
    assert not any(isinstance(effect, e.SendSignal) for effect in script.tell(e.ProcessEnded(0, OK)))
    script.tell(e.ProcessEnded(1, OK))
    assert script.of(e.Finish) == [e.Finish(0)]


def test_a_rank_that_was_cut_off_and_is_back_is_told_of_and_takes_part_again() -> None:
    script = Script(2, min_ranks=1)
    lost = e.RankDisconnected(1, "no sign of life for 30 s")
    script.tell(e.Connected(0), e.Connected(1), lost)
    assert script.tell(e.RankReturned(1, 44.6)) == [
        e.Notice("rank 1 was cut off for 45 s, and is back with its memory")
    ]
    script.tell(e.Connected(1))
    assert not any(isinstance(effect, e.SendSignal) for effect in script.tell(e.ProcessEnded(0, OK)))
    assert script.tell(e.ProcessEnded(1, OK))[-1] == e.Finish(0)


@pytest.mark.parametrize("first", ["it is back", "the others end"])
def test_elastic_ends_a_rank_that_is_back_when_the_others_have_ended(first: str) -> None:
    script = Script(2, min_ranks=1)
    script.tell(e.Connected(0), e.Connected(1), e.RankDisconnected(1, "no sign of life for 30 s"))
    events = [e.RankReturned(1, 45.0), e.ProcessEnded(0, OK)]
    effects = script.tell(*(events if first == "it is back" else reversed(events)))
    assert [effect for effect in effects if isinstance(effect, e.SendSignal)] == [
        e.SendSignal((1,), signal.SIGTERM)
    ]
    assert script.tell(e.ProcessEnded(1, KILLED))[-1] == e.Finish(0)


def test_elastic_does_not_replace_what_never_joined() -> None:
    script = Script(2, min_ranks=2)
    script.tell(e.ProcessEnded(1, BAD))
    assert not script.of(e.RestartRank)
    assert script.of(e.FailureReport)


def _event(size: int) -> st.SearchStrategy[e.Event]:
    rank = st.integers(0, size - 1)
    outcome = st.sampled_from([OK, BAD, KILLED, ExitStatus(3)])
    some = st.lists(rank, unique=True, max_size=size).map(tuple)
    return st.one_of(
        st.builds(e.RankReturned, rank, st.just(45.0)),
        st.builds(e.Spawned, rank, st.integers(1, 9)),
        st.builds(e.ProcessEnded, rank, outcome),
        st.builds(e.Unstartable, some, st.just("lost")),
        st.builds(e.RankArrived, rank),
        st.builds(e.Formed),
        st.builds(e.Connected, rank),
        st.builds(e.RankDisconnected, rank),
        st.builds(e.Reported, rank, st.just("Error"), some),
        st.builds(e.Stopped, st.sampled_from([signal.SIGINT, signal.SIGTERM])),
        st.builds(e.CoordinatorLost, st.just("lost")),
        st.builds(e.JobTick),
    )


@pytest.mark.parametrize("minimum", [None, 2])
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_any_order_of_events_ends(minimum: int | None, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 5))
    script = Script(size, min_ranks=minimum, reset_limit=2, join_timeout=3.0, newcomer_timeout=4.0)
    for event in data.draw(st.lists(_event(size), max_size=30)):
        script.now += data.draw(st.floats(0, 2))
        living = set(script.supervisor.living)
        effects = script.tell(event)
        for effect in effects:
            if isinstance(effect, e.SendSignal):  # no ended process is signalled
                assert set(effect.ranks) <= living
            if isinstance(effect, e.FailureReport):
                assert effect.rank not in effect.followers
    # After any events, the operator's request ends it.
    for _ in range(2):
        script.tell(e.Stopped(signal.SIGINT))
    for rank in script.supervisor.living:
        script.tell(e.ProcessEnded(rank, KILLED))
    finishes = script.of(e.Finish)
    assert len(finishes) == 1
    assert script.done[-1] == finishes[0]
    assert len(script.of(e.FailureReport)) <= 1
    assert len(script.of(e.RestartRank)) <= 2
    if script.of(e.FailureReport) and (first := script.of(e.FailureReport)[0].outcome) is not None:
        assert finishes[0].code == first.exit_code


# -- ranks that do not come -------------------------------------------------------------------------------------------


def unstarted(*hosts: str, started: tuple[int, ...] = (0,), **policy: Any) -> Script:
    """Return a job of ranks on these hosts, of which some have been started."""
    script = Script(0)
    script.supervisor = Supervisor(Policy(hosts, start_timeout=30.0, **policy), 0.0)
    script.tell(*(e.Spawned(rank, 100 + rank) for rank in started))
    return script


def test_a_job_does_not_wait_for_the_end_of_what_was_never_started() -> None:
    script = unstarted("a", "b")
    script.wait()
    assert "rank 1 could not be started on b within 30 s" in [said.text for said in script.of(e.Notice)]
    assert script.tell(e.ProcessEnded(0, KILLED))[-1] == e.Finish(1)


def test_an_elastic_job_goes_on_without_a_rank_whose_start_hangs() -> None:
    script = unstarted("a", "b", min_ranks=1)
    effects = script.wait()
    assert effects == [
        e.Notice("rank 1 could not be started on b within 30 s; going on without it"),
        e.SetExpectedRanks((0,)),
    ]
    assert script.tell(e.Connected(0), e.Formed()) == []
    assert script.supervisor.deadline is None
    assert script.tell(e.ProcessEnded(0, OK))[-1] == e.Finish(0)


def test_what_was_given_up_and_starts_after_all_is_killed() -> None:
    script = unstarted("a", "b", min_ranks=1)
    script.wait()
    assert script.tell(e.Spawned(1, 101)) == [e.SendSignal((1,), signal.SIGKILL)]
    assert script.tell(e.ProcessEnded(1, KILLED)) == [e.ReportRankDeath(1, "killed by SIGKILL")]
    assert not script.of(e.RestartRank)
    assert script.tell(e.ProcessEnded(0, OK))[-1] == e.Finish(0)


def test_an_elastic_job_ends_if_too_few_ranks_are_started() -> None:
    script = unstarted("a", "b", "b", min_ranks=2)
    effects = script.wait()
    assert e.Notice("ranks 1,2 could not be started on b within 30 s, and --min-np is 2") in effects
    assert script.tell(e.ProcessEnded(0, KILLED))[-1] == e.Finish(1)


def test_a_rank_whose_second_start_hangs_is_given_up() -> None:
    script = Script(2, min_ranks=1)
    script.tell(e.Connected(0), e.Connected(1), e.Formed())
    script.now = 100.0
    assert e.RestartRank(1) in script.tell(e.ProcessEnded(1, KILLED))
    effects = script.wait()
    assert script.now == 130.0
    assert e.Notice("rank 1 could not be started on localhost within 30 s; going on without it") in effects
    assert e.SetExpectedRanks((0,)) in effects


@pytest.mark.parametrize("minimum", [1, 2])
def test_a_rank_that_starts_and_never_joins(minimum: int) -> None:
    script = unstarted("a", "b", started=(0, 1), min_ranks=minimum, join_timeout=60.0)
    script.tell(e.Connected(0))
    effects = script.wait()
    said = "rank 1 on b did not come to hvd.init() within 60 s"
    if minimum == 2:
        assert e.Notice(f"{said}, and --min-np is 2") in effects
        assert script.supervisor.phase is JobPhase.ENDING
        return
    assert effects == [
        e.Notice(f"{said}; going on without it"),
        e.SetExpectedRanks((0,)),
        e.SendSignal((1,), signal.SIGKILL),
    ]
    assert not script.of(e.RestartRank)
    script.tell(e.Formed(), e.ProcessEnded(1, KILLED))
    assert script.tell(e.ProcessEnded(0, OK))[-1] == e.Finish(0)


def test_one_that_does_not_end_when_it_was_given_up_holds_nothing_up() -> None:
    script = unstarted("a", "b", started=(0, 1), min_ranks=1, join_timeout=60.0)
    script.tell(e.Connected(0))
    script.wait()
    assert script.tell(e.ProcessEnded(0, OK))[-1] == e.Finish(0)


def test_of_hosts_that_come_and_go_one_whose_rank_does_not_join_is_put_aside() -> None:
    script = Script(0, min_ranks=1, join_timeout=60.0, growth=Growth(2, 4))
    assert e.StartOn({0: "a", 1: "b"}) in script.tell(e.Hosts({"a": 1, "b": 1}))
    script.tell(e.Spawned(0, 100), e.Spawned(1, 101), e.Connected(0))
    effects = script.wait()
    assert effects == [
        e.Notice("rank 1 on b did not come to hvd.init() within 60 s; going on without it"),
        e.SetExpectedRanks((0,)),
        e.SendSignal((1,), signal.SIGKILL),
        e.HostUnusable("b", "rank 1 did not come to hvd.init()"),
    ]
    script.tell(e.Formed())
    assert script.tell(e.ProcessEnded(1, KILLED)) == [e.ReportRankDeath(1, "killed by SIGKILL")]
    assert e.StartOn({1: "b"}) in script.tell(e.Hosts({"a": 1, "b": 1}))


def test_what_may_run_and_is_not_known_to_is_ended_with_its_host() -> None:
    """Where a rank counts as started once it has joined, there is no process yet that could be killed."""
    script = Script(0, min_ranks=1, start_timeout=600.0, join_timeout=60.0, growth=Growth(2, 4))
    script.tell(e.Hosts({"a": 1, "b": 1}), e.Spawned(0, 100), e.Connected(0))
    assert e.HostUnusable("b", "rank 1 did not come to hvd.init()", hangs=True) in script.wait()
    script.tell(e.Formed(), e.Unstartable((1,), "it was ended"))
    assert e.StartOn({1: "b"}) in script.tell(e.Hosts({"a": 1, "b": 1}))


def newcomers(**policy: Any) -> Script:
    """Return a job that trains, with two newcomers whose processes run; one of them is in the world."""
    policy = {"growth": Growth(1, 4), **policy}
    script = Script(0, min_ranks=1, join_timeout=60.0, newcomer_timeout=600.0, **policy)
    script.tell(e.Hosts({"a": 1}), e.Spawned(0, 100), e.Connected(0), e.Formed())
    script.tell(e.Hosts({"a": 1, "b": 2}), e.Spawned(1, 101), e.Spawned(2, 102), e.Connected(1))
    return script


def test_newcomers_that_have_come_may_take_their_time() -> None:
    script = newcomers()
    script.tell(e.RankArrived(2))
    assert script.supervisor.deadline is None, "rank 2 waits until the others let it in"


def test_the_number_of_a_newcomer_that_never_comes_is_free_once_it_was_given_up() -> None:
    script = newcomers()
    effects = script.wait()
    assert script.now == 600.0
    assert effects == [
        e.Notice("rank 2 on b did not come to hvd.init() within 600 s; going on without it"),
        e.SetExpectedRanks((0, 1)),
        e.SendSignal((2,), signal.SIGKILL),
        e.HostUnusable("b", "rank 2 did not come to hvd.init()"),
    ]
    assert script.supervisor.deadline is None
    script.tell(e.ProcessEnded(2, KILLED))
    assert e.StartOn({2: "c"}) in script.tell(e.Hosts({"a": 1, "c": 1}, frozenset({"b"})))
    script.tell(e.Spawned(2, 103))
    assert script.supervisor.deadline == 1200.0, "the next one has the same time"
    script.tell(e.Connected(2))
    assert script.tell(*(e.ProcessEnded(rank, OK) for rank in (2, 1, 0)))[-1] == e.Finish(0)


def test_one_that_was_given_up_and_does_not_end_takes_no_room_from_others() -> None:
    script = newcomers(growth=Growth(1, 3))
    script.wait()
    assert e.StartOn({3: "c"}) in script.tell(e.Hosts({"a": 1, "c": 1}, frozenset({"b"})))


def test_one_that_started_before_the_world_began_without_it_has_that_time_as_well() -> None:
    script = Script(0, min_ranks=1, newcomer_timeout=600.0, growth=Growth(2, 2))
    script.tell(e.Hosts({"a": 1, "b": 1}), e.Spawned(0, 100), e.Spawned(1, 101), e.Connected(0), e.Formed())
    assert e.SetExpectedRanks((0,)) in script.wait()


def test_a_newcomer_that_is_to_leave_and_does_not_end_is_killed() -> None:
    script = newcomers(grace=5.0)
    assert e.ReleaseRanks((2,)) in script.tell(e.Hosts({"a": 1, "b": 1}))
    assert script.wait() == [e.SendSignal((2,), signal.SIGTERM)]
    assert script.wait() == [e.SendSignal((2,), signal.SIGKILL)]
    script.wait()
    assert script.supervisor.deadline is None
    script.tell(e.ProcessEnded(2, KILLED))
    assert e.StartOn({2: "b"}) in script.tell(e.Hosts({"a": 1, "b": 2}))


def test_with_fixed_hosts_one_that_was_started_anew_and_never_comes_is_given_up() -> None:
    script = Script(2, min_ranks=1, join_timeout=60.0, newcomer_timeout=600.0)
    script.tell(e.Connected(0), e.Connected(1), e.Formed(), e.ProcessEnded(1, KILLED), e.Spawned(1, 201))
    effects = script.wait()
    assert e.Notice("rank 1 did not come to hvd.init() within 600 s; going on without it") in effects
    assert e.SendSignal((1,), signal.SIGKILL) in effects
    assert script.tell(e.ProcessEnded(1, KILLED), e.ProcessEnded(0, OK))[-1] == e.Finish(0)
