"""Operations of several requests, on an engine that refuses one of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvdlab.collectives.engine.requests import Request
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.types import OpKind
from hvdlab.torch.c10d.submission import Calls, Submission
from support.patience import HOUR


class _Engine:
    """Engine that accepts some requests, and refuses those after them."""

    rank = 0

    def __init__(self, accepts: int) -> None:
        self._left = accepts
        self.withdrawn: list[tuple[str, int]] = []

    def processes(self) -> tuple[int, tuple[tuple[int, str], ...]]:
        return 0, ((0, "process"),)

    def generation(self) -> int:
        return 0

    def submit(self, request: Request, *, announce: bool, at_once: bool) -> object:
        if not self._left:
            raise InvalidRequestError("refused")
        self._left -= 1
        return SimpleNamespace(generation=0)

    def withdraw(self, text: str, process_set: int) -> None:
        self.withdrawn.append((text, process_set))


@pytest.mark.parametrize("accepts", [0, 1])
def test_requests_before_a_refused_one_are_withdrawn(accepts: int) -> None:
    engine = _Engine(accepts)
    world: Any = SimpleNamespace(
        engine=engine, store=None, process_set=lambda members: 3, name_in_core=lambda name, members: name
    )
    calls, submission = Calls(world, "group", [0], HOUR), Submission()
    for _ in range(2):
        submission.add(Request(OpKind.BARRIER))
    with pytest.raises(InvalidRequestError, match="refused"):
        calls.submit("barrier", [], submission)
    assert [process_set for _, process_set in engine.withdrawn] == [3] * accepts
