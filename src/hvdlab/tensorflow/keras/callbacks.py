"""Callbacks of ``model.fit`` for distributed training; they work with models of Keras 3 and of Keras 2."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

from hvdlab.bindings.arguments import Average
from hvdlab.collectives import basics
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.horovod.common.util import is_version_greater_equal_than
from hvdlab.tensorflow.functions import broadcast_variables, optimizer_variables, vars_to_refs
from hvdlab.tensorflow.functions import plain_variable as _plain
from hvdlab.tensorflow.installed import tf
from hvdlab.tensorflow.mpi_ops import grouped_allreduce

_Callback: Any = tf.keras.callbacks.Callback


class Callback(_Callback):  # type: ignore[misc,unused-ignore]
    """A callback of Keras 3 with the attributes and methods that Keras 2 expects of its own callbacks."""

    _supports_tf_logs = False
    _chief_worker_only: bool | None = None

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    def _implements_predict_batch_hooks(self) -> bool:
        return False


__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "is_version_greater_equal_than",
]

_Checkpoint: Any = tf.keras.callbacks.ModelCheckpoint


class BroadcastGlobalVariablesCallback(Callback):
    """Callback that assigns ``root_rank``'s values to the model's and the optimizer's variables on every rank, after the first batch.

    Not before, since the optimizer makes its variables in the first step.

    Args:
        root_rank: The rank whose values all get.
        device: The device of the operations; by default that of the variables.
        local_variables: Variables that each rank keeps as they are.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local = {vars_to_refs(_plain(each)) for each in local_variables or ()}

    def register_local_var(self, var: Any) -> None:
        """Let each rank keep a variable as it is.

        Args:
            var: The variable.
        """
        self._local.add(vars_to_refs(_plain(var)))

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.broadcast_done:
            return
        with tf.device(self.device or None):
            chosen = [_plain(each) for each in _variables(self.model)]
            broadcast_variables([v for v in chosen if vars_to_refs(v) not in self._local], self.root_rank)
        self.broadcast_done = True


def _variables(model: Any) -> list[Any]:
    """Return the variables of a model and of its optimizer, each once."""
    found = [*model.variables, *optimizer_variables(getattr(model, "optimizer", None))]
    return list({id(_plain(each)): each for each in found if hasattr(_plain(each), "assign")}.values())


class MetricAverageCallback(Callback):
    """Callback that averages the metrics of an epoch over all ranks, for the callbacks behind it in the list, such as ``ReduceLROnPlateau``.

    Args:
        device: The device of the reduction; by default TensorFlow chooses it.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not logs:
            return
        # In one order on all ranks: the name and the order of the group depend on it.
        names = sorted(name for name, value in logs.items() if _is_number(value))
        with tf.device(self.device or None):
            averages = grouped_allreduce(
                [tf.constant(float(logs[name]), tf.float64) for name in names],
                op=Average,
                name=f"MetricAverageCallback.{','.join(names)}",
            )
        for name, average in zip(names, averages, strict=True):
            logs[name] = (
                type(logs[name])(average.numpy()) if isinstance(logs[name], float) else float(average)
            )


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


class LearningRateScheduleCallback(Callback):
    """Callback that sets the learning rate to ``initial_lr * multiplier`` between two epochs.

    Args:
        initial_lr: The learning rate at the start of the training.
        multiplier: A function ``f(epoch)``. With ``staircase`` it is called at the beginning of each epoch with its number, without
            it at the beginning of each batch with ``epoch + batch / steps_per_epoch``. Or a number ``m``, for exponential decay: it
            stands for ``m ** (epoch - start_epoch)``, as in Horovod since 0.23. For a constant factor give ``lambda epoch: m``.
        start_epoch: The first epoch whose rate it sets.
        end_epoch: The first epoch whose rate it leaves alone again; by default there is none.
        staircase: Whether the rate stays the same during an epoch.
        momentum_correction: Whether an optimizer's momentum is scaled during the batch in which the rate changes.
        steps_per_epoch: Batches of an epoch; by default as many as ``fit`` reports.

    Raises:
        InvalidRequestError: ``initial_lr`` is ``None``; when training begins, ``steps_per_epoch`` is needed and not known; or, at
            the first batch, the optimizer's rate follows a schedule of its own.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise InvalidRequestError(
                "initial_lr= is needed: the learning rate at the start of the training."
            )
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        #: The optimizer's momentum while a corrected one is in its place; ``None`` otherwise.
        self.restore_momentum: Any = None
        self.current_epoch: int | None = None
        self.multiplier = (
            multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        )

    def on_train_begin(self, logs: Any = None) -> None:
        """Find out how many batches an epoch has. Raises ``InvalidRequestError`` if Keras does not know it."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise InvalidRequestError(
                    "The number of batches in an epoch is not known; give steps_per_epoch= to "
                    f"{type(self).__name__}."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        # A batch that was interrupted has had no end: its corrected momentum must not pass for the optimizer's own.
        self._restore_momentum()
        epoch = self.current_epoch or 0
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if self.staircase and batch == 0:
            self._adjust(epoch)
        elif not self.staircase:
            self._adjust(epoch + float(batch) / (self.steps_per_epoch or 1))

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self._restore_momentum()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = learning_rate(self._optimizer)

    @property
    def _optimizer(self) -> Any:
        optimizer = self.model.optimizer
        return getattr(optimizer, "inner_optimizer", optimizer)

    def _restore_momentum(self) -> None:
        if self.restore_momentum is not None:
            _set(self._optimizer, "momentum", self.restore_momentum)
            self.restore_momentum = None

    def _adjust(self, epoch: float) -> None:
        optimizer = self._optimizer
        before = learning_rate(optimizer)
        set_learning_rate(optimizer, self.initial_lr * self.multiplier(epoch))
        # As the optimizer has it: rounding alone is no change.
        rate = learning_rate(optimizer)
        momentum = getattr(optimizer, "momentum", None)
        if not (momentum and self.momentum_correction and before) or rate == before:
            return
        if isinstance(momentum, float) and not self._steps_read_attributes(optimizer):
            if not hasattr(optimizer, "_hvdlab_momentum_warned"):
                object.__setattr__(optimizer, "_hvdlab_momentum_warned", True)
                warnings.warn(
                    "momentum_correction= does nothing: this optimizer's momentum is a number that its "
                    "compiled step has taken over.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return
        # arXiv 1706.02677, section 2.1: the optimizer has computed its velocity with the former rate.
        # Before the change: an interrupt between the two restores a momentum that has not changed.
        self.restore_momentum = float(momentum)
        _set(optimizer, "momentum", float(momentum) * rate / before)

    def _steps_read_attributes(self, optimizer: Any) -> bool:
        """Return whether each step reads the optimizer's numbers, as only steps do that are not compiled."""
        eager = tf.config.functions_run_eagerly() or bool(getattr(self.model, "run_eagerly", False))
        return eager and not getattr(optimizer, "jit_compile", False)


