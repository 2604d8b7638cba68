"""A rank at the door of elastic training: how it waits, and the worlds that it accepts as complete."""

from __future__ import annotations

import time
from types import SimpleNamespace
from unittest import mock

import pytest

from hvdlab.collectives.elastic.state import HostsUpdatedInterrupt, NotificationManager, State
from hvdlab.collectives.engine.world_view import WorldView
from hvdlab.collectives.errors import ReleasedError, StartError
from hvdlab.collectives.protocol import messages as m

MEMBERS = tuple(m.Member(rank, "host", rank) for rank in range(3))
DEATH = m.Death(2, 7, 0.0, "killed by SIGKILL")


def view(*, waiting: tuple[int, ...]) -> WorldView:
    """Rank 1 is back, rank 2 was lost on its way back."""
    made = WorldView()
    made.update(m.World((0, 1, 2), MEMBERS[:2], (DEATH,), 1, waiting))
    return made


def test_who_is_let_in_does_not_look_for_others() -> None:
    world = view(waiting=(1,))
    world.configured([0, 1], 1)
    world.wait_complete(0, 1, 0)


def test_at_the_door_others_may_die_and_the_time_is_another() -> None:
    with pytest.raises(StartError, match=r"rank 1 waited 0\.01 s for rank 0 to let it in"):
        view(waiting=(1,)).wait_complete(0, 1, 0.01)
    with pytest.raises(StartError, match="rank 2 ended before the world was complete"):
        view(waiting=()).wait_complete(0, 1, 0.01)


def test_a_member_does_not_wait_for_others_while_some_train() -> None:
    """Those come in later: rank 0 trains, and would wait for rank 1."""
    world = WorldView()
    world.configured([0, 1], 1)
    world.update(m.World((0, 1, 2), MEMBERS[:2], (), 1))
    with pytest.raises(StartError, match="rank 2 did not come"):
        world.wait_complete(0, 1, 0)
    world.update(m.World((0, 1, 2), MEMBERS[:2], (), 1, training=True))
    world.wait_complete(0, 1, 0)


def test_who_was_let_go_waits_no_more() -> None:
    world = view(waiting=(1,))
    world.released("its host is not part of the job any more")
    with pytest.raises(ReleasedError, match="its host is not part of the job any more"):
        world.wait_complete(0, 1, 10)


def test_news_of_the_world_and_answers_are_told_apart() -> None:
    world = view(waiting=())
    seen: list[tuple[int, ...]] = []
    world.watchers.append(lambda message: seen.append(message.waiting))
    world.update(m.World((0, 1), MEMBERS[:2], (), 1, (1,)))
    assert seen == [(1,)]
    assert not world.wait_regrouped(1, 0)
    world.regrouped(1)
    assert world.wait_regrouped(1, 0)
    assert not world.wait_regrouped(2, 0)
    world.lost("the coordinator is gone")
    with pytest.raises(StartError, match="the coordinator is gone"):
        world.wait_regrouped(2, 10)


def test_who_was_let_in_is_not_told_that_it_waits_itself() -> None:
    """It can learn of its own admission only later; if notified of it, all would begin again once more."""
    manager, listener = NotificationManager(), mock.Mock()
    elastic = SimpleNamespace(waiting=(0,), leaving=())
    manager._engine = SimpleNamespace(rank=0, elastic=elastic)  # type: ignore[assignment]
    manager.register_listener(listener)
    listener.on_hosts_updated.assert_not_called()
    elastic.waiting = (0, 1)
    manager.remind(listener)
    listener.on_hosts_updated.assert_called_once()


def test_news_of_a_clock_that_is_behind_reaches_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 50.0)
    manager, state = NotificationManager(), State(lambda news: news, lambda: 0)
    state._last_updated_timestamp = 100.0  # by a rank whose clock was ahead
    manager.register_listener(state)
    for waiting, leaving in (((1,), (0,)), ((1, 2), (0,))):
        manager._on_world(waiting, leaving)
        with pytest.raises(HostsUpdatedInterrupt) as raised:
            state.check_host_updates()
        assert not raised.value.skip_sync
    manager._engine = SimpleNamespace(rank=0, elastic=SimpleNamespace(waiting=(1, 2), leaving=()))  # type: ignore[assignment]
    manager.remind(state)
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()
    state.check_host_updates()
