"""Elastic training with ``model.fit``; see :mod:`hvdlab.tensorflow.keras.elastic`."""

from __future__ import annotations

from hvdlab.tensorflow.keras.elastic import (
    CommitStateCallback,
    KerasState,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
    run,
)

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]