def learning_rate(optimizer: Any) -> float:
    """Return the present learning rate of an optimizer."""
    return float(tf.convert_to_tensor(_plain(optimizer.learning_rate)))


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Change an optimizer's learning rate; raises ``InvalidRequestError`` if the rate follows a schedule of its own."""
    try:
        _set(optimizer, "learning_rate", rate)
    except TypeError:
        raise InvalidRequestError(
            "This optimizer's learning rate follows a schedule of its own; give it a number to use this callback."
        ) from None


def _set(optimizer: Any, name: str, value: float) -> None:
    current = getattr(optimizer, name)
    if hasattr(current, "assign"):
        current.assign(value)
    else:
        setattr(optimizer, name, value)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Callback that raises the learning rate from ``initial_lr / size`` to ``initial_lr`` over some epochs, a little with each batch.

    After ``e`` epochs of ``w`` it is ``initial_lr / size * (e * (size - 1) / w + 1)`` (arXiv 1706.02677, section 2.2).

    Args:
        initial_lr: The learning rate at the end of the warmup.
        warmup_epochs: Duration of the warmup, in epochs.
        momentum_correction: Whether an optimizer's momentum is scaled during the batch in which the rate changes.
        steps_per_epoch: Batches of an epoch; by default as many as ``fit`` reports.
        verbose: 1 to have rank 0 print a line when the warmup ends.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # A batch gets the rate for its end, so that the last batch of an epoch gets the rate for the start of the next one.
            reached = epoch + 1.0 / (self.steps_per_epoch or 1)
            return 1.0 / basics.size() * (reached * (basics.size() - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=math.ceil(warmup_epochs),
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if (
            self.end_epoch is not None
            and epoch == self.end_epoch - 1
            and self.verbose > 0
            and basics.rank() == 0
        ):
            print(
                f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {learning_rate(self._optimizer):g}."
            )


class BestModelCheckpoint(_Checkpoint):  # type: ignore[misc,unused-ignore]
    """A ``ModelCheckpoint`` that keeps the best model; ``filepath`` may be assigned after it was made.

    Args:
        monitor: The metric by which models are compared.
        verbose: 0, or 1 to print a line when a model is saved.
        save_weights_only: Whether only the weights are saved.
        mode: ``auto``, ``min`` or ``max``.
        save_freq: ``"epoch"``, or a number of batches.

    Raises:
        InvalidRequestError: At the end of an epoch, if ``filepath`` was not assigned.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        ending = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath=f"best{ending}",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: Any = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Save the model if it is the best. Raises ``InvalidRequestError`` if ``filepath`` was not assigned."""
        if self.filepath is None:
            raise InvalidRequestError("Assign the file to BestModelCheckpoint's `filepath` before training.")
        super().on_epoch_end(epoch, logs)
