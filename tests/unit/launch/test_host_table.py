"""Hosts that are found, lost, put aside and come back; sources that can't be relied on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.launch.host_table import (
    GONE_AFTER,
    LATE,
    QUIET,
    STEADY,
    WAVERS,
    Cooldown,
    HostEvent,
    HostFailed,
    HostsAsked,
    HostsChanged,
    HostsFound,
    HostTable,
    HostTick,
    NotFound,
    SayOfHosts,
)


class Followed:
    """Table whose answers are collected."""

    def __init__(self, cooldown: tuple[float, float] = (5, 20)) -> None:
        self.table = HostTable(cooldown, "the script")
        self.now = 0.0
        self.said: list[str] = []
        self.usable: dict[str, int] = {}
        self.aside: frozenset[str] = frozenset()

    def handle(self, event: HostEvent, after: float = 1.0) -> Followed:
        self.now += after
        for effect in self.table.handle(event, self.now):
            match effect:
                case SayOfHosts(text):
                    self.said.append(text)
                case HostsChanged(slots, aside):
                    assert (slots, aside) != (self.usable, self.aside)  # otherwise it is no news
                    assert not aside & slots.keys()
                    self.usable, self.aside = dict(slots), aside
        assert self.usable == self.table.usable
        return self


def test_hosts_are_used_at_once_and_given_up_when_missed_twice() -> None:
    seen = Followed().handle(HostsFound({"a": 2}))
    assert seen.usable == {"a": 2}
    assert seen.handle(HostsFound({"b": 1, "a": 2})).usable == {"a": 2, "b": 1}
    assert list(seen.usable) == ["a", "b"]  # the old ones first
    assert seen.handle(HostsFound({"b": 1})).usable == {"a": 2, "b": 1}
    assert seen.handle(HostsFound({"b": 1})).usable == {"b": 1}
    assert seen.handle(HostsFound({"b": 3})).usable == {"b": 3}
    assert seen.handle(HostsFound({"b": 2})).usable == {"b": 3}
    assert seen.handle(HostsFound({"b": 2})).usable == {"b": 2}
    assert seen.said == []


def test_a_host_that_fails_is_put_aside_longer_each_time_and_comes_back() -> None:
    seen = Followed((5, 20)).handle(HostsFound({"a": 1, "b": 1}))
    for seconds in (5, 10, 20, 20):
        seen.handle(HostFailed("b", "it refused")).handle(HostFailed("b", "it refused"), 0)
        assert seen.usable == {"a": 1}
        assert seen.aside == {"b"}
        assert seen.said.pop() == f"b is put aside for {seconds} s: it refused"
        assert not seen.said
        due = seen.table.deadline
        assert due == seen.now + seconds
        seen.handle(HostTick(), seconds - 0.1)
        assert seen.usable == {"a": 1}
        seen.handle(HostTick(), 0.1)
        assert seen.usable == {"a": 1, "b": 1}
        assert seen.said.pop() == "b is tried again"
        assert seen.table.deadline is None


def test_a_host_that_is_gone_when_its_cooldown_ends_is_not_used() -> None:
    seen = Followed().handle(HostsFound({"a": 1, "b": 1})).handle(HostFailed("b", "it was lost"))
    for _ in range(GONE_AFTER):
        seen.handle(HostsFound({"a": 1}))
    seen.handle(HostTick(), 100)
    assert seen.usable == {"a": 1}
    assert seen.said == ["b is put aside for 5 s: it was lost"]
    assert seen.handle(HostFailed("unknown", "?")).usable == {"a": 1}


@pytest.mark.parametrize("bad", [NotFound("it failed"), HostsFound({})])
def test_one_bad_answer_takes_no_host_away(bad: HostEvent) -> None:
    seen = Followed().handle(HostsFound({"a": 1})).handle(bad).handle(HostsFound({"a": 1}))
    assert seen.usable == {"a": 1}


def test_a_source_that_fails_is_reported_once() -> None:
    seen = Followed().handle(NotFound("it failed with exit code 1"))
    assert seen.said == ["the script is no help: it failed with exit code 1; it is asked again"]
    seen.handle(HostsFound({"a": 1}))
    for _ in range(20):
        seen.handle(NotFound("it failed")).handle(HostsFound({"a": 1}))
    assert len(seen.said) == 1
    seen.handle(HostsFound({"a": 1}), QUIET).handle(NotFound("it failed again"))
    assert seen.said[1:] == ["the script is no help: it failed again; the hosts that it found before stay"]
    assert seen.usable == {"a": 1}


def test_a_source_that_hangs_is_reported_once() -> None:
    seen = Followed().handle(HostsFound({"a": 1})).handle(HostsAsked())
    assert seen.table.deadline == seen.now + LATE
    seen.handle(HostTick(), LATE - 0.1)
    assert not seen.said
    seen.handle(HostTick(), 0.1).handle(HostTick(), LATE)
    assert seen.said == [
        "the script is no help: it has not answered for 15 s; the hosts that it found before stay"
    ]
    assert seen.table.deadline is None
    assert seen.usable == {"a": 1}


def test_a_source_that_changes_its_mind_is_not_followed() -> None:
    seen = Followed().handle(HostsFound({"a": 1}))
    changes = 0
    for number in range(40):
        before = dict(seen.usable)
        seen.handle(HostsFound({"a": 1, "b": 1} if number // 2 % 2 else {"a": 1}))
        changes += before != seen.usable
    assert changes <= WAVERS
    (text,) = seen.said
    assert text.startswith("the script changes its mind about b again and again")
    for _ in range(int(STEADY) + 1):
        seen.handle(HostsFound({"a": 1, "b": 1}))
    assert seen.usable == {"a": 1, "b": 1}


def test_a_range_of_seconds() -> None:
    for shortest, longest in ((0, 1), (-1, 5), (3, 2)):
        with pytest.raises(InvalidRequestError, match="two numbers of seconds"):
            Cooldown(shortest, longest)
        with pytest.raises(InvalidRequestError):
            HostTable((shortest, longest))


NAMES = ("a", "b", "c")
EVENTS = st.one_of(
    st.builds(HostsFound, st.dictionaries(st.sampled_from(NAMES), st.integers(1, 3))),
    st.builds(HostFailed, st.sampled_from(NAMES), st.just("it was lost")),
    st.just(NotFound("it failed")),
    st.just(HostsAsked()),
    st.just(HostTick()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.sampled_from((0.0, 0.5, 1.0, 7.0, 40.0))), max_size=40))
def test_any_schedule(schedule: Sequence[tuple[HostEvent, float]]) -> None:
    """Only hosts that were found are used, never those put aside; and a steady source is followed in the end."""
    seen = Followed((5, 20))
    found: dict[str, set[int]] = {name: set() for name in NAMES}
    aside: dict[str, float] = {}
    for event, after in schedule:
        before = dict(seen.usable)
        seen.handle(event, after)
        if isinstance(event, HostsFound):
            for name, slots in event.slots.items():
                found[name].add(slots)
        if isinstance(event, HostFailed) and event.host in before:
            aside[event.host] = seen.now + 5  # or more, if it is not the first time
        assert all(slots in found[name] for name, slots in seen.usable.items())
        assert not [name for name in seen.usable if aside.get(name, -1.0) > seen.now]
        assert (
            seen.table.deadline is None or seen.table.deadline >= seen.now or not isinstance(event, HostTick)
        )
    for _ in range(25):  # longer than any cooldown, or doubt
        seen.handle(HostsFound({"a": 2, "c": 1}))
    assert seen.usable == {"a": 2, "c": 1}
