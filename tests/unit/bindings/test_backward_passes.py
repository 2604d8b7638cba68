"""Backward passes are counted, and a step that was given up is void, in any framework with hooks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest

from hvdlab.bindings.gradient_reducer import BackwardPassCounter
from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError
from support.fakes.framework import FakeGradients, Parameter


class Recorder(BackwardPassCounter[Parameter]):
    """Recorder of completed gradients, and of dropped ones."""

    def __init__(self, framework: FakeGradients, passes: int = 1) -> None:
        super().__init__(framework, passes)
        self.completed: list[Parameter] = []
        self.dropped = 0

    def complete(self, parameter: Parameter) -> None:
        self.completed.append(parameter)

    def drop(self) -> None:
        self.dropped += 1
        self.reset()


@pytest.fixture
def engine() -> Iterator[SimpleNamespace]:
    fake = SimpleNamespace(failed_cells=0)
    with mock.patch.object(context, "engine", return_value=fake):
        yield fake


def test_a_gradient_is_complete_after_so_many_backward_passes(engine: SimpleNamespace) -> None:
    framework, a, b = FakeGradients(), Parameter(), Parameter()
    watcher = Recorder(framework, passes=2)
    assert not watcher.watching
    watcher.watch("both", [a, b])
    assert watcher.watching
    assert watcher.watches(a)
    assert not watcher.watches(Parameter())
    framework.run_backward({a: 1, b: 1})
    assert watcher.completed == []
    assert watcher.in_progress
    framework.run_backward({b: 1})
    assert watcher.completed == [b]
    framework.run_backward({a: 1})
    assert watcher.completed == [b, a]
    watcher.reset()
    assert not watcher.in_progress
    watcher.set_passes(1)
    framework.run_backward({a: 1})
    assert watcher.completed == [b, a, a]


def test_one_pass_too_many_is_an_error_with_the_frameworks_advice(engine: SimpleNamespace) -> None:
    framework, a = FakeGradients(), Parameter()
    watcher = Recorder(framework)
    watcher.watch("a", [a])
    framework.run_backward({a: 1})
    with pytest.raises(
        AssertionError, match=r"more often than backward_passes_per_step.* Look for another loss\."
    ):
        framework.run_backward({a: 1})


def test_the_first_gradient_of_a_step_ends_what_was_said_of_the_last_one(engine: SimpleNamespace) -> None:
    framework, a = FakeGradients(), Parameter()
    watcher = Recorder(framework)
    watcher.watch("a", [a])
    watcher.settled = watcher.stepped = True
    framework.run_backward({a: 1})
    assert not watcher.settled
    assert not watcher.stepped


def test_what_a_failed_cell_left_of_a_step_is_dropped(engine: SimpleNamespace) -> None:
    framework, a, b = FakeGradients(), Parameter(), Parameter()
    watcher = Recorder(framework)
    watcher.watch("a", [a])
    watcher.watch("b", [b])
    framework.run_backward({a: 1})
    engine.failed_cells = 1
    framework.run_backward({a: 1, b: 1})
    assert watcher.dropped == 1
    assert watcher.completed == [a, a, b]
    engine.failed_cells = 2
    assert not watcher.in_progress
    assert watcher.dropped == 2
    engine.failed_cells = 3  # nothing was begun since
    framework.run_backward({a: 1})
    assert watcher.dropped == 2


def test_a_parameter_has_one_watcher_the_last_one(engine: SimpleNamespace) -> None:
    framework, a, b = FakeGradients(), Parameter(), Parameter()
    first, second = Recorder(framework), Recorder(framework)
    first.watch("both", [a, b])
    second.watch("a", [a])
    assert first.dropped == 1
    second.check()
    with pytest.raises(InvalidRequestError, match="a newer one was made"):
        first.check()
    framework.run_backward({a: 1, b: 1})
    assert (first.completed, second.completed) == ([], [a])
    second.watch("b", [b])  # its own hook retires nothing
    second.check()


def test_a_parameter_does_not_keep_its_watcher_alive(engine: SimpleNamespace) -> None:
    framework, a = FakeGradients(), Parameter()
    forgotten = Recorder(framework)
    forgotten.watch("a", [a])
    completed = forgotten.completed
    del forgotten
    gc.collect()
    framework.run_backward({a: 1})
    assert completed == []
    watcher = Recorder(framework)
    watcher.watch("a", [a])
    framework.run_backward({a: 1})
    assert watcher.completed == [a]
