"""Handles of groups, on parts that end when a test ends them."""

from __future__ import annotations

import pytest

from hvdlab.bindings.handles import CoreHandle, Handle, Part, every
from hvdlab.collectives.engine.requests import CompletionHook, Result
from hvdlab.collectives.errors import CollectiveError


class ScriptedCore(CoreHandle):
    """Core handle that records when it is waited for, and then runs its script."""

    def __init__(self, name: str, waited: list[str], outcome: Exception | None = None) -> None:
        self.name, self.waited, self.outcome = name, waited, outcome

    def done(self) -> bool:
        return self.name in self.waited

    def wait(self, timeout: float | None = None) -> Result:
        self.waited.append(self.name)
        if self.outcome is not None:
            raise self.outcome
        return Result(tables=((len(self.waited),),))

    def add_hook(self, hook: CompletionHook) -> bool:
        raise AssertionError("nothing here runs after a collective")

    def tell_blocked(self, seconds: float) -> None:
        raise AssertionError("nothing here waits on another thread")

    def tell_unblocked(self) -> None:
        raise AssertionError("nothing here waits on another thread")


def handle_of(*cores: ScriptedCore) -> Handle:
    return Handle([Part(core, core.name, None) for core in cores], every)


def test_a_group_waits_for_all_tensors_before_it_raises_the_first_error() -> None:
    waited: list[str] = []
    first, second = CollectiveError("first"), CollectiveError("second")
    handle = handle_of(
        ScriptedCore("a", waited, first), ScriptedCore("b", waited), ScriptedCore("c", waited, second)
    )
    for _ in range(2):
        with pytest.raises(CollectiveError, match="first"):
            handle.wait()
    assert waited == ["a", "b", "c"]
    assert handle.done()


def test_a_timeout_leaves_the_handle_as_it_was() -> None:
    waited: list[str] = []
    slow = ScriptedCore("b", waited, TimeoutError("still in flight"))
    handle = handle_of(ScriptedCore("a", waited), slow)
    with pytest.raises(TimeoutError):
        handle.wait(1.0)
    slow.outcome = None
    assert handle.wait() == ["a", "b"]
    assert handle.wait() == ["a", "b"]
    assert waited == ["a", "b", "a", "b"]
    assert [table for table in handle.tables] == [((3,),), ((4,),)]


class InterruptedCore(ScriptedCore):
    """Core handle in whose first ``add_hook`` Ctrl-C strikes."""

    def __init__(self, when: str) -> None:
        super().__init__("a", [])
        self.when: str | None = when
        self.hook: CompletionHook | None = None

    def add_hook(self, hook: CompletionHook) -> bool:
        when, self.when = self.when, None
        if when == "before":
            raise KeyboardInterrupt
        assert self.hook in (None, hook)
        self.hook = hook
        if when == "refused":  # the engine refuses a hook once, and this caller does not get the answer
            self.waited.append(self.name)
        if when is not None:
            raise KeyboardInterrupt
        return True


@pytest.mark.parametrize("when", ["before", "after", "refused"])
def test_callbacks_after_an_interrupted_one_are_called_once(when: str) -> None:
    core, called = InterruptedCore(when), list[str]()
    handle = handle_of(core)
    with pytest.raises(KeyboardInterrupt):
        handle.add_done_callback(lambda handle: called.append("first"))
    handle.add_done_callback(lambda handle: called.append("second"))
    if not core.done():
        core.waited.append(core.name)
        assert core.hook is not None
        core.hook(Result(), None)
    assert called == ["first", "second"]
    handle.add_done_callback(lambda handle: called.append("third"))
    assert called == ["first", "second", "third"]
