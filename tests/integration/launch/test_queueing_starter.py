"""Ranks that wait for free slots: each is either started or reported as ended, once, in any order of events."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence

import pytest

from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.launch.queueing_starter import QueueingStarter, by_size
from hvdlab.launch.starter import Ended, Started, Waiting
from support.patience import PATIENCE


class QueueWithSlots(QueueingStarter):
    """Engine in this process; a test frees its slots."""

    def __init__(self, recorder: Recorded) -> None:
        super().__init__(recorder, "the engine")
        self.requested: list[tuple[tuple[int, ...], int, str]] = []
        self.refusal: Exception | None = None
        self.placed: dict[int, int] = {}
        self.calls: list[object] = []

    def _request_slots(self, ranks: Sequence[int], size: int, host: str) -> None:
        self.requested.append((tuple(ranks), size, host))
        if self.refusal is not None:
            raise self.refusal
        self._run_thread(self._wait_for_close, f"test-{min(ranks)}")

    def _wait_for_close(self) -> None:
        self._closing.wait()

    def free_slots(self, *ranks: int) -> None:
        """Start those of the ranks that still wait."""
        with self._changed:
            self.placed |= self._claim(ranks)

    def _signal_placed(self, rank: int, number: int) -> None:
        self.calls.append((rank, number))

    def _close_placed(self, timeout: float) -> None:
        self.calls.append(timeout)

    def _release_slots(self) -> None:
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
def queue(recorded: Recorded) -> QueueWithSlots:
    return QueueWithSlots(recorded)


@pytest.fixture(autouse=True)
def closed(queue: QueueWithSlots) -> Iterator[None]:
    yield
    queue.close(0.0)


def test_slots_are_requested_for_ranks_that_wait(queue: QueueWithSlots) -> None:
    queue.start([0, 1], 2)
    queue.start([2], 3)
    queue.free_slots(0, 1, 2)
    assert queue.requested == [((0, 1), 2, ""), ((2,), 3, "")]
    assert queue.placed == {0: 2, 1: 2, 2: 3}
    assert by_size(queue.placed) == {2: [0, 1], 3: [2]}


def test_rank_that_waits_is_withdrawn_by_a_signal_that_ends_ranks(
    queue: QueueWithSlots, recorded: Recorded
) -> None:
    queue.start([0, 1], 2)
    queue.signal(1, signal.SIGTERM)
    reason = "it was ended by SIGTERM before the engine had room for it"
    assert recorded.events == [Ended(1, 0, reason)]
    queue.free_slots(0, 1)
    assert queue.placed == {0: 2}
    queue.signal(0, signal.SIGTERM)
    queue.signal(1, signal.SIGTERM)
    assert queue.calls == [(0, signal.SIGTERM), (1, signal.SIGTERM)]
    assert len(recorded.events) == 1


def test_refused_order_is_raised_and_not_reported(queue: QueueWithSlots, recorded: Recorded) -> None:
    queue.refusal = StartError("the engine does not answer")
    with pytest.raises(StartError, match="does not answer"):
        queue.start([0, 1], 2)
    queue.free_slots(0, 1)
    assert (queue.placed, recorded.events) == ({}, [])


def test_close_withdraws_ranks_that_wait_and_refuses_more(queue: QueueWithSlots, recorded: Recorded) -> None:
    queue.start([0, 1], 2)
    queue.free_slots(0)
    queue.close(3.0)
    assert recorded.events == [Ended(1, 0, "it was ended with its job")]
    # The second call ends the ranks placed while the first one waited.
    assert queue.calls == [3.0, 0.0, "released"]
    with pytest.raises(InvalidRequestError, match=r"no rank can be started any more: the job has ended\."):
        queue.start([1], 2)
    queue.free_slots(1)
    assert queue.placed == {0: 2}


def test_signal_and_slot_at_once_have_one_outcome(queue: QueueWithSlots, recorded: Recorded) -> None:
    ranks = range(200)
    queue.start(ranks, len(ranks))
    begin = threading.Barrier(2)

    def signal_all() -> None:
        begin.wait(PATIENCE)
        for rank in ranks:
            queue.signal(rank, signal.SIGKILL)

    thread = threading.Thread(target=signal_all)
    thread.start()
    begin.wait(PATIENCE)
    for rank in ranks:
        queue.free_slots(rank)
    thread.join()
    withdrawn = {event.rank for event in recorded.events if isinstance(event, Ended)}
    signalled = {call[0] for call in queue.calls if isinstance(call, tuple)}
    assert withdrawn | set(queue.placed) == set(ranks)
    assert not withdrawn & set(queue.placed)
    assert signalled == set(queue.placed)
