"""Which hosts get a relay, and which relay a rank takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvdlab.collectives.environment import (
    World,
    host_directory_from,
    host_directory_variable,
    relay_from,
    relay_variable,
)
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.launch.exec_agent.wire import RelayOrder
from hvdlab.launch.relays import ENOUGH, wanted

FAR = World("tls:10.0.0.1:1234", "secret", "PEM", relay_token="another")


@pytest.mark.parametrize(
    ("chosen", "ranks", "gets"),
    [
        ("", 100, False),
        ("0", 100, False),
        ("1", 1, False),
        ("1", 2, True),
        ("auto", ENOUGH - 1, False),
        ("auto", ENOUGH, True),
    ],
)
def test_hosts_with_enough_ranks_get_a_relay_where_the_user_asks_for_that(
    chosen: str, ranks: int, gets: bool
) -> None:
    order = RelayOrder("another", "PEM", "host1", 30.0)
    assert wanted(FAR, "host1", ranks, {"HVDLAB_RELAYS": chosen}) == (order if gets else None)


def test_the_relay_gives_up_a_silent_coordinator_when_ranks_do() -> None:
    found = wanted(FAR, "host1", 2, {"HVDLAB_RELAYS": "1", "HVDLAB_DEAD_AFTER": "7"})
    assert found is not None
    assert found.dead_after == 7.0


def test_ranks_of_one_host_get_none() -> None:
    near = replace(FAR, coordinator="unix:/tmp/hvdlab-1/coordinator", certificate=None)
    assert wanted(near, "localhost", 100, {"HVDLAB_RELAYS": "1"}) is None


def test_a_coordinator_that_takes_no_relays_gets_none() -> None:
    assert wanted(replace(FAR, relay_token=""), "host1", 100, {"HVDLAB_RELAYS": "1"}) is None


def test_another_word_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="HVDLAB_RELAYS='many'"):
        wanted(FAR, "host1", 100, {"HVDLAB_RELAYS": "many"})


def test_what_a_rank_starts_does_not_take_its_relay() -> None:
    """A job that a rank starts has a coordinator of its own, and inherits the rank's variables."""
    inherited = relay_variable("unix:/tmp/hvdlab-2/coordinator", FAR.coordinator)
    assert (
        relay_from({**inherited, "HVDLAB_COORDINATOR": FAR.coordinator}) == "unix:/tmp/hvdlab-2/coordinator"
    )
    assert relay_from({**inherited, "HVDLAB_COORDINATOR": "unix:/tmp/hvdlab-3/coordinator"}) is None
    assert relay_from(inherited) is None
    assert relay_from({"HVDLAB_COORDINATOR": FAR.coordinator}) is None
    assert relay_from({}) is None


def test_a_job_that_a_rank_starts_does_not_use_the_directory_of_its_host() -> None:
    inherited = host_directory_variable("/tmp/hvdlab-3", FAR.coordinator)
    assert host_directory_from({**inherited, "HVDLAB_COORDINATOR": FAR.coordinator}) == "/tmp/hvdlab-3"
    assert host_directory_from({**inherited, "HVDLAB_COORDINATOR": "tls:127.0.0.1:1"}) is None
    assert host_directory_from({"HVDLAB_COORDINATOR": FAR.coordinator}) is None
