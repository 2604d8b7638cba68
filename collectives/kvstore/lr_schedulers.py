"""Learning rates that depend on the number of updates, by MXNet's formulas, and as numbers that travel without code.

All arithmetic is in double precision and in MXNet's order, so rates are equal to the bit. A scheduler's rate depends only on the
numbers it was made of and on the number of updates, as long as that does not go back: a server that was started again goes on with the same rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from hvdlab.collectives.errors import KVStoreError
from hvdlab.collectives.kvstore.base import require
from hvdlab.collectives.kvstore.optimizer_state import ScheduleSpec, require_like

WarmupMode = Literal["linear", "constant"]


class LRScheduler:
    """Base of schedulers, for ``lr_scheduler=`` of optimizers: the learning rate by the number of updates, after a warmup.

    Args:
        base_lr: The learning rate that decays. An optimizer that is given ``learning_rate`` sets it.
        warmup_steps: Updates before the decay begins.
        warmup_begin_lr: The learning rate at the start of the warmup.
        warmup_mode: ``linear``: the rate grows evenly from ``warmup_begin_lr`` to ``base_lr``; ``constant``: it stays ``warmup_begin_lr``.

    Raises:
        AssertionError: ``warmup_steps`` is no int.
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: WarmupMode = "linear",
    ) -> None:
        require(isinstance(warmup_steps, int), f"warmup_steps is an int, not {warmup_steps!r}")
        if warmup_begin_lr > base_lr:
            raise ValueError(
                f"base_lr has to be at least warmup_begin_lr, but {base_lr} is less than {warmup_begin_lr}"
            )
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps can't be negative: {warmup_steps}")
        if warmup_mode not in ("linear", "constant"):
            raise ValueError(f"warmup_mode is linear or constant, not {warmup_mode!r}")
        self.base_lr = base_lr
        self.warmup_steps = warmup_steps
        self.warmup_begin_lr = warmup_begin_lr
        #: Where a linear warmup leads; ``base_lr`` may be set later.
        self.warmup_final_lr = base_lr
        self.warmup_mode = warmup_mode

    def get_warmup_lr(self, num_update: int) -> float:
        """Return the learning rate after ``num_update`` updates, which are fewer than ``warmup_steps``."""
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        # MXNet multiplies before it divides.
        rise = (self.warmup_final_lr - self.warmup_begin_lr) * float(num_update) / float(self.warmup_steps)
        return self.warmup_begin_lr + rise

    def __call__(self, num_update: int) -> float:
        """Return the learning rate for the update that makes it so many, of the key with the most updates."""
        if num_update < self.warmup_steps:
            return self.get_warmup_lr(num_update)
        return self._decayed(num_update)

    def _decayed(self, num_update: int) -> float:
        raise NotImplementedError


class FactorScheduler(LRScheduler):
    """Scheduler that multiplies the learning rate by a factor after every so many updates: ``base_lr * factor**((num_update - 1) // step)``.

    Args:
        step: Updates with the same rate.
        factor: Factor of the rate, at most 1.
        stop_factor_lr: The rate does not become less than this.
        base_lr, warmup_steps, warmup_begin_lr, warmup_mode: See :class:`LRScheduler`.

    Raises:
        AssertionError, ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        step: int,
        factor: float = 1,
        stop_factor_lr: float = 1e-8,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: WarmupMode = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        if step < 1:
            raise ValueError(f"step is at least 1, not {step}")
        _check_factor(factor)
        self.step = step
        self.factor = factor
        self.stop_factor_lr = stop_factor_lr
        #: The updates after which ``base_lr``, which is the rate now, was last multiplied.
        self.count = 0

    def _decayed(self, num_update: int) -> float:
        while num_update > self.count + self.step:
            self.count += self.step
            lower = max(self.base_lr * self.factor, self.stop_factor_lr)
            if (
                lower == self.base_lr
            ):  # it stays so: many updates that count as done at the start cost no time
                self.count += (num_update - self.count - 1) // self.step * self.step
            self.base_lr = lower
        return self.base_lr


class MultiFactorScheduler(LRScheduler):
    """Scheduler that multiplies the learning rate by a factor after each of some numbers of updates.

    Args:
        step: These numbers, ascending.
        factor: Factor of the rate, at most 1.
        base_lr, warmup_steps, warmup_begin_lr, warmup_mode: See :class:`LRScheduler`.

    Raises:
        AssertionError: ``step`` is no list, or empty.
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        step: list[int],
        factor: float = 1,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: WarmupMode = "linear",
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        require(
            isinstance(step, list) and len(step) > 0, f"step is a list of numbers of updates, not {step!r}"
        )
        if step[0] < 1 or step != sorted(set(step)):
            raise ValueError(f"step has ascending numbers of updates from 1 on, unlike {step}")
        _check_factor(factor)
        self.step = step
        self.factor = factor
        #: How many of ``step`` the updates have passed; ``base_lr`` is the rate after them.
        self.cur_step_ind = 0
        #: The last of these.
        self.count = 0

    def _decayed(self, num_update: int) -> float:
        while self.cur_step_ind < len(self.step) and num_update > self.step[self.cur_step_ind]:
            self.count = self.step[self.cur_step_ind]
            self.cur_step_ind += 1
            self.base_lr *= self.factor
        return self.base_lr


