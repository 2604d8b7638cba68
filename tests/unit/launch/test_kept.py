"""Which process may use a job that a launcher keeps: leases, and the time limit of a job without a tenant."""

from __future__ import annotations

import pytest

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.launch.kept import (
    Abandoned,
    Admitted,
    Claimed,
    Heard,
    LeaseRefused,
    LeaseReleased,
    LeaseTick,
    Tenancy,
    Tenant,
    Vacant,
    free_name,
    in_use,
    none_there,
)

LEASE, UNUSED = 30.0, 100.0
ONE, OTHER = Tenant(7, 70, "a#1", "/work"), Tenant(8, 80, "b#2", "/home")


@pytest.fixture
def tenancy() -> Tenancy:
    return Tenancy(LEASE, UNUSED, 0.0)


def test_a_tenant_has_the_job_until_it_lets_go(tenancy: Tenancy) -> None:
    assert tenancy.handle(Claimed(ONE), 1.0) == [Admitted(1)]
    assert tenancy.handle(Claimed(OTHER), 2.0) == [LeaseRefused(1, ONE)]
    assert tenancy.holds(1)
    assert tenancy.handle(LeaseReleased(1), 3.0) == [Vacant()]
    assert tenancy.handle(Claimed(OTHER), 4.0) == [Admitted(2)]
    assert (tenancy.tenant, tenancy.holds(1), tenancy.holds(2)) == (OTHER, False, True)


def test_what_a_former_tenant_says_has_no_effect(tenancy: Tenancy) -> None:
    tenancy.handle(Claimed(ONE), 0.0)
    tenancy.handle(LeaseReleased(1), 1.0)
    tenancy.handle(Claimed(OTHER), 2.0)
    assert tenancy.handle(LeaseReleased(1), 3.0) == []
    assert tenancy.handle(Heard(1), 20.0) == []
    assert tenancy.next_at == 2.0 + LEASE  # it is no sign of life of the other one
    assert tenancy.tenant == OTHER


def test_a_tenant_without_a_sign_of_life_has_lost_the_job(tenancy: Tenancy) -> None:
    tenancy.handle(Claimed(ONE), 0.0)
    assert tenancy.handle(Heard(1), LEASE - 1) == []
    assert tenancy.handle(LeaseTick(), LEASE + 1) == []
    assert tenancy.next_at == LEASE - 1 + LEASE
    assert tenancy.handle(Heard(1), tenancy.next_at) == [Vacant()]  # too late
    assert not tenancy.holds(1)


def test_a_claim_finds_the_lease_run_out_by_itself(tenancy: Tenancy) -> None:
    tenancy.handle(Claimed(ONE), 0.0)
    assert tenancy.handle(Claimed(OTHER), LEASE) == [Vacant(), Admitted(2)]


def test_a_tenancy_whose_process_was_seen_to_have_ended_is_taken_over(tenancy: Tenancy) -> None:
    tenancy.handle(Claimed(ONE), 0.0)
    assert tenancy.handle(Claimed(OTHER, ended=1), 1.0) == [Admitted(2)]
    assert tenancy.handle(Claimed(ONE, ended=1), 2.0) == [LeaseRefused(2, OTHER)]  # that one was another


def test_a_job_without_a_tenant_ends_after_its_time(tenancy: Tenancy) -> None:
    assert tenancy.next_at == UNUSED  # none has come at all
    tenancy.handle(Claimed(ONE), 10.0)
    tenancy.handle(LeaseReleased(1), 20.0)
    assert tenancy.handle(LeaseTick(), 20.0 + UNUSED - 1) == []
    assert tenancy.handle(LeaseTick(), 20.0 + UNUSED) == [Abandoned()]


def test_the_process_that_starts_a_job_has_the_length_of_a_lease_to_come() -> None:
    """Its first claim may come later than a job that is to end soon without a tenant would wait."""
    tenancy = Tenancy(LEASE, 1.0, 0.0)
    assert tenancy.next_at == LEASE
    assert tenancy.handle(Claimed(ONE), LEASE - 1) == [Admitted(1)]
    assert tenancy.handle(LeaseReleased(1), LEASE) == [Vacant()]
    assert tenancy.next_at == LEASE + 1.0


def test_a_tenant_is_shown_without_what_its_texts_could_do_to_a_terminal() -> None:
    assert str(ONE) == "process 7 on a in /work"
    assert "\x1b" not in str(Tenant(7, 70, "a\x1b[2J#1", "/work\x1b[2J"))


def test_names() -> None:
    assert free_name("", ()) == "pool"
    assert free_name("", ("pool", "pool-2")) == "pool-3"
    assert free_name("mine", ("pool",)) == "mine"
    with pytest.raises(InvalidRequestError, match="there is a pool `mine` already"):
        free_name("mine", ("mine",))
    with pytest.raises(InvalidRequestError, match="can't be called '1a'"):
        free_name("1a", ())
    assert none_there("mine", []) == "there is no pool `mine`; none is kept here"
    assert none_there("mine", ["a", "b"]) == "there is no pool `mine`; there is `a`, `b`"
    assert in_use("mine", "process 7").startswith("the pool `mine` is in use by process 7; ")
