"""The queue between the starters of ranks and the loop of a job."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from hvdlab.collectives.protocol import messages as m
from hvdlab.collectives.types import Membership
from hvdlab.runner import events as e
from hvdlab.runner.job import MOST_HELD, EventQueue, OutputReceived

PIECE = bytes(MOST_HELD // 4)


@pytest.fixture
def queue() -> Iterator[EventQueue]:
    made = EventQueue()
    yield made
    made.stop()
    made.close()


def test_what_was_posted_is_taken_in_order(queue: EventQueue) -> None:
    queue.write(0, 1, b"a")
    queue.post("said")
    queue.write(1, 2, b"b")
    queue.post(e.Spawned(1, 7))
    assert list(queue.take()) == [
        OutputReceived(0, 1, b"a"),
        "said",
        OutputReceived(1, 2, b"b"),
        e.Spawned(1, 7),
    ]
    assert list(queue.take()) == []


def test_a_rank_that_writes_faster_than_its_output_is_taken_is_held_up(queue: EventQueue) -> None:
    for _ in range(4):
        queue.write(0, 1, PIECE)
    wrote = threading.Event()

    def write_more() -> None:
        queue.write(0, 1, b"more")
        wrote.set()

    writer = threading.Thread(target=write_more)
    writer.start()
    with queue._room:
        assert queue._held == MOST_HELD
    assert not wrote.is_set()
    taken = 0
    while not wrote.wait(0) or taken < MOST_HELD + 4:
        taken += sum(len(posted.data) for posted in queue.take() if isinstance(posted, OutputReceived))
    writer.join()
    assert taken == MOST_HELD + 4


def test_the_end_of_the_loop_lets_go_whoever_is_held_up(queue: EventQueue) -> None:
    for _ in range(4):
        queue.write(0, 1, PIECE)
    writer = threading.Thread(target=queue.write, args=(0, 1, b"more"))
    writer.start()
    queue.stop()
    writer.join(60)
    assert not writer.is_alive()


def test_a_newcomer_that_waits_to_be_let_in_has_arrived(queue: EventQueue) -> None:
    both = tuple(m.Member(rank, "host", 100 + rank) for rank in range(2))
    queue._on_membership(Membership((0, 1), both[:1], (), 1, (), (0,)))
    assert list(queue.take()) == [e.Connected(0), e.Formed()]
    for _ in range(2):
        queue._on_membership(Membership((0, 1), both, (), 1, (1,), (0,)))
    assert list(queue.take()) == [e.RankArrived(1)]
    other = (both[0], m.Member(1, "host", 201))
    queue._on_membership(Membership((0, 1), other, (), 1, (1,), (0,)))
    assert list(queue.take()) == [e.RankArrived(1)], "another process has its number"
    queue._on_membership(Membership((0, 1), other, (), 2, (), (0, 1)))
    assert list(queue.take()) == [e.Connected(1)]


def test_a_rank_that_was_cut_off_has_joined_once_it_is_in_the_world_again(queue: EventQueue) -> None:
    """It goes back to its last commit first, and then waits; neither is taken for having joined."""
    both = tuple(m.Member(rank, "host", 100 + rank) for rank in range(2))
    death = m.Death(1, 101, 0.0, "no sign of life for 30 s")
    queue._on_membership(Membership((0, 1), both, (), 1, (), (0, 1)))
    queue._on_membership(Membership((0, 1), both[:1], (death,), 2, (), (0,)))
    assert list(queue.take())[2:] == [e.Formed(), e.RankDisconnected(1, "no sign of life for 30 s")]
    queue._on_returned(1, 101, 45.0)
    queue._on_membership(Membership((0, 1), both, (), 2, (), (0,)))
    queue._on_membership(Membership((0, 1), both, (), 2, (1,), (0,)))
    assert list(queue.take()) == [e.RankReturned(1, 45.0)]
    queue._on_membership(Membership((0, 1), both, (), 3, (), (0, 1)))
    assert list(queue.take()) == [e.Connected(1)]


def test_a_rank_that_is_kept_to_its_end_stays_so(queue: EventQueue) -> None:
    two = tuple(m.Member(rank, "host", 100 + rank) for rank in range(2))

    def change(members: tuple[m.Member, ...], *kept: int) -> list[object]:
        queue._on_membership(Membership((0, 1), members, (), 1, (), (0, 1), kept=kept))
        return list(queue.take())

    change(two)
    assert change(two, 0, 1) == [e.RanksKept((0, 1), True)]
    assert change(two, 0, 1) == []
    assert change(two, 0) == [e.RanksKept((1,), False)]
    assert change(two[1:]) == [e.RankDisconnected(0)]
    other = (m.Member(0, "host", 200), two[1])
    assert change(other) == [e.Connected(0)], "another process has its number"
    assert change(other, 0) == [e.RanksKept((0,), True)]
    assert change(other) == [e.RanksKept((0,), False)]