class _DecayToTheEnd(LRScheduler):
    """From a first rate to a last one, which stays."""

    def __init__(
        self,
        max_update: int,
        base_lr: float,
        final_lr: float,
        warmup_steps: int,
        warmup_begin_lr: float,
        warmup_mode: WarmupMode,
    ) -> None:
        super().__init__(base_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        require(isinstance(max_update, int), f"max_update is an int, not {max_update!r}")
        if max_update < 1:
            raise ValueError(f"max_update is at least 1, not {max_update}")
        #: Where the decay begins, also where ``base_lr`` is set later.
        self.base_lr_orig = base_lr
        self.max_update = max_update
        self.final_lr = final_lr
        self.max_steps = max_update - warmup_steps

    def _decayed(self, num_update: int) -> float:
        if self.max_steps <= 0:  # there is nothing after the warmup
            return self.base_lr
        return self._after_warmup(min(num_update, self.max_update) - self.warmup_steps)

    def _after_warmup(self, updates: int) -> float:
        raise NotImplementedError


class PolyScheduler(_DecayToTheEnd):
    """Decay by a power: ``final_lr + (base_lr - final_lr) * (1 - n / max_n)**pwr``, where ``n`` counts the updates after the warmup.

    Args:
        max_update: The updates after which the rate is ``final_lr`` and stays so.
        base_lr: The rate that it begins with.
        pwr: The power.
        final_lr: The rate at the end.
        warmup_steps, warmup_begin_lr, warmup_mode: See :class:`LRScheduler`.

    Raises:
        AssertionError, ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        pwr: float = 2,
        final_lr: float = 0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: WarmupMode = "linear",
    ) -> None:
        super().__init__(max_update, base_lr, final_lr, warmup_steps, warmup_begin_lr, warmup_mode)
        self.power = pwr

    def _after_warmup(self, updates: int) -> float:
        left: float = pow(1 - float(updates) / float(self.max_steps), self.power)
        return self.final_lr + (self.base_lr_orig - self.final_lr) * left


class CosineScheduler(_DecayToTheEnd):
    """Decay by a cosine: ``final_lr + (base_lr - final_lr) * (1 + cos(pi * n / max_n)) / 2``, where ``n`` counts the updates after the warmup.

    Args:
        max_update: The updates after which the rate is ``final_lr`` and stays so.
        base_lr: The rate that it begins with.
        final_lr: The rate at the end.
        warmup_steps, warmup_begin_lr, warmup_mode: See :class:`LRScheduler`.

    Raises:
        AssertionError, ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        max_update: int,
        base_lr: float = 0.01,
        final_lr: float = 0,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: WarmupMode = "linear",
    ) -> None:
        super().__init__(max_update, base_lr, final_lr, warmup_steps, warmup_begin_lr, warmup_mode)

    def _after_warmup(self, updates: int) -> float:
        return (
            self.final_lr
            + (self.base_lr_orig - self.final_lr) * (1 + math.cos(math.pi * updates / self.max_steps)) / 2
        )


def _check_factor(factor: float) -> None:
    if factor > 1:
        raise ValueError(f"factor is at most 1, so that the learning rate falls, not {factor}")


# -- as numbers -------------------------------------------------------------------------------------------------------

KINDS: dict[str, type[LRScheduler]] = {
    kind.__name__: kind for kind in (FactorScheduler, MultiFactorScheduler, PolyScheduler, CosineScheduler)
}
"""The schedulers that travel as numbers, by the names that MXNet's have, too."""


def specified(scheduler: Any) -> ScheduleSpec | None:
    """Return a scheduler as name and numbers, as it is now; ``None`` if it is of a class of the program's own, or has other attributes."""
    name = type(scheduler).__name__
    if KINDS.get(name) is not type(scheduler):
        return None
    attributes = {
        attribute: value.item() if isinstance(value, np.generic) else value
        for attribute, value in vars(scheduler).items()
    }
    return ScheduleSpec(name, attributes) if all(map(_travels, attributes.values())) else None


def _travels(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, int) for item in value)
    return isinstance(value, int | float | str)


def _sample(name: str) -> LRScheduler:
    """Return a new scheduler of :data:`KINDS`, with any numbers."""
    kind: Any = KINDS[name]
    scheduler: LRScheduler = kind([1] if kind is MultiFactorScheduler else 1)
    return scheduler


def restored(name: str, attributes: Mapping[str, Any]) -> LRScheduler:
    """Return a scheduler of :data:`KINDS` with the attributes of another one of this name, which may be MXNet's.

    Raises:
        KVStoreError: There is no scheduler of this name, or the attributes make none.
    """
    if name not in KINDS:
        raise KVStoreError(f"there is no scheduler {name!r} of the learning rate here")
    require_like(attributes, _sample(name), f"a scheduler {name} with these settings")
    steps = attributes.get("step", 1)
    # 0 would let FactorScheduler count without end.
    if not isinstance(steps, list) and not (isinstance(steps, int) and steps >= 1):
        raise KVStoreError(f"a scheduler {name} has step={steps!r}: it is an int from 1 on")
    scheduler = KINDS[name].__new__(KINDS[name])
    for attribute, value in attributes.items():
        setattr(scheduler, attribute, list(value) if isinstance(value, list) else value)
    return scheduler
