"""Learning rates by the number of updates; beside MXNet, where it is there, ``tests/engines/mxnet`` compares them to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlab import kvstore
from hvdlab.collectives.kvstore import lr_schedulers
from hvdlab.collectives.kvstore.optimizers import portable, restored
from hvdlab.kvstore import KVStoreError
from hvdlab.kvstore.lr_scheduler import (
    CosineScheduler,
    FactorScheduler,
    LRScheduler,
    MultiFactorScheduler,
    PolyScheduler,
)

MADE: list[Callable[[], LRScheduler]] = [
    lambda: FactorScheduler(2, 0.5, base_lr=0.8),
    lambda: FactorScheduler(1, 0.1, stop_factor_lr=0.003, base_lr=1.0, warmup_steps=3, warmup_begin_lr=0.1),
    lambda: MultiFactorScheduler([2, 5], 0.1, base_lr=0.5),
    lambda: PolyScheduler(6, base_lr=0.4, pwr=3, final_lr=0.1),
    lambda: CosineScheduler(7, base_lr=0.4, final_lr=0.1, warmup_steps=2, warmup_mode="constant"),
]


class Halved:
    """Scheduler of the program's own."""

    def __call__(self, num_update: int) -> float:
        return 0.5**num_update


def rates(scheduler: LRScheduler, updates: int = 10) -> list[float]:
    return [scheduler(number) for number in range(1, updates + 1)]


def test_rates_are_those_of_the_formulas() -> None:
    factor, stopped, several, poly, cosine = (rates(make()) for make in MADE)
    assert factor == [0.8, 0.8, 0.4, 0.4, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05]
    assert stopped[:2] == [0.1 + 0.9 / 3, 0.1 + 0.9 * 2 / 3]
    assert stopped[2:4] == [1.0 * 0.1 * 0.1, 0.003]
    assert stopped[4:] == [0.003] * 6
    assert several == [0.5, 0.5, *[0.5 * 0.1] * 3, *[0.5 * 0.1 * 0.1] * 5]
    assert poly[:3] == pytest.approx([0.1 + 0.3 * (1 - n / 6) ** 3 for n in (1, 2, 3)])
    assert poly[5:] == [0.1] * 5
    assert cosine[0] == 0
    assert cosine[2:4] == pytest.approx([0.1 + 0.3 * (1 + math.cos(math.pi * n / 5)) / 2 for n in (1, 2)])
    assert cosine[6:] == pytest.approx([0.1] * 4)


def test_an_optimizer_without_a_rate_of_its_own_leaves_the_schedulers() -> None:
    sgd, adam = kvstore.optimizer.SGD, kvstore.optimizer.Adam
    assert sgd(lr_scheduler=FactorScheduler(9, base_lr=0.3)).learning_rate == 0.3
    assert sgd(learning_rate=0.01, lr_scheduler=FactorScheduler(9, base_lr=0.3)).learning_rate == 0.01
    assert adam(lr_scheduler=FactorScheduler(9, base_lr=0.3)).learning_rate == 0.001  # as MXNet's
    assert (sgd().lr, type(sgd().lr)) == (0.01, float)


@pytest.mark.parametrize("make", MADE)
@pytest.mark.parametrize("used", [0, 4])
def test_a_scheduler_goes_on_in_another_process(make: Callable[[], LRScheduler], used: int) -> None:
    """One that has the numbers of the beginning, as a server that was started again, comes to the same rates, too."""
    expected = rates(make(), 12)
    here = make()
    for number in range(1, used + 1):
        here(number)
    spec = portable(kvstore.optimizer.SGD(lr_scheduler=here))
    for number in range(used + 1, 13):
        there = restored(spec).lr_scheduler
        assert there is not None
        assert there(number) == expected[number - 1]
        assert here(number) == expected[number - 1]


