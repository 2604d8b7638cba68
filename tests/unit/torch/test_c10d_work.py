"""Operations in flight whose handles end when a test ends them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hvdlab.collectives.errors import AbortedError, Cause, CauseKind, HvdlabError, Pending
from hvdlab.torch.c10d.work import HvdlabWork
from support.patience import HOUR


class _Failed:
    """Handle of a request that has failed."""

    def done(self) -> bool:
        return True

    def wait(self) -> Any:
        raise AbortedError(Pending("group", "all_reduce"), Cause(CauseKind.WITHDRAWN, (), "it was given up"))

    def wait_or_withdraw(self, limit: object) -> Any:
        return self.wait()


class _Owner:
    """Owner of one work, another wait for which ends while it explains the failure to the first."""

    def __init__(self, raised: list[HvdlabError]) -> None:
        engine: Any = SimpleNamespace(rank=0)
        self.work = HvdlabWork(engine, self, 0, "all_reduce #1", [], None, HOUR)
        self.work.generation = 3
        self._raised = raised

    def future_asked_for(self, work: HvdlabWork) -> None:
        raise AssertionError("no future is needed")

    def explain(self, generation: int, error: HvdlabError) -> str:
        assert generation == 3
        self.work.generation = None
        with pytest.raises(AbortedError) as found:
            self.work.wait()
        self._raised.append(found.value)
        return ""


def test_waits_that_end_at_once_raise_one_error() -> None:
    raised: list[HvdlabError] = []
    work = _Owner(raised).work
    work.handles.append(_Failed())  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(AbortedError) as found:
            work.wait()
        raised.append(found.value)
    assert [error is raised[0] for error in raised] == [True] * 3
    assert work.exception() is raised[0]
