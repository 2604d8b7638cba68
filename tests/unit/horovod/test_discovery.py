"""``horovod.runner.elastic.discovery``: the interface on which programs that derive from Horovod's classes rely."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from hvdlab.collectives.elastic import HostUpdateResult
from hvdlab.horovod.runner.elastic import discovery
from hvdlab.horovod.runner.elastic.discovery import (
    DiscoveredHosts,
    FixedHosts,
    HostDiscovery,
    HostManager,
    HostState,
)
from hvdlab.launch.host_discovery import HostSource


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "time", lambda: self.now)
        assert time.time() == self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_sources_are_ours() -> None:
    assert issubclass(HostDiscovery, HostSource)
    assert issubclass(FixedHosts, HostDiscovery)
    assert issubclass(discovery.HostDiscoveryScript, HostDiscovery)


def test_a_manager_says_what_has_changed() -> None:
    hosts = FixedHosts({"a": 2})
    manager = HostManager(hosts)
    assert manager.update_available_hosts() == HostUpdateResult.added
    assert manager.update_available_hosts() == HostUpdateResult.no_update
    hosts.set({"b": 1, "a": 2})
    assert manager.update_available_hosts() == HostUpdateResult.added
    assert manager.current_hosts.host_assignment_order == ["a", "b"]
    assert manager.current_hosts.available_hosts == {"a", "b"}
    assert manager.current_hosts.count_available_slots() == 3
    for slots, changed in (
        ({"a": 1, "b": 1}, HostUpdateResult.removed),
        ({"a": 2, "c": 1}, HostUpdateResult.mixed),
        ({"c": 1}, HostUpdateResult.removed),
        ({"c": 4}, HostUpdateResult.added),
    ):
        hosts.set(slots)
        assert manager.update_available_hosts() == changed
        assert manager.current_hosts.host_slots == slots
    assert manager.current_hosts.get_slots("c") == 4
    assert manager.current_hosts.get_slots("gone") == 0


def test_a_host_that_is_put_aside_comes_back_after_its_cooldown(clock: Clock) -> None:
    manager = HostManager(FixedHosts({"a": 1, "b": 1}), cooldown_range=(10, 15))
    manager.update_available_hosts()
    event = manager.get_host_event("b")
    for seconds in (10, 15, 15):
        manager.blacklist("b")
        assert event.is_set()
        assert manager.is_blacklisted("b")
        assert manager.current_hosts.host_assignment_order == ["a"]
        clock.now += seconds
        assert manager.update_available_hosts() == HostUpdateResult.no_update
        clock.now += 0.1
        assert manager.update_available_hosts() == HostUpdateResult.added
        assert manager.current_hosts.host_assignment_order == ["a", "b"]
        assert not manager.is_blacklisted("b")
        event = manager.get_host_event("b")
        assert not event.is_set()


def test_without_a_range_it_never_does(clock: Clock) -> None:
    manager = HostManager(FixedHosts({"a": 1}))
    manager.update_available_hosts()
    manager.blacklist("a")
    clock.now += 1e6
    assert manager.update_available_hosts() == HostUpdateResult.no_update
    assert manager.current_hosts.available_hosts == set()
    state = HostState()
    state.blacklist()
    assert not state.is_resurrected()
    state.whitelist()
    assert not state.is_blacklisted()


def test_ranges_that_are_none() -> None:
    for wrong in ((0, 10), (20, 10), (1, 3601)):
        with pytest.raises(ValueError, match="cooldown"):
            HostState(wrong)


def test_old_hosts_come_first() -> None:
    assert HostManager.order_available_hosts(["c", "a", "b"], ["b", "x", "a"]) == ["b", "a", "c"]
    hosts = DiscoveredHosts({"a": 1, "b": 2}, ["b", "a"])
    bad = HostState()
    bad.blacklist()
    assert hosts.update({"a": bad, "b": HostState()}) is hosts
    assert hosts.host_assignment_order == ["b"]


def test_states_of_hosts_are_used_under_the_managers_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []

    class Watched(HostState):
        """State of a host that records whether another thread could come in between."""

        def __init__(self, cooldown_range: Sequence[int] | None = None) -> None:
            held.append(manager._lock.locked())
            super().__init__(cooldown_range)

        def is_blacklisted(self) -> bool:
            held.append(manager._lock.locked())
            return super().is_blacklisted()

    monkeypatch.setattr(discovery, "HostState", Watched)
    manager = HostManager(FixedHosts({"a": 1}))
    manager.update_available_hosts()
    assert manager.current_hosts.host_assignment_order == ["a"]
    assert not manager.is_blacklisted("b")
    event = manager.get_host_event("c")
    manager.blacklist("c")
    assert event.is_set()
    assert len(held) > 4
    assert all(held)
