"""Result of ``hvd.watch()`` in every framework: settings of the steps' meter, and its end."""

from __future__ import annotations

import pytest

from hvdlab.bindings.monitoring import StepMeter, TrainingWatch, check_every
from hvdlab.collectives.errors import InvalidRequestError


class Net:
    pass


class PlayedWatch(TrainingWatch):
    """Watch of a framework without any hooks; ``seen`` has its calls."""

    def __init__(self, meter: StepMeter, batch_size: float | None = None) -> None:
        super().__init__(Net(), meter, batch_size, 10)
        self.seen: list[str] = []

    def _step_set(self) -> None:
        self.seen.append(f"step {self.step}")

    def close(self) -> None:
        self.seen.append("closed")


def test_settings_are_those_of_the_meter() -> None:
    meter = StepMeter()
    watch = PlayedWatch(meter)
    watch.step = 7
    assert (meter.count, watch.step, watch.seen) == (7, 7, ["step 7"])
    assert repr(watch) == "<Watch of Net, 7 steps>"
    watch.batch_size = 32
    assert (meter.batch_size, watch.batch_size) == (32, 32)
    with pytest.raises(InvalidRequestError, match="not -1"):
        watch.batch_size = -1
    assert watch.batch_size == 32


def test_a_batch_size_of_the_users_is_known_as_such() -> None:
    assert PlayedWatch(StepMeter(), 4).knows_batch_size
    watch = PlayedWatch(StepMeter())
    assert not watch.knows_batch_size
    watch.batch_size = 8
    assert watch.knows_batch_size
    watch.batch_size = None
    assert not watch.knows_batch_size


def test_it_ends_with_a_block() -> None:
    with PlayedWatch(StepMeter()) as watch:
        assert watch.seen == []
    assert watch.seen == ["closed"]


def test_every_counts_steps() -> None:
    check_every(0)
    with pytest.raises(InvalidRequestError, match=r"every= is a number of steps, not -3\."):
        check_every(-3)
