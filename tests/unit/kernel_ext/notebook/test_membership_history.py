"""History of the ranks that came and went, and of the generations of the world."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from hvdlab.collectives.protocol.messages import Member
from hvdlab.collectives.types import Membership
from hvdlab.kernel_ext.notebook.elastic import ALL, MembershipChange, MembershipHistory


def world(
    generation: int, *ranks: int, waiting: tuple[int, ...] = (), formed: tuple[int, ...] = ()
) -> Membership:
    members = tuple(Member(rank, "here", 10 + rank, "", (), "", 0.0) for rank in ranks)
    return Membership(ranks, members, (), generation, waiting, formed)


def told(history: MembershipHistory) -> list[tuple[int, str, str]]:
    return [(one.rank, one.what, one.why) for one in history.all()]


def test_a_generation_is_told_once_it_has_begun() -> None:
    history = MembershipHistory()
    history.record_membership(world(0, 0))
    history.record_membership(world(1, 0, 1))
    assert told(history) == []
    history.record_membership(world(1, 0, 1, formed=(0, 1)))
    history.record_membership(world(1, 0, 1, formed=(0, 1)))
    history.record_membership(world(2, 0, 1))
    history.record_membership(world(2, 0, 1, formed=(0,)))
    assert told(history) == [
        (ALL, "formed", "ranks 0,1 from now on"),
        (ALL, "formed", "rank 0 from now on"),
    ]


def test_waiting_ranks_are_told_until_they_are_let_in_or_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "time", lambda: now)
    history = MembershipHistory()
    history.record_membership(world(1, 0, 1, 2, waiting=(1, 2), formed=(0,)))
    now = 103.25
    history.record_membership(world(1, 0, 1, waiting=(1,), formed=(0,)))  # rank 2 has died
    history.record_membership(world(2, 0, 1, formed=(0, 1)))
    assert told(history) == [
        (1, "waits", "until the others commit"),
        (2, "waits", "until the others commit"),
        (ALL, "formed", "rank 0 from now on"),
        (1, "admitted", "after 3.2 s"),
        (ALL, "formed", "ranks 0,1 from now on"),
    ]
    assert [one.when for one in history.all()] == [100.0] * 3 + [103.25] * 2


def test_listeners_hear_of_each_change_and_stand_in_nobodys_way() -> None:
    history = MembershipHistory()
    heard: list[int] = []
    unlisten = history.listen(lambda: heard.append(len(history.all())))

    def fail() -> None:
        raise ZeroDivisionError

    history.listen(fail)
    history.add(MembershipChange(0, "joined", "start"))
    history.record_membership(world(1, 0, formed=(0,)))
    history.record_membership(world(1, 0, formed=(0,)))
    history.announce()
    released = replace(world(1, 0, 1, formed=(0, 1)), leaving=(1,))
    for now in (
        released,
        released,
        world(1, 0, formed=(0, 1)),
    ):  # shown with the history, but no change of it
        history.record_membership(now)
    unlisten()
    unlisten()
    history.add(MembershipChange(0, "died", "killed"))
    assert heard == [1, 2, 2, 2, 2]


def test_the_last_arrival_of_a_number() -> None:
    history = MembershipHistory()
    history.add(
        MembershipChange(3, "joined", "start", "a", 1),
        MembershipChange(3, "died", "killed"),
        MembershipChange(3, "joined", "repair", "b", 2),
    )
    history.add(MembershipChange(3, "waits", ""))
    found = history.arrival(3)
    assert found is not None
    assert (found.why, found.host, found.pid) == ("repair", "b", 2)
    assert history.arrival(4) is None
