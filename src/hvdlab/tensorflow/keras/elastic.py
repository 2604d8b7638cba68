"""Elastic training with ``model.fit``."""

from __future__ import annotations

from typing import Any

from hvdlab.tensorflow.elastic import TensorFlowKerasState, run
from hvdlab.tensorflow.keras.callbacks import Callback

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(TensorFlowKerasState):
    """The state of a training with Keras: the variables of a model and of its optimizer.

    Args:
        model: A model of Keras 3 or of Keras 2 that has been built.
        optimizer: Its optimizer; by default the one that the model was compiled with.
        kwargs: Values such as ``batch=0`` and ``epoch=0``, which become attributes.

    Raises:
        ValueError: The model has no variables yet.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


class CommitStateCallback(Callback):
    """Callback that commits a state after every ``batches_per_commit`` batches, and at the end of each epoch.

    Args:
        state: The state.
        batches_per_commit: How many batches lie between two commits.
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
    """Callback that sets ``state.batch`` to the number of each batch that has ended, and to 0 at the end of an epoch.

    If ``fit`` has ``steps_per_epoch``, it shortens the first epoch after a reset by the batches that were processed before.

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
    """Callback that sets ``state.epoch`` to the number of epochs that have ended since the beginning of the whole training.

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
