"""Who does not read events as fast as they come gets fewer of them, and knows how many he missed."""

from __future__ import annotations

from hvdlab.collectives.coordinator.watchers import BEHIND, BEHIND_AT_FIRST, CAUGHT_UP, Watcher
from hvdlab.collectives.protocol.messages import RankEvents
from hvdlab.collectives.tracing.record_format import HEADER, MAGIC, RECORD_BYTES, VERSION, read_head


def batch(records: int, lost: int = 0, rank: int = 1) -> RankEvents:
    head = HEADER.pack(MAGIC, VERSION, 0, rank, 0, records, 5, lost, 0)
    return RankEvents(rank, head + bytes(records * RECORD_BYTES))


def lost(message: RankEvents | None) -> int:
    assert message is not None
    return read_head(message.batch).dropped


def test_who_keeps_up_gets_everything_as_it_is() -> None:
    watcher, message = Watcher(), batch(3, lost=2)
    for waiting in (0, CAUGHT_UP, BEHIND, 0, BEHIND):
        assert watcher.take(message, waiting) is message


def test_who_is_behind_gets_nothing_until_he_has_read_what_waits() -> None:
    watcher = Watcher()
    assert watcher.take(batch(1), 0) is not None
    assert watcher.take(batch(10), BEHIND + 1) is None
    assert watcher.take(batch(20), CAUGHT_UP + 1) is None
    assert watcher.take(batch(4, rank=2), CAUGHT_UP + 1) is None
    assert lost(watcher.take(batch(2, lost=3), CAUGHT_UP)) == 3 + 30
    assert lost(watcher.take(batch(2, lost=3, rank=2), BEHIND)) == 3 + 4
    assert watcher.take(batch(5), BEHIND + 1) is None
    assert lost(watcher.take(batch(2, lost=7), 0)) == 7 + 35


def test_the_history_may_wait_for_him_whole() -> None:
    watcher = Watcher()
    assert watcher.take(batch(1), BEHIND_AT_FIRST) is not None
    assert watcher.take(batch(1), BEHIND_AT_FIRST + 1) is None
    assert watcher.take(batch(1), 0) is not None
    assert watcher.take(batch(1), BEHIND_AT_FIRST) is None


def test_what_is_no_batch_is_passed_on_as_it_is() -> None:
    watcher = Watcher()
    watcher.take(batch(1), 0)
    assert watcher.take(RankEvents(1, b"short"), BEHIND + 1) is None
    watcher.take(batch(1), BEHIND + 1)
    message = watcher.take(RankEvents(1, b"short"), 0)
    assert message is not None
    assert message.batch == b"short"
