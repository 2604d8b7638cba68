"""Schedulers of the learning rate for optimizers of key-value stores, equal to MXNet's to the bit; they reach servers as numbers."""

from __future__ import annotations

from hvdlab.collectives.kvstore.lr_schedulers import (
    CosineScheduler,
    FactorScheduler,
    LRScheduler,
    MultiFactorScheduler,
    PolyScheduler,
)

__all__ = ["CosineScheduler", "FactorScheduler", "LRScheduler", "MultiFactorScheduler", "PolyScheduler"]
