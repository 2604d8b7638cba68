"""Optimizers for key-value stores, equal to MXNet's to the bit.

Example:
    >>> import numpy as np
    >>> from hvdlab.kvstore import optimizer
    >>> sgd = optimizer.create("sgd", learning_rate=0.5)
    >>> weight = np.ones(2)
    >>> sgd.update("weight", weight, np.ones(2), sgd.create_state("weight", weight))
    >>> weight
    array([0.5, 0.5])
"""

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
