"""A client that reads events slower than they come gets fewer of them, and the number of those that it missed."""

from __future__ import annotations

from hvdlab.collectives.coordinator.event_history import (
    CAUGHT_UP_BYTES,
    FIRST_LAG_LIMIT,
    LAG_LIMIT,
    LaggingSubscriber,
)
from hvdlab.collectives.protocol.messages import RankEvents
from hvdlab.collectives.tracing.record_format import HEADER, MAGIC, RECORD_BYTES, VERSION, read_head


def batch(records: int, lost: int = 0, rank: int = 1) -> RankEvents:
    head = HEADER.pack(MAGIC, VERSION, 0, rank, 0, records, 5, lost, 0)
    return RankEvents(rank, head + bytes(records * RECORD_BYTES))


def lost(message: RankEvents | None) -> int:
    assert message is not None
    return read_head(message.batch).dropped


def test_who_keeps_up_gets_everything_as_it_is() -> None:
    subscriber, message = LaggingSubscriber(), batch(3, lost=2)
    for waiting in (0, CAUGHT_UP_BYTES, LAG_LIMIT, 0, LAG_LIMIT):
        assert subscriber.next_batch(message, waiting) is message


def test_who_is_behind_gets_nothing_until_he_has_read_what_waits() -> None:
    subscriber = LaggingSubscriber()
    assert subscriber.next_batch(batch(1), 0) is not None
    assert subscriber.next_batch(batch(10), LAG_LIMIT + 1) is None
    assert subscriber.next_batch(batch(20), CAUGHT_UP_BYTES + 1) is None
    assert subscriber.next_batch(batch(4, rank=2), CAUGHT_UP_BYTES + 1) is None
    assert lost(subscriber.next_batch(batch(2, lost=3), CAUGHT_UP_BYTES)) == 3 + 30
    assert lost(subscriber.next_batch(batch(2, lost=3, rank=2), LAG_LIMIT)) == 3 + 4
    assert subscriber.next_batch(batch(5), LAG_LIMIT + 1) is None
    assert lost(subscriber.next_batch(batch(2, lost=7), 0)) == 7 + 35


def test_the_history_may_wait_for_him_whole() -> None:
    subscriber = LaggingSubscriber()
    assert subscriber.next_batch(batch(1), FIRST_LAG_LIMIT) is not None
    assert subscriber.next_batch(batch(1), FIRST_LAG_LIMIT + 1) is None
    assert subscriber.next_batch(batch(1), 0) is not None
    assert subscriber.next_batch(batch(1), FIRST_LAG_LIMIT) is None


def test_what_is_no_batch_is_passed_on_as_it_is() -> None:
    subscriber = LaggingSubscriber()
    subscriber.next_batch(batch(1), 0)
    assert subscriber.next_batch(RankEvents(1, b"short"), LAG_LIMIT + 1) is None
    subscriber.next_batch(batch(1), LAG_LIMIT + 1)
    message = subscriber.next_batch(RankEvents(1, b"short"), 0)
    assert message is not None
    assert message.batch == b"short"


def test_batch_that_gives_too_many_records_as_lost_is_passed_on() -> None:
    subscriber, most = LaggingSubscriber(), (1 << 64) - 1
    subscriber.next_batch(batch(1), 0)
    subscriber.next_batch(batch(1), LAG_LIMIT + 1)
    assert lost(subscriber.next_batch(batch(1, lost=most), 0)) == most
