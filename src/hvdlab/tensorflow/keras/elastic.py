"""Elastic training with ``model.fit``."""

from __future__ import annotations

from typing import Any

from hvdlab.tensorflow.elastic import TensorFlowKerasState, run
from hvdlab.tensorflow.keras.base import Callback

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(TensorFlowKerasState):
    """The state of a training with Keras; see :class:`~hvdlab.tensorflow.elastic.TensorFlowKerasState`.

    Args:
        model: A model.
        optimizer: Its optimizer, if it was not compiled into the model.
        kwargs: Values such as ``batch=0`` and ``epoch=0``, which become attributes.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


class CommitStateCallback(Callback):
    """Commits a state at the end of every few batches, and of each epoch.

    Args:
        state: The state.
        batches_per_commit: How many batches.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.state.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.commit()


class UpdateBatchStateCallback(Callback):
    """Keeps the number of the batch in ``state.batch``, which is 0 again at the end of an epoch.

    If ``fit`` has ``steps_per_epoch``, the first epoch after a reset is shortened by the batches that were processed before.

    Args:
        state: The state, with an attribute ``batch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        steps = (self.params or {}).get("steps")
        if steps:
            if self.steps_per_epoch is None:
                self.steps_per_epoch = steps
            self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(Callback):
    """Keeps the number of the epoch in ``state.epoch``, counted from the beginning of the whole training.

    Args:
        state: The state, with an attribute ``epoch``.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self.initial_epoch + epoch + 1
