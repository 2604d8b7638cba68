"""Placement of ranks when hosts come and go, and the supervisor's reaction to it."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlab.launch.processes import ExitStatus
from hvdlab.runner import events as e
from hvdlab.runner.supervisor import Changes, Growth, JobPhase, Policy, Supervisor, changes

HOSTS = ("a", "b", "c")
SLOTS = st.dictionaries(st.sampled_from(HOSTS), st.integers(1, 3))


def test_hosts_are_filled_and_emptied() -> None:
    two = e.Hosts({"a": 2, "b": 2})
    assert changes(two, {}, (), (), 1, 3) == Changes({0: "a", 1: "a", 2: "b"}, ())
    # The lowest free number comes back, on any host with room; running ranks are not moved.
    assert changes(two, {0: "a", 2: "b"}, (), (0, 2), 1, 3) == Changes({1: "a"}, ())
    three = {0: "a", 1: "a", 2: "b"}
    assert changes(e.Hosts({"b": 2}), three, (), (0, 1, 2), 1, 9) == Changes({3: "b"}, (0, 1))
    assert changes(e.Hosts({}, frozenset("a")), {0: "a"}, (), (0,), 1, 9) == Changes({}, ())
    # As many stay as the job needs, those that came first.
    assert changes(e.Hosts({}), three, (), (0, 1, 2), 2, 9) == Changes({}, (2,))
    # One that leaves still has its slot.
    assert changes(e.Hosts({"a": 1}), {0: "a"}, (0,), (0,), 1, 9) == Changes({}, ())


def test_ranks_that_have_joined_stay_until_as_many_others_have() -> None:
    placed = {0: "a", 1: "a", 2: "b", 3: "b"}
    only_b = e.Hosts({"b": 2})
    assert changes(only_b, placed, (), (0, 1), 2, 4) == Changes({}, ())
    assert changes(only_b, placed, (), (0, 1, 2), 2, 4) == Changes({}, (1,))
    assert changes(only_b, placed, (1,), (0, 1, 2, 3), 2, 4) == Changes({}, (0,))
    # One that has not joined itself is no loss.
    assert changes(only_b, placed, (), (0,), 2, 4) == Changes({}, (1,))


@settings(max_examples=300, deadline=None)
@given(
    SLOTS,
    st.sets(st.sampled_from(HOSTS)),
    st.dictionaries(st.integers(0, 8), st.sampled_from(HOSTS)),
    st.sets(st.integers(0, 8)),
    st.sets(st.integers(0, 8)),
    st.integers(1, 4),
    st.integers(0, 6),
)
def test_plans(
    slots: Mapping[str, int],
    bad: set[str],
    placed: Mapping[int, str],
    going: set[int],
    there: set[int],
    least: int,
    more: int,
) -> None:
    usable = {host: number for host, number in slots.items() if host not in bad}
    hosts = e.Hosts(usable, frozenset(bad))
    leaving = [rank for rank in placed if rank in going]
    joined = [rank for rank in placed if rank in there]
    plan = changes(hosts, placed, leaving, joined, least, least + more)
    assert not plan.start.keys() & placed.keys()
    assert set(plan.release) <= placed.keys() - set(leaving)
    assert not [rank for rank in plan.release if placed[rank] in bad]
    load = Counter([*placed.values(), *plan.start.values()])
    assert all(load[host] <= usable[host] for host in plan.start.values())
    staying = len(placed) - len(leaving) - len(plan.release)
    assert staying >= min(least, len(placed) - len(leaving))
    if plan.start:
        assert staying + len(plan.start) <= least + more
    before = set(joined) - set(leaving)
    assert len(before - set(plan.release)) >= min(least, len(before))
    now = dict(placed)
    for _ in range(3):  # when others have come in their place, more may leave, and so on
        now, leaving = {**now, **plan.start}, [*leaving, *plan.release]
        plan = changes(hosts, now, leaving, list(now), least, least + more)
    assert plan == Changes({}, ())


class Job:
    """Supervisor with hosts that come and go, and the world as it leaves it."""

    def __init__(self, least: int = 1, start: int = 1, most: int = 4, resets: int = 3) -> None:
        growth = Growth(start, most, wait=100.0)
        self.now = 0.0
        self.machine = Supervisor(Policy((), min_ranks=least, reset_limit=resets, growth=growth), 0.0)
        self.running: dict[int, str] = {}
        self.told: list[int] = []
        self.effects: list[e.Effect] = []
        self.code: int | None = None

    def __call__(self, event: e.Event, after: float = 0.0) -> list[e.Effect]:
        self.now += after
        done = self.machine.handle(event, self.now)
        for effect in done:
            match effect:
                case e.StartOn(hosts):
                    assert not hosts.keys() & self.running.keys()
                    self.running.update(hosts)
                    self.told = [
                        rank for rank in self.told if rank not in hosts
                    ]  # another process of that number
                case e.ReleaseRanks(ranks):
                    self.told += ranks
                case e.SetExpectedRanks(ranks):
                    assert set(ranks) >= self.running.keys() & set(ranks)
                case e.Finish(code):
                    self.code = code
        self.effects += done
        return done

    def hosts(self, **slots: int) -> list[e.Effect]:
        return self(e.Hosts(slots))

    def come(self, *ranks: int) -> None:
        for rank in ranks:
            self(e.Spawned(rank, 100 + rank))
            self(e.Connected(rank))

    def end(self, rank: int, outcome: ExitStatus | None = None) -> list[e.Effect]:
        del self.running[rank]
        return self(e.ProcessEnded(rank, outcome or ExitStatus(0)))

    @property
    def said(self) -> list[str]:
        return [effect.text for effect in self.effects if isinstance(effect, e.Notice)]


def test_it_begins_when_there_is_room_or_has_waited_long_enough() -> None:
    job = Job(least=2, start=3)
    job.hosts(a=2)
    assert job.running == {}
    job(e.JobTick(), 29.0)
    assert job.running == {}
    job(e.JobTick(), 1.0)
    assert job.running == {0: "a", 1: "a"}
    job.come(0, 1)
    job.hosts(a=2, b=9)
    assert job.running == {0: "a", 1: "a", 2: "b", 3: "b"}  # no more than four
    assert job.said == ["starting ranks 2,3 on b"]


def test_a_rank_that_leaves_is_no_failure_and_the_job_ends_well() -> None:
    job = Job()
    job.hosts(a=1, b=1)
    job.come(0, 1)
    job.hosts(a=1)
    assert job.told == [1]
    assert job.end(1)[-1] == e.SetExpectedRanks((0,))
    job.end(0)
    assert job.code == 0
    assert job.machine.failed is None


def test_the_program_can_end_on_a_released_rank_that_the_coordinator_has_kept() -> None:
    job = Job(least=1)
    job.hosts(a=1)
    job.come(0)
    job.hosts(b=1)
    job.come(1)
    assert job.told == [0]
    job.end(1, ExitStatus(1))  # before the commit at which rank 0 would have left
    assert job.running == {0: "a", 1: "b"}
    assert job.machine.left == {0}
    job(e.RanksKept((0,), True))
    done = job.end(0)  # its training has ended
    assert job.machine.left == set()
    assert e.SendSignal((1,), signal.SIGTERM) in done  # it would begin from the start, alone
    job.end(1, ExitStatus(0, signal.SIGTERM))
    assert job.code == 0


@pytest.mark.parametrize("kept", [True, False])
def test_a_released_rank_that_fails_or_is_kept_no_more_has_left(kept: bool) -> None:
    job = Job(least=1, resets=0)
    job.hosts(a=1)
    job.come(0)
    job.hosts(b=1)
    job(e.RanksKept((0,), True))
    job.come(1)
    job(e.RanksKept((0,), kept))
    job.end(0, ExitStatus(1 if kept else 0))
    assert job.said[-1] == "rank 0 has left a"
    job.end(1)
    assert job.code == 0


def test_one_that_has_not_joined_is_ended_when_its_host_is_gone() -> None:
    job = Job()
    job.hosts(a=1, b=1)
    job.come(0)
    done = job.hosts(a=1)
    assert e.ReleaseRanks((1,)) in done
    assert not [effect for effect in done if isinstance(effect, e.SendSignal)]  # it may be let in just now
    assert job(e.JobTick(), 5.0) == [e.SendSignal((1,), signal.SIGTERM)]


def test_one_that_is_let_in_when_its_host_is_gone_leaves_as_all_others_do() -> None:
    job = Job()
    job.hosts(a=1, b=1)
    job.come(0)
    job.hosts(a=1)
    job.come(1)
    assert job.effects[-1] == e.ReleaseRanks((1,))  # again: it was not in the world at that report
    assert not [effect for effect in job(e.JobTick(), 5.0) if isinstance(effect, e.SendSignal)]


def test_one_that_comes_when_its_host_is_gone_is_let_go_again_before_the_others_let_it_in() -> None:
    job = Job()
    job.hosts(a=1, b=2)
    job.come(0, 1)
    job.hosts(a=1)
    expected_again = job.end(1)
    assert e.SetExpectedRanks((0, 2)) in expected_again
    assert job(e.RankArrived(2)) == [e.ReleaseRanks((2,))]
    assert job(e.RankArrived(0)) == []


def test_a_lost_host_after_the_limit_of_resets_ends_what_has_too_few_ranks() -> None:
    job = Job(least=2, resets=0)
    job.hosts(a=1, b=1, c=1)
    job.come(0, 1, 2)
    job.end(1, ExitStatus(9))
    assert job.code is None
    del job.running[2]
    job(e.Unstartable((2,), "the connection to c is lost"))
    job(e.JobTick(), job.machine.policy.settle)
    assert job.machine.phase is JobPhase.ENDING
    job.end(0, ExitStatus(0, signal.SIGTERM))
    assert job.code == 1


def spent_and_one_is_to_leave() -> Job:
    """Return a job of which two ranks are left, one of them to leave, that needs both and has no restarts."""
    job = Job(least=2, resets=0)
    job.hosts(a=1, b=1, c=1)
    job.come(0, 1, 2)
    job.hosts(a=1, b=1)
    assert job.told == [2]
    job.end(1, ExitStatus(9))
    assert job.said[-1] == "rank 1: exit code 9; going on without it"
    return job


def test_a_rank_that_is_to_leave_stays_if_no_others_can_come() -> None:
    job = spent_and_one_is_to_leave()
    job(e.RanksKept((2,), True))
    assert job.said[-1] == "rank 2 stays until others have come: fewer than 2 (--min-np) would be left"
    job.end(2)
    job.end(0)
    assert job.code == 0


def test_the_job_ends_if_a_rank_was_leaving_when_the_last_one_to_spare_was_lost() -> None:
    job = spent_and_one_is_to_leave()
    job.end(2)
    assert (
        job.said[-1] == "1 rank stays, --min-np is 2, and no rank is started anew any more (--reset-limit 0)"
    )
    job(e.JobTick(), job.machine.policy.settle)
    assert job.machine.phase is JobPhase.ENDING
    job.end(0, ExitStatus(0, signal.SIGTERM))
    assert job.code == 9
    assert job.machine.failed == 1


def test_a_lost_host_is_put_aside_and_what_was_there_goes_elsewhere() -> None:
    job = Job()
    job.hosts(a=1, b=2, c=1)
    job.come(0, 1, 2, 3)
    for rank in (1, 2):
        del job.running[rank]
    done = job(e.Unstartable((1, 2), "the connection to b is lost"))
    assert e.HostUnusable("b", "the connection to b is lost") in done
    assert job.running == {0: "a", 3: "c"}
    job(e.Hosts({"a": 1, "c": 2}, frozenset("b")))
    assert job.running == {0: "a", 1: "c", 3: "c"}
    assert job.told == []


def test_a_rank_that_fails_twice_before_it_joins_condemns_its_host() -> None:
    job = Job()
    job.hosts(a=1, b=1)
    job.come(0)
    job.end(1, ExitStatus(1))
    assert job.running == {0: "a", 1: "b"}
    assert [x.host for x in job.end(1, ExitStatus(1)) if isinstance(x, e.HostUnusable)] == ["b"]
    assert job.running == {0: "a"}


def test_a_rank_that_fails_once_on_a_host_that_was_found_later_does_not_condemn_it() -> None:
    job = Job(resets=9)
    job.hosts(a=1)
    job.come(0)
    job.hosts(a=1, b=1)
    assert not [effect for effect in job.end(1, ExitStatus(1)) if isinstance(effect, e.HostUnusable)]
    assert job.running == {0: "a", 1: "b"}
    job.come(1)
    for _ in range(2):  # as it was once let in, it has two tries again
        assert not [effect for effect in job.end(1, ExitStatus(1)) if isinstance(effect, e.HostUnusable)]
        assert job.running == {0: "a", 1: "b"}
    (failed,) = [effect for effect in job.end(1, ExitStatus(1)) if isinstance(effect, e.HostUnusable)]
    assert failed.reason == "rank 1 failed there twice before it had joined (exit code 1)"
    assert job.running == {0: "a"}


def test_a_host_where_nothing_starts_is_given_up() -> None:
    job = Job()
    job.hosts(a=1, b=1)
    job.come(0)
    (failed,) = [effect for effect in job(e.JobTick(), 30.0) if isinstance(effect, e.HostUnusable)]
    assert (failed.host, failed.hangs) == ("b", True)
    del job.running[1]
    job(e.Unstartable((1,), "killed"))
    assert job.machine.phase is JobPhase.RUNNING
    job.end(0)
    assert job.code == 0


def test_a_host_where_others_run_is_not_given_up() -> None:
    """Ending the hung start there would end them, too."""
    job = Job()
    job.hosts(a=1, b=1)
    job.come(0, 1)
    job.hosts(a=1, b=2)
    assert job.running[2] == "b"
    for seconds in (30.0, 30.0):
        (failed,) = [effect for effect in job(e.JobTick(), seconds) if isinstance(effect, e.HostUnusable)]
        assert (failed.host, failed.hangs) == ("b", False)
        assert failed.reason == "rank 2 did not start there within 30 s"
    job.end(1, ExitStatus(0, signal.SIGKILL))
    failures = [effect for effect in job(e.JobTick(), 30.0) if isinstance(effect, e.HostUnusable)]
    assert [(failed.host, failed.hangs) for failed in failures] == [("b", True)]


def test_the_limit_of_resets() -> None:
    job = Job(resets=1)
    job.hosts(a=2)
    job.come(0, 1)
    job.end(1, ExitStatus(9))
    job.come(1)
    job.end(1, ExitStatus(9))
    assert job.running == {0: "a"}
    job.end(0, ExitStatus(9))
    job(e.JobTick(), 100.0)
    assert job.code not in (None, 0)


def test_those_that_wait_for_the_world_do_without_one_that_can_not_be_started() -> None:
    """They would fail if they were notified of its death before it is expected no more."""
    job = Job(start=3)
    job.hosts(a=1, b=1, c=1)
    del job.running[1]
    done = [
        x
        for x in job(e.Unstartable((1,), "no route to b"))
        if isinstance(x, e.ReportRankDeath | e.SetExpectedRanks)
    ]
    assert done == [
        e.SetExpectedRanks((0, 2)),
        e.ReportRankDeath(1, "no route to b"),
    ]  # it may have connected
    done = [x for x in job.end(2, ExitStatus(1)) if isinstance(x, e.ReportRankDeath | e.SetExpectedRanks)]
    assert done[:2] == [e.SetExpectedRanks((0,)), e.ReportRankDeath(2, "exit code 1")]


def test_one_that_was_let_go_and_can_not_be_started_is_waited_for_no_more() -> None:
    """Its host may be listed with fewer slots while the launcher tries in vain to start the host's agent."""
    job = Job(start=3)
    job.hosts(a=1, b=2)
    job.come(0)
    job.hosts(a=1, b=1)
    assert job.told == [2]
    for rank in (1, 2):
        del job.running[rank]
    done = job(e.Unstartable((1, 2), "no route to b"))
    assert [effect for effect in done if isinstance(effect, e.SetExpectedRanks)][-1] == e.SetExpectedRanks(
        (0,)
    )
    assert job.said[-1] == "rank 2 has left b"
    assert job.machine.living == (0,)
    job.end(0)
    assert job.code == 0


