"""Ranks that wait for room: each is either started or reported as ended, once, in any order of events."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence

import pytest

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.launch.queueing_starter import RoomStarter, by_size
from hvdlab.launch.starter import Ended, Started, Waiting
from support.patience import PATIENCE


class GivenRooms(RoomStarter):
    """Engine in this process; a test gives it room."""

    def __init__(self, recorder: Recorded) -> None:
        super().__init__(recorder, "the engine")
        self.requested: list[tuple[tuple[int, ...], int, str]] = []
        self.refusal: Exception | None = None
        self.placed: dict[int, int] = {}
        self.calls: list[object] = []

    def _request_room(self, ranks: Sequence[int], size: int, host: str) -> None:
        self.requested.append((tuple(ranks), size, host))
        if self.refusal is not None:
            raise self.refusal
        self._run_thread(self._closing.wait, f"test-{min(ranks)}")

    def give_room(self, *ranks: int) -> None:
        """Start those of the ranks that still wait."""
        with self._changed:
            self.placed |= self._claim(ranks)

    def _signal_placed(self, rank: int, number: int) -> None:
        self.calls.append((rank, number))

    def _close_placed(self, timeout: float) -> None:
        self.calls.append(timeout)

    def _release_room(self) -> None:
        self.calls.append("released")


class Recorded:
    """Observer that takes reports."""

    def __init__(self) -> None:
        self.events: list[Started | Ended | Waiting] = []

    def handle(self, event: Started | Ended | Waiting) -> None:
        self.events.append(event)


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
def rooms(recorded: Recorded) -> GivenRooms:
    return GivenRooms(recorded)


@pytest.fixture(autouse=True)
def closed(rooms: GivenRooms) -> Iterator[None]:
    yield
    rooms.close(0.0)


def test_room_is_requested_for_ranks_that_wait(rooms: GivenRooms) -> None:
    rooms.start([0, 1], 2)
    rooms.start([2], 3)
    rooms.give_room(0, 1, 2)
    assert rooms.requested == [((0, 1), 2, ""), ((2,), 3, "")]
    assert rooms.placed == {0: 2, 1: 2, 2: 3}
    assert by_size(rooms.placed) == {2: [0, 1], 3: [2]}


def test_rank_that_waits_is_withdrawn_by_a_signal_that_ends_ranks(
    rooms: GivenRooms, recorded: Recorded
) -> None:
    rooms.start([0, 1], 2)
    rooms.signal(1, signal.SIGTERM)
    reason = "it was ended by SIGTERM before the engine had room for it"
    assert recorded.events == [Ended(1, 0, reason)]
    rooms.give_room(0, 1)
    assert rooms.placed == {0: 2}
    rooms.signal(0, signal.SIGTERM)
    rooms.signal(1, signal.SIGTERM)
    assert rooms.calls == [(0, signal.SIGTERM), (1, signal.SIGTERM)]
    assert len(recorded.events) == 1


def test_refused_order_is_raised_and_not_reported(rooms: GivenRooms, recorded: Recorded) -> None:
    rooms.refusal = StartError("the engine does not answer")
    with pytest.raises(StartError, match="does not answer"):
        rooms.start([0, 1], 2)
    rooms.give_room(0, 1)
    assert (rooms.placed, recorded.events) == ({}, [])


def test_close_withdraws_ranks_that_wait_and_refuses_more(rooms: GivenRooms, recorded: Recorded) -> None:
    rooms.start([0, 1], 2)
    rooms.give_room(0)
    rooms.close(3.0)
    assert recorded.events == [Ended(1, 0, "it was ended with its job")]
    # The second call ends the ranks placed while the first one waited.
    assert rooms.calls == [3.0, 0.0, "released"]
    with pytest.raises(InvalidRequestError, match=r"no rank can be started any more: the job has ended\."):
        rooms.start([1], 2)
    rooms.give_room(1)
    assert rooms.placed == {0: 2}


def test_signal_and_room_at_once_have_one_outcome(rooms: GivenRooms, recorded: Recorded) -> None:
    ranks = range(200)
    rooms.start(ranks, len(ranks))
    begin = threading.Barrier(2)

    def signal_all() -> None:
        begin.wait(PATIENCE)
        for rank in ranks:
            rooms.signal(rank, signal.SIGKILL)

    thread = threading.Thread(target=signal_all)
    thread.start()
    begin.wait(PATIENCE)
    for rank in ranks:
        rooms.give_room(rank)
    thread.join()
    withdrawn = {event.rank for event in recorded.events if isinstance(event, Ended)}
    signalled = {call[0] for call in rooms.calls if isinstance(call, tuple)}
    assert withdrawn | set(rooms.placed) == set(ranks)
    assert not withdrawn & set(rooms.placed)
    assert signalled == set(rooms.placed)
