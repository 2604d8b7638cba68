"""Records of steps that change while another thread looks for the newest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from hvdlab.bindings import step_record
from hvdlab.bindings.step_record import StepRecord


class _Random:
    """State of no random numbers."""

    def restored(self, model: Any) -> AbstractContextManager[None]:
        return nullcontext()


class _Watched(StepRecord):
    """Record that calls a function, once, when its steps are read: a step of another thread at the worst instant."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._then: Callable[[], object] | None = None
        super().__init__(5, 0)
        self.begin((), ((), {}), 0, _Random())
        self._then = then

    @property
    def steps(self) -> Any:
        return self._kept

    @steps.setter
    def steps(self, steps: Any) -> None:
        self._kept = steps

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name == "_all" or (name == "steps" and not super().__getattribute__("_lock").locked()):
            then, self._then = self._then, None
            if then is not None:
                then()
        return found


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin without records of other tests."""
    monkeypatch.setattr(step_record, "_records", type(step_record._records)())


def test_newest_is_found_while_a_record_is_made() -> None:
    made: list[StepRecord] = []
    record = _Watched(lambda: made.append(StepRecord(5, 0)))
    assert step_record.newest() is record
    assert made


def test_no_record_is_newest_when_all_close_meanwhile() -> None:
    records: list[_Watched] = []

    def close() -> None:
        for record in records:
            record.close()

    records += [_Watched(close), _Watched(close)]
    assert step_record.newest() is None
    assert step_record.suspects() is None