def test_too_few_hosts() -> None:
    job = Job(least=2)
    job.hosts(a=1, b=1)
    job.come(0, 1)
    del job.running[1]
    job(e.Unstartable((1,), "lost"))
    assert job.said[-1] == "1 rank left, and --min-np is 2: waiting up to 100 s for hosts"
    job.hosts(a=1, c=1)
    assert job.running == {0: "a", 1: "c"}
    for rank in (0, 1):
        job.running.pop(rank)
        job(e.Unstartable((rank,), "lost"))
    assert job.code is None  # it waits, with no rank at all
    job(e.JobTick(), 100.0)
    assert job.code == 1


EVENTS = st.one_of(
    st.builds(e.Hosts, SLOTS),
    st.tuples(st.just("come"), st.integers(0, 5)),
    st.tuples(st.just("lose"), st.integers(0, 5)),
    st.tuples(st.just("host"), st.integers(0, 5)),
    st.tuples(st.just("leave"), st.integers(0, 5)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(EVENTS, max_size=40), st.integers(1, 3))
def test_any_schedule_ends(schedule: Sequence[e.Hosts | tuple[str, int]], least: int) -> None:
    """No rank is started twice, or on a full host; and when all programs have ended, so has the job."""
    job = Job(least=least, start=least, most=5, resets=1000)
    for step in schedule:
        if isinstance(step, e.Hosts):
            job(step, 1.0)
            continue
        what, rank = step
        if rank not in job.running:
            continue
        if what == "come":
            job.come(rank)
        elif what == "lose":
            job.end(rank, ExitStatus(0, signal.SIGKILL))
        elif what == "host":
            del job.running[rank]
            job(e.Unstartable((rank,), "lost"))
        elif rank in job.told:
            job.end(rank)
        assert len(job.running) <= 5 + len(job.told)
    assert job.code is None
    job.hosts(a=5)
    assert len(job.running) >= least
    while job.running:
        job.end(next(iter(job.running)))
        job(e.JobTick(), 10.0)
    job(e.JobTick(), 200.0)
    assert job.code == 0
