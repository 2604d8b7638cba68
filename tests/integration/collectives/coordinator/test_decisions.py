"""Decisions of the parts of the coordinator's state: each is carried out before its part continues, and none is lost."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdlab.collectives import coordinator, failover
from hvdlab.collectives.coordinator.decision_log import DecisionEntry, DecisionKind
from hvdlab.collectives.coordinator.events import Log, Send
from hvdlab.collectives.coordinator.process_sets import Decisions
from hvdlab.collectives.coordinator.state import CoordinatorState
from hvdlab.collectives.protocol import messages as m

PARTS = (
    "state", "admission", "deadlock", "event_history", "fusion", "membership", "negotiation", "process_sets", "stall_inspector",
)  # fmt: skip


def test_an_entry_has_its_number_when_its_part_continues() -> None:
    def part() -> Decisions[str]:
        entry = DecisionEntry(DecisionKind.RELEASED, ranks=(1,))
        yield entry
        yield Send((7,), m.Leave("its host is gone", entry.number))
        yield Send((), m.Interrupt())  # no peer is there
        return "done"

    state = CoordinatorState()
    assert state.apply(part()) == "done"
    (number,) = [entry.number for entry in state.log.story(m.StoryRequest(0, 9))]
    assert number > 0
    assert state.effects.pop_all() == [Send((7,), m.Leave("its host is gone", number))]


def test_a_part_that_fails_halfway_loses_no_decision() -> None:
    def part() -> Decisions[None]:
        yield Log("first")
        raise ValueError("halfway")

    state = CoordinatorState()
    with pytest.raises(ValueError, match="halfway"):
        state.apply(part())
    assert state.effects.pop_all() == [Log("first")]


# -- calls ----------------------------------------------------------------------------------------------------------


def sources() -> Iterator[ast.Module]:
    folder = Path(next(iter(coordinator.__path__)))
    for name in PARTS:
        yield ast.parse((folder / f"{name}.py").read_text())
    yield ast.parse((Path(next(iter(failover.__path__))) / "successor.py").read_text())


def functions(trees: list[ast.Module]) -> Iterator[ast.FunctionDef]:
    for tree in trees:
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def decides(function: ast.FunctionDef) -> bool:
    """Return whether a generator's annotation names decisions, not other values."""
    yields = any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function))
    returned = ast.unparse(function.returns) if function.returns is not None else ""
    return yields and any(
        kind in returned for kind in ("Decisions", "DecisionEntry", "Amendment", "Effect", "Send")
    )


def name_of(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def forgotten_calls(trees: list[ast.Module]) -> list[str]:
    """Calls of functions that decide, without a consumer: they would do nothing."""
    deciding = {function.name for function in functions(trees) if decides(function)}
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    consumed = {id(argument) for call in calls if name_of(call) == "apply" for argument in call.args}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.YieldFrom):
                consumed.add(id(node.value))
            elif isinstance(node, ast.For | ast.comprehension):
                consumed.add(id(node.iter))
    return [ast.unparse(call) for call in calls if name_of(call) in deciding and id(call) not in consumed]


def test_each_decision_has_a_consumer() -> None:
    assert forgotten_calls(list(sources())) == []


def test_a_call_without_a_consumer_is_found() -> None:
    text = "def part() -> Decisions[None]:\n    yield 1\ndef state():\n    part()\n    state.apply(part())\n"
    assert forgotten_calls([ast.parse(text)]) == ["part()"]
