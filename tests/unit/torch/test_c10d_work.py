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


def test_waits_that_end_at_once_raise_one_error() -> None:
    engine: Any = SimpleNamespace(rank=0)
    work = HvdlabWork(engine, 0, "all_reduce #1", [], None, HOUR)
    work.handles.append(_Failed())  # type: ignore[arg-type]
    raised: list[HvdlabError] = []

    def explain(error: HvdlabError) -> str:
        """Let another wait end while this one asks the other ranks."""
        work.explain = None
        with pytest.raises(AbortedError) as found:
            work.wait()
        raised.append(found.value)
        return ""

    work.explain = explain
    for _ in range(2):
        with pytest.raises(AbortedError) as found:
            work.wait()
        raised.append(found.value)
    assert [error is raised[0] for error in raised] == [True] * 3
    assert work.exception() is raised[0]
