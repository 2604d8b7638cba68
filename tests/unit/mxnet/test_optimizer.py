"""Sums of gradients whose allreduces end when a test ends them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hvdlab.collectives.errors import CollectiveError

pytestmark = pytest.mark.usefixtures("mxnet")


class _Handle:
    def __init__(self, name: str, ended: list[str], error: Exception | None) -> None:
        self._name, self._ended, self._error = name, ended, error

    def wait(self) -> None:
        self._ended.append(self._name)
        if self._error is not None:
            raise self._error


class _Two:
    """A process set of two ranks."""

    process_set_id = 0

    def size(self) -> int:
        return 2

    def included(self) -> bool:
        return True


def test_failed_gradient_sum_ends_when_all_allreduces_have(monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdlab.mxnet import optimizer

    ended: list[str] = []
    outcomes: Iterator[Exception | None] = iter([CollectiveError("first"), CollectiveError("second"), None])

    def submit(operation: Any, array: Any, name: str, *, in_place: bool) -> _Handle:
        return _Handle(name, ended, next(outcomes))

    monkeypatch.setattr(optimizer, "set_id", lambda process_set: 0)
    monkeypatch.setattr(optimizer, "BINDING", type("Binding", (), {"submit": staticmethod(submit)}))
    sums = optimizer.GradientSums(1.0, 0, _Two())  # type: ignore[arg-type]
    with pytest.raises(CollectiveError, match="first"):
        sums.add_up(["0", "1", "2"], [object(), object(), object()])
    assert ended == ["0", "1", "2"]  # the core writes to no gradient that the caller has back
