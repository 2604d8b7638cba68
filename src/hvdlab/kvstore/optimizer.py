"""Optimizers for key-value stores, equal to MXNet's to the bit."""

from __future__ import annotations

from hvdlab.collectives.kvstore.optimizers import (
    SGD,
    Adam,
    Optimizer,
    Test,
    Updater,
    create,
    get_updater,
    register,
)

__all__ = ["SGD", "Adam", "Optimizer", "Test", "Updater", "create", "get_updater", "register"]
