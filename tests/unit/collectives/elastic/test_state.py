"""States without a world: saving, restoring, synchronizing and notifying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hvdlab.collectives.elastic import HostsUpdatedInterrupt, HostUpdateResult, ObjectState, State


def alone(**values: Any) -> ObjectState:
    return ObjectState(lambda obj: obj, lambda: 0, **values)


def test_values_are_attributes() -> None:
    values = [1]
    state = alone(epoch=3, values=values)
    assert (state.epoch, state.values) == (3, [1])  # type: ignore[attr-defined]  # made from the arguments
    assert state.values is values  # type: ignore[attr-defined]  # the same


def test_restore_goes_back_to_what_was_saved_also_inside_of_values() -> None:
    state: Any = alone(epoch=0, seen=[], nested={"a": [1]})
    state.seen.append(1)
    state.restore()
    assert state.seen == []
    state.seen.append(1)
    state.nested["a"].append(2)
    state.save()
    for _ in range(2):
        state.seen.append(7)
        state.nested["a"].clear()
        state.epoch = 9
        state.restore()
        assert (state.epoch, state.seen, state.nested) == (0, [1], {"a": [1, 2]})


def test_attributes_that_were_no_arguments_are_left_alone() -> None:
    state: Any = alone(epoch=0)
    state.other = 1
    state.save()
    state.other = 2
    state.restore()
    assert state.other == 2


def test_sync_takes_what_is_broadcast_and_saves_it() -> None:
    sent = []

    def broadcast(values: Any) -> Any:
        sent.append(values)
        return {"epoch": 5, "seen": [1, 2]}

    state: Any = ObjectState(broadcast, lambda: 1, epoch=0, seen=[])
    state.epoch = 1
    state.sync()
    assert sent == [{"epoch": 1, "seen": []}]
    assert (state.epoch, state.seen) == (5, [1, 2])
    state.seen.append(3)
    state.restore()
    assert (state.epoch, state.seen) == (5, [1, 2])


def test_a_commit_without_news_only_saves() -> None:
    state: Any = alone(epoch=0)
    state.epoch = 4
    state.commit()
    state.epoch = 5
    state.restore()
    assert state.epoch == 4


@pytest.mark.parametrize(
    ("changes", "skip_sync"),
    [
        ([HostUpdateResult.added], False),
        ([HostUpdateResult.removed], True),
        ([HostUpdateResult.removed, HostUpdateResult.added], False),
        ([1, 1], True),
    ],
)
def test_news_interrupt_once(changes: list[int], skip_sync: bool) -> None:
    state: Any = alone(epoch=0)
    for number, change in enumerate(changes, start=1):
        state.on_hosts_updated(number, change)
    state.epoch = 1
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.commit()
    assert caught.value.skip_sync is skip_sync
    assert isinstance(caught.value, RuntimeError)
    state.restore()
    assert state.epoch == 1  # it was saved before
    state.commit()


def test_old_news_and_news_of_before_a_reset_are_none() -> None:
    state = alone(epoch=0)
    state.on_hosts_updated(5, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()
    state.on_hosts_updated(5, HostUpdateResult.added)
    state.check_host_updates()
    state.on_hosts_updated(6, HostUpdateResult.added)
    state.on_reset()
    state.check_host_updates()


@pytest.mark.parametrize(("told", "interrupted"), [((0, 0, 0), False), ((0, 7, 2), True)])
def test_one_rank_decides_for_all(told: tuple[int, int, int], interrupted: bool) -> None:
    state = ObjectState(lambda obj: told, lambda: 1, epoch=0)
    if not interrupted:
        state.on_hosts_updated(9, HostUpdateResult.added)  # the others have not heard of it yet
        state.check_host_updates()
        return
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()


def test_reset_callbacks_are_called_in_order_after_reset() -> None:
    calls: list[str] = []

    class Resettable(ObjectState):
        def reset(self) -> None:
            calls.append("reset")

    def callback(name: str) -> Callable[[], None]:
        return lambda: calls.append(name)

    state = Resettable(lambda obj: obj, lambda: 0)
    state.register_reset_callbacks([callback("a"), callback("b")])
    state.register_reset_callbacks([callback("c")])
    state.on_reset()
    assert calls == ["reset", "a", "b", "c"]


def test_the_base_leaves_the_rest_to_subclasses() -> None:
    state = State(lambda obj: obj, lambda: 0)
    for method in (state.save, state.restore, state.sync):
        with pytest.raises(NotImplementedError):
            method()
    state.reset()
