"""Which address others use to reach this host."""

from __future__ import annotations

import pytest

from hvdlab.collectives import system
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.settings import Settings, data_plane_address


@pytest.mark.parametrize("text", ["10.9.8.7", "lo", "127.0.0.0/8", "nothing0,lo"])
def test_an_address_a_network_and_an_interface_choose(text: str) -> None:
    expected = "10.9.8.7" if text == "10.9.8.7" else "127.0.0.1"
    assert system.chosen_address({"HVDLAB_ADDRESS": text}) == expected
    assert Settings.from_env({"HOROVOD_GLOO_IFACE": text}).address == expected


def test_ours_comes_before_horovods() -> None:
    assert system.chosen_address({"HOROVOD_GLOO_IFACE": "lo", "HVDLAB_ADDRESS": "10.9.8.7"}) == "10.9.8.7"
    assert system.chosen_address({}) is None


def test_what_is_not_there_is_answered_by_what_is() -> None:
    with pytest.raises(InvalidRequestError, match=r"HVDLAB_ADDRESS='nothing0' .*lo 127\.0\.0\.1"):
        system.chosen_address({"HVDLAB_ADDRESS": "nothing0"})
    with pytest.raises(InvalidRequestError, match="203"):
        system.chosen_address({"HVDLAB_ADDRESS": "203.0.113.0/24"})


def test_the_way_to_the_coordinator_is_the_default() -> None:
    assert data_plane_address({}, "") == "127.0.0.1"
    assert data_plane_address({}, "unix:/x") == "127.0.0.1"
    assert data_plane_address({}, "tls:127.0.0.5:80") == "127.0.0.1"
    assert data_plane_address({}, "tls:no.such.host.invalid:80") == "127.0.0.1"
