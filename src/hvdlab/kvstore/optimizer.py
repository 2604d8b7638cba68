"""Optimizers for key-value stores, equal to MXNet's to the bit."""

from __future__ import annotations

from hvdlab.collectives.kvstore.optimizers import (
    NAG,
    SGD,
    AdaGrad,
    Adam,
    Optimizer,
    RMSProp,
    Test,
    Updater,
    create,
    get_updater,
    register,
)

__all__ = [
    "NAG",
    "SGD",
    "AdaGrad",
    "Adam",
    "Optimizer",
    "RMSProp",
    "Test",
    "Updater",
    "create",
    "get_updater",
    "register",
]
