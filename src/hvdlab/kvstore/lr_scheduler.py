"""Schedulers of the learning rate for optimizers of key-value stores, equal to MXNet's to the bit; they reach servers as numbers.

Example:
    >>> from hvdlab.kvstore.lr_scheduler import FactorScheduler
    >>> schedule = FactorScheduler(step=10, factor=0.5, base_lr=1.0)
    >>> schedule(5), schedule(15)
    (1.0, 0.5)
"""

from __future__ import annotations

from hvdlab.collectives.kvstore.lr_schedulers import (
    CosineScheduler,
    FactorScheduler,
    LRScheduler,
    MultiFactorScheduler,
    PolyScheduler,
)

__all__ = ["CosineScheduler", "FactorScheduler", "LRScheduler", "MultiFactorScheduler", "PolyScheduler"]
