"""Where ranks of other hosts find the coordinator."""

from __future__ import annotations

import pytest

from hvdlab.collectives import system
from hvdlab.collectives.errors import StartError
from hvdlab.kernel_ext.notebook.assembly import address_for


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in system.CHOICES:
        monkeypatch.delenv(name, raising=False)


def test_hosts_that_are_this_one_need_no_network() -> None:
    assert address_for(["localhost", "127.0.0.1"]) == "127.0.0.1"


def test_the_address_is_one_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = {"near": "10.0.0.1", "localhost": "127.0.0.1"}
    monkeypatch.setattr(system, "address_towards", ways.get)
    assert address_for(["localhost", "near"]) == "10.0.0.1"


def test_a_host_that_nobody_can_reach_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "address_towards", lambda host: None)
    monkeypatch.setattr(system, "_interfaces", lambda: iter([("lo", "127.0.0.1")]))
    with pytest.raises(StartError, match="HVDLAB_ADDRESS"):
        address_for(["far-away"])
    monkeypatch.setattr(system, "_interfaces", lambda: iter([("lo", "127.0.0.1"), ("eth0", "10.0.0.9")]))
    assert address_for([]) == "10.0.0.9"


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDLAB_ADDRESS", "127.0.0.1")
    assert address_for(["far-away"]) == "127.0.0.1"
