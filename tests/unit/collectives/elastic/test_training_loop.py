"""The loop around elastic training, without a world."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvdlab.collectives import context
from hvdlab.collectives.elastic import HostsUpdatedInterrupt, HostUpdateResult, notification_manager, run_fn
from hvdlab.collectives.elastic.training_loop import Attempts
from hvdlab.collectives.engine.world_view import ElasticMembership, WorldView
from hvdlab.collectives.errors import AbortedError, Cause, CauseKind, CollectiveError, MismatchError, Pending


class Log:
    """State that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def sync(self) -> None:
        self.calls.append("sync")

    def restore(self) -> None:
        self.calls.append("restore")

    def on_reset(self) -> None:
        self.calls.append("on_reset")

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        self.calls.append(f"told {update_res}")


def trained(*outcomes: Any) -> tuple[Any, list[str]]:
    """Train with a function that raises or returns these, one after the other."""
    state: Any = Log()
    left = list(outcomes)

    def train(state: Any, *args: Any, **kwargs: Any) -> Any:
        state.calls.append(f"train{args}{kwargs or ''}")
        outcome = left.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    result = run_fn(train, lambda: state.calls.append("reset"))(state, 1)
    return result, state.calls


def aborted(kind: CauseKind) -> AbortedError:
    return AbortedError(Pending("allreduce", "x"), Cause(kind, (1,), "it happened"))


def test_without_a_failure_it_synchronizes_and_trains() -> None:
    assert trained("result") == ("result", ["sync", "train(1,)"])


@pytest.mark.parametrize(
    "failure",
    [
        CollectiveError(),
        CollectiveError("injected"),
        aborted(CauseKind.RANK_DIED),
        aborted(CauseKind.PLANE_FAILED),
    ],
    ids=lambda error: str(error) or "empty",
)
def test_a_failed_collective_restores_resets_and_synchronizes(failure: CollectiveError) -> None:
    result, calls = trained(failure, failure, 3)
    again = ["restore", "reset", "on_reset", "sync", "train(1,)"]
    assert (result, calls) == (3, ["sync", "train(1,)", *again, *again])


@pytest.mark.parametrize(("skip_sync", "came"), [(False, False), (True, False), (True, True)])
def test_news_of_the_world_reset_without_restoring(
    monkeypatch: pytest.MonkeyPatch, skip_sync: bool, came: bool
) -> None:
    """A newcomer that was let in while the others agreed that some leave has to be given the state."""
    monkeypatch.setattr(Attempts, "rejoin", lambda self: came)
    _, calls = trained(HostsUpdatedInterrupt(skip_sync), 3)
    sync = [] if skip_sync and not came else ["sync"]
    assert calls == ["sync", "train(1,)", "reset", "on_reset", *sync, "train(1,)"]


def test_a_failure_after_news_synchronizes_in_any_case() -> None:
    _, calls = trained(HostsUpdatedInterrupt(True), CollectiveError(), 3)
    assert calls[-5:] == ["restore", "reset", "on_reset", "sync", "train(1,)"]


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt(), RuntimeError("other")])
def test_other_errors_are_the_users(error: BaseException) -> None:
    with pytest.raises(type(error)):
        trained(error)


@pytest.mark.parametrize(
    "kind",
    [CauseKind.CELL_FAILED, CauseKind.CELL_ENDED, CauseKind.INTERRUPTED, CauseKind.COORDINATOR_LOST],
)
def test_some_causes_end_it(kind: CauseKind) -> None:
    with pytest.raises(AbortedError, match="it happened"):
        trained(aborted(kind), 3)


@pytest.mark.parametrize("error", [MismatchError("x", 0, ()), aborted(CauseKind.DEADLOCK)])
def test_the_same_disagreement_a_second_time_ends_it(error: CollectiveError) -> None:
    with pytest.raises(type(error)):
        trained(error, error, 3)
    assert trained(error, CollectiveError(), 3)[0] == 3


def test_a_failure_in_the_first_synchronization_is_tried_again() -> None:
    state: Any = Log()
    failures = [CollectiveError(), CollectiveError()]

    def sync() -> None:
        state.calls.append("sync")
        if failures:
            raise failures.pop()

    state.sync = sync
    assert run_fn(lambda state: 1, lambda: None)(state) == 1
    assert state.calls == ["sync", "restore", "on_reset", "sync", "restore", "on_reset", "sync"]


def test_the_name_and_docstring_stay() -> None:
    def train(state: Any) -> None:
        """Train."""

    elastic = run_fn(train, lambda: None)
    assert (elastic.__name__, elastic.__doc__) == ("train", "Train.")


def test_states_are_told_while_they_train_and_not_afterwards() -> None:
    state: Any = Log()

    def train(state: Any) -> None:
        notification_manager.handle_hosts_updated(1.0, HostUpdateResult.added)

    run_fn(train, lambda: None)(state)
    notification_manager.handle_hosts_updated(2.0, HostUpdateResult.added)
    assert state.calls == ["sync", "told 2"]


class Locked:
    """State that only knows whether elastic training goes on; the end of training can meet an interrupt."""

    def __init__(self, interrupts: int) -> None:
        self.elastic = False
        self._interrupts = interrupts

    def update(self, change: object, elastic: bool) -> None:
        if not elastic and self._interrupts:
            self._interrupts -= 1
            raise KeyboardInterrupt
        self.elastic = elastic


@pytest.mark.parametrize("place", ["listener", "end"])
def test_second_interrupt_leaves_no_rank_in_training(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    locked: Any = Locked(1 if place == "end" else 0)
    engine: Any = SimpleNamespace(elastic=ElasticMembership(0, locked, WorldView()), closed=False)
    monkeypatch.setattr(context, "is_initialized", lambda: True)
    monkeypatch.setattr(context, "engine", lambda: engine)
    monkeypatch.setattr(notification_manager, "init", lambda: None)

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    if place == "listener":
        monkeypatch.setattr(notification_manager, "remove_listener", interrupted)
    state: Any = Log()
    with pytest.raises(KeyboardInterrupt):
        run_fn(interrupted, lambda: None)(state)
    assert not engine.elastic.training
    assert not locked.elastic
    notification_manager._listeners.clear()
