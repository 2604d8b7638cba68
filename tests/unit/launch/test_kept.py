"""Which process may use a job that a launcher keeps: leases, and the time limit of a job without an owner."""

from __future__ import annotations

import pytest

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.launch.kept import (
    JobExpired,
    Lease,
    LeaseEnded,
    LeaseGranted,
    LeaseOwner,
    LeaseRefused,
    LeaseReleased,
    LeaseRenewed,
    LeaseRequested,
    LeaseTick,
    free_name,
    in_use,
    no_such_pool,
)

LEASE, UNUSED = 30.0, 100.0
ONE, OTHER = LeaseOwner(7, 70, "a#1", "/work"), LeaseOwner(8, 80, "b#2", "/home")


@pytest.fixture
def lease() -> Lease:
    return Lease(LEASE, UNUSED, 0.0)


def test_an_owner_has_the_job_until_it_releases_it(lease: Lease) -> None:
    assert lease.handle(LeaseRequested(ONE), 1.0) == [LeaseGranted(1)]
    assert lease.handle(LeaseRequested(OTHER), 2.0) == [LeaseRefused(1, ONE)]
    assert lease.holds(1)
    assert lease.handle(LeaseReleased(1), 3.0) == [LeaseEnded()]
    assert lease.handle(LeaseRequested(OTHER), 4.0) == [LeaseGranted(2)]
    assert (lease.owner, lease.holds(1), lease.holds(2)) == (OTHER, False, True)


def test_an_event_of_a_former_owner_has_no_effect(lease: Lease) -> None:
    lease.handle(LeaseRequested(ONE), 0.0)
    lease.handle(LeaseReleased(1), 1.0)
    lease.handle(LeaseRequested(OTHER), 2.0)
    assert lease.handle(LeaseReleased(1), 3.0) == []
    assert lease.handle(LeaseRenewed(1), 20.0) == []
    assert lease.next_at == 2.0 + LEASE  # it is no sign of life of the other one
    assert lease.owner == OTHER


def test_an_owner_without_a_sign_of_life_has_lost_the_job(lease: Lease) -> None:
    lease.handle(LeaseRequested(ONE), 0.0)
    assert lease.handle(LeaseRenewed(1), LEASE - 1) == []
    assert lease.handle(LeaseTick(), LEASE + 1) == []
    assert lease.next_at == LEASE - 1 + LEASE
    assert lease.handle(LeaseRenewed(1), lease.next_at) == [LeaseEnded()]  # too late
    assert not lease.holds(1)


def test_a_request_finds_the_lease_run_out_by_itself(lease: Lease) -> None:
    lease.handle(LeaseRequested(ONE), 0.0)
    assert lease.handle(LeaseRequested(OTHER), LEASE) == [LeaseEnded(), LeaseGranted(2)]


def test_a_lease_whose_process_was_seen_to_have_ended_is_taken_over(lease: Lease) -> None:
    lease.handle(LeaseRequested(ONE), 0.0)
    assert lease.handle(LeaseRequested(OTHER, ended=1), 1.0) == [LeaseGranted(2)]
    assert lease.handle(LeaseRequested(ONE, ended=1), 2.0) == [LeaseRefused(2, OTHER)]  # that one was another


def test_a_job_without_an_owner_ends_after_its_time(lease: Lease) -> None:
    assert lease.next_at == UNUSED  # none has come at all
    lease.handle(LeaseRequested(ONE), 10.0)
    lease.handle(LeaseReleased(1), 20.0)
    assert lease.handle(LeaseTick(), 20.0 + UNUSED - 1) == []
    assert lease.handle(LeaseTick(), 20.0 + UNUSED) == [JobExpired()]


def test_the_process_that_starts_a_job_has_the_length_of_a_lease_to_come() -> None:
    """Its first request may come later than a job that is to end soon without an owner would wait."""
    lease = Lease(LEASE, 1.0, 0.0)
    assert lease.next_at == LEASE
    assert lease.handle(LeaseRequested(ONE), LEASE - 1) == [LeaseGranted(1)]
    assert lease.handle(LeaseReleased(1), LEASE) == [LeaseEnded()]
    assert lease.next_at == LEASE + 1.0


def test_an_owner_is_shown_without_what_its_texts_could_do_to_a_terminal() -> None:
    assert str(ONE) == "process 7 on a in /work"
    assert "\x1b" not in str(LeaseOwner(7, 70, "a\x1b[2J#1", "/work\x1b[2J"))


def test_names() -> None:
    assert free_name("", ()) == "pool"
    assert free_name("", ("pool", "pool-2")) == "pool-3"
    assert free_name("mine", ("pool",)) == "mine"
    with pytest.raises(InvalidRequestError, match="there is a pool `mine` already"):
        free_name("mine", ("mine",))
    with pytest.raises(InvalidRequestError, match="can't be called '1a'"):
        free_name("1a", ())
    assert no_such_pool("mine", []) == "there is no pool `mine`; none is kept here"
    assert no_such_pool("mine", ["a", "b"]) == "there is no pool `mine`; there is `a`, `b`"
    assert in_use("mine", "process 7").startswith("the pool `mine` is in use by process 7; ")
