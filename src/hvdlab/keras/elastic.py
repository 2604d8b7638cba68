"""Elastic training with ``model.fit``; see :mod:`hvdlab.tensorflow.keras.elastic`.

Example:
    >>> import keras
    >>> import hvdlab.keras as hvd
    >>> hvd.init()  # on every rank; a process that is no rank becomes a world of one
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> state = hvd.elastic.KerasState(model, epoch=0)
    >>> state.epoch = 7
    >>> state.restore()  # as after a failure: back to the last commit
    >>> state.epoch
    0
    >>> hvd.shutdown()
"""

from __future__ import annotations

from hvdlab.tensorflow.keras.elastic import (
    CommitStateCallback,
    KerasState,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
    run,
)

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback", "run"]