def test_what_would_travel_as_code_is_refused() -> None:
    class Own(FactorScheduler):
        pass

    for own in (Halved(), Own(1)):
        with pytest.raises(
            KVStoreError, match=r"as lr_scheduler one of FactorScheduler, .* not a (Halved|Own)"
        ):
            portable(kvstore.optimizer.SGD(lr_scheduler=own))
    with pytest.raises(KVStoreError, match="no scheduler 'Odd'"):
        lr_schedulers.restored("Odd", {})
    numbers = FactorScheduler(2, base_lr=np.float64(0.5))
    assert portable(kvstore.optimizer.SGD(lr_scheduler=numbers)).schedule is not None
    numbers.factor = {}  # type: ignore[assignment]
    with pytest.raises(KVStoreError, match="lr_scheduler"):
        portable(kvstore.optimizer.SGD(lr_scheduler=numbers))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: FactorScheduler(0), ValueError, "step is at least 1, not 0"),
        (lambda: FactorScheduler(1, 1.5), ValueError, "factor is at most 1"),
        (lambda: MultiFactorScheduler([3, 3], 0.1), ValueError, "ascending"),
        (lambda: MultiFactorScheduler([0, 3], 0.1), ValueError, "ascending"),
        (lambda: MultiFactorScheduler([], 0.1), AssertionError, "list of numbers"),
        (lambda: MultiFactorScheduler((1, 2), 0.1), AssertionError, "list of numbers"),  # type: ignore[arg-type]
        (lambda: PolyScheduler(0), ValueError, "max_update is at least 1"),
        (lambda: CosineScheduler(1.5), AssertionError, "max_update is an int"),  # type: ignore[arg-type]
        (lambda: CosineScheduler(5, warmup_steps=-1), ValueError, "can't be negative"),
        (lambda: CosineScheduler(5, warmup_steps=1.0), AssertionError, "is an int"),  # type: ignore[arg-type]
        (lambda: PolyScheduler(5, warmup_begin_lr=1), ValueError, "base_lr has to be at least"),
        (lambda: PolyScheduler(5, warmup_mode="odd"), ValueError, "linear or constant"),  # type: ignore[arg-type]
    ],
)
def test_arguments_out_of_their_range(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_a_warmup_may_be_all_there_is() -> None:
    assert rates(CosineScheduler(3, base_lr=0.5, warmup_steps=3), 5)[2:] == [0.5] * 3


def test_saved_states_have_the_schedule(tmp_path: Path) -> None:
    file = str(tmp_path / "states")
    whole, first, second = (kvstore.create() for _ in range(3))
    for kv in (whole, first):
        kv.set_optimizer(
            kvstore.optimizer.SGD(momentum=0.9, lr_scheduler=FactorScheduler(2, 0.5, base_lr=0.4))
        )
        kv.init("w", np.ones(3, np.float32))
    second.set_optimizer("sgd")
    gradient = np.full(3, 0.5, np.float32)
    for _ in range(3):
        whole.push("w", gradient)
        first.push("w", gradient)
    first.save_optimizer_states(file, dump_optimizer=True)
    value, out = np.empty(3, np.float32), np.empty(3, np.float32)
    first.pull("w", out=value)
    second.init("w", value)
    second.load_optimizer_states(file)
    for _ in range(4):
        whole.push("w", gradient)
        second.push("w", gradient)
    whole.pull("w", out=value)
    second.pull("w", out=out)
    assert out.tobytes() == value.tobytes()


def test_a_scheduler_of_the_programs_own_stays_when_states_are_loaded(tmp_path: Path) -> None:
    file = str(tmp_path / "states")
    kv, own = kvstore.create(), Halved()
    kv.set_optimizer(kvstore.optimizer.SGD(lr_scheduler=own))
    kv.save_optimizer_states(file, dump_optimizer=True)
    kv.load_optimizer_states(file)
    assert kv._updater.optimizer.lr_scheduler is own


def test_a_stores_learning_rate_changes_and_states_stay() -> None:
    kv = kvstore.create()
    with pytest.raises(KVStoreError, match="no optimizer whose learning rate"):
        kv.set_learning_rate(0.1)
    kv.set_optimizer(lambda key, gradient, weight: None)
    with pytest.raises(KVStoreError, match="no optimizer whose learning rate"):
        kv.set_learning_rate(0.1)
    kv.set_optimizer(kvstore.optimizer.SGD(learning_rate=1.0, momentum=0.5))
    kv.init("w", np.zeros(1, np.float32))
    out = np.empty(1, np.float32)
    kv.push("w", np.full(1, -1, np.float32))
    kv.set_learning_rate(0.5)
    kv.pushpull("w", np.full(1, -1, np.float32), out=out)
    assert out.tolist() == [1 + 0.5 * 1 + 0.5]
    kv.set_optimizer(kvstore.optimizer.SGD(lr_scheduler=FactorScheduler(2)))
    with pytest.raises(UserWarning, match="lr_scheduler"):
        kv.set_learning_rate(0.5)
