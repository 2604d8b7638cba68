"""When a silent coordinator counts as lost."""

from __future__ import annotations

from hvdlab.collectives.heartbeat import ASK_AFTER, SILENT_AFTER, STOPPED_AFTER, Heartbeat


def test_one_that_answers_is_asked_now_and_then() -> None:
    now, asked = 100.0, 0
    heartbeat = Heartbeat(now, lambda: True)
    for _ in range(10):
        now += heartbeat.timeout(now)
        if heartbeat.asks(now):
            asked += 1
            heartbeat.heard(now)
        assert heartbeat.lost(now) == ""
    assert asked == 10


def test_one_that_is_stopped_is_lost_soon() -> None:
    heartbeat = Heartbeat(0.0, lambda: True)
    assert not heartbeat.asks(ASK_AFTER / 2)
    assert heartbeat.asks(ASK_AFTER)
    assert not heartbeat.asks(ASK_AFTER), "asked once"
    assert heartbeat.lost(ASK_AFTER) == ""
    assert "stopped" in heartbeat.lost(ASK_AFTER + STOPPED_AFTER)


def test_a_busy_one_is_given_time() -> None:
    heartbeat = Heartbeat(0.0, lambda: False)
    assert heartbeat.asks(ASK_AFTER)
    assert heartbeat.lost(ASK_AFTER + SILENT_AFTER - 1) == ""
    assert "not answered for 30 s" in heartbeat.lost(ASK_AFTER + SILENT_AFTER)


def test_who_was_stopped_itself_hears_first_what_has_come() -> None:
    heartbeat = Heartbeat(0.0, lambda: False)
    assert heartbeat.asks(ASK_AFTER)
    much_later = 1000.0
    heartbeat.heard(much_later)
    assert heartbeat.lost(much_later) == ""
    assert heartbeat.timeout(much_later) == ASK_AFTER
