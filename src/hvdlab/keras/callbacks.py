"""Callbacks of ``model.fit`` for distributed training; see :mod:`hvdlab.tensorflow.keras.callbacks`.

Example:
    >>> from hvdlab.keras.callbacks import LearningRateWarmupCallback
    >>> warmup = LearningRateWarmupCallback(initial_lr=0.4, warmup_epochs=3)  # for model.fit(callbacks=[warmup])
    >>> warmup.initial_lr
    0.4
"""

from __future__ import annotations

from hvdlab.tensorflow.keras import callbacks
from hvdlab.tensorflow.keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BestModelCheckpoint(callbacks.BestModelCheckpoint):
    """A ``ModelCheckpoint`` that keeps the best model; ``filepath`` may be assigned after it was made.

    Args:
        monitor: The metric by which models are compared.
        verbose: 0, or 1 to print a line when a model is saved.
        mode: ``auto``, ``min`` or ``max``.
        save_freq: ``"epoch"``, or a number of batches.

    Raises:
        InvalidRequestError: At the end of an epoch, if ``filepath`` was not assigned.
    """

    def __init__(
        self, monitor: str = "val_loss", verbose: int = 0, mode: str = "auto", save_freq: str | int = "epoch"
    ) -> None:
        super().__init__(monitor, verbose, False, mode, save_freq)
