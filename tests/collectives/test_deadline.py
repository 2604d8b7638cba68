from __future__ import annotations

import pytest

from hvdlab.collectives.deadline import Deadline


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_a_deadline_is_shared_by_steps() -> None:
    clock = Clock()
    deadline = Deadline(3, clock=clock)
    assert deadline.remaining() == 3
    clock.now += 2
    assert deadline.remaining() == 1
    assert not deadline.expired
    clock.now += 2
    assert deadline.remaining() == 0
    assert deadline.expired
    with pytest.raises(TimeoutError, match="the coffee took longer than 3 s"):
        deadline.check("the coffee")


def test_no_limit() -> None:
    deadline = Deadline(None)
    assert deadline.remaining() is None
    assert not deadline.expired
    deadline.check("anything")
