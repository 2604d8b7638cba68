"""Hooks in ``model.fit``: metrics of its steps without a line in the user's code, and steps for the watches of its model.

The metrics are Keras' own, the learning rate, the step time, and samples per second.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

from hvdlab.bindings.monitoring import DIVERGENCE_WATCH, StepMeter
from hvdlab.collectives import context
from hvdlab.collectives.metrics.sampler import LEARNING_RATE
from hvdlab.tensorflow.functions import plain_variable
from hvdlab.tensorflow.installed import tf
from hvdlab.tensorflow.keras.callbacks import Callback, learning_rate

_OF_VALIDATION = "val_"
_KERAS_BATCH_SIZE = 32
"""The size of the batches into which ``fit`` divides arrays by default."""


class FitWatch(Protocol):
    """Watch of an optimizer, to which ``fit`` reports its steps.

    Attributes:
        knows_batch_size: Whether the user has set the batch size, which ``fit`` then leaves as it is.
    """

    knows_batch_size: bool

    def counted(self, steps: int) -> None:
        """Record metrics of the last of ``steps`` more steps, which the meter has counted."""


class RecordFit(Callback):
    """Callback that records the metrics that Keras has computed anyway. They are this rank's own, not averages over the ranks.

    Keras' metrics of training are means since the beginning of the epoch.

    Args:
        meter: Counts the optimizer's steps, and measures their time.
    """

    def __init__(self, meter: StepMeter) -> None:
        super().__init__()
        self._meter = meter
        #: Batches of this epoch that have ended.
        self._batches = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._batches = 0
        self._meter.pause()  # the time since the last step went into a validation, a checkpoint, or the first compilation

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # Keras calls this once for all batches that it executes together, with the number of the last one.
        ended = batch + 1
        known = (self.params or {}).get("steps")
        if known:
            ended = min(ended, known)
        steps, self._batches = max(1, ended - self._batches), ended
        self._meter.step(steps)
        self._record(logs)
        rate = plain_variable(getattr(self._optimizer, "_learning_rate", None))
        if hasattr(rate, "assign") and context.is_initialized():
            context.engine().metric(LEARNING_RATE, float(rate.numpy()), self._meter.count)
        watch = _watch_of(self.model)
        if watch is not None:
            watch.counted(steps)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._record({name: value for name, value in (logs or {}).items() if name.startswith(_OF_VALIDATION)})
        rate = plain_variable(getattr(self._optimizer, "_learning_rate", None))
        if not hasattr(rate, "assign"):  # a schedule: computing its rate after each step would take too long
            self._record({LEARNING_RATE: learning_rate(self._optimizer)})

    @property
    def _optimizer(self) -> Any:
        return _without_scaling(self.model.optimizer)

    def _record(self, logs: Any) -> None:
        if not logs or not context.is_initialized():
            return
        engine = context.engine()
        for name, value in logs.items():
            if isinstance(value, (int, float)):  # Keras' scalars
                engine.metric(name, float(value), self._meter.count)


class CompareModels(Callback):
    """Callback that reports the steps of ``fit`` to a model's divergence watch, which compares the ranks' models."""

    def __init__(self, watch: Any) -> None:
        super().__init__()
        self._watch = watch
        #: Batches of this epoch that have ended.
        self._batches = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._watch.step_ended(batch + 1 - self._batches)
        self._batches = batch + 1


def record_fits(package: Any) -> None:
    """Patch Keras so that ``fit`` records the steps of an optimizer that is distributed or watched, and compares watched models.

    ``fit`` makes its list of callbacks by ``CallbackList``, which inspects the methods that they have. If one has a method for
    batches, Keras calls all of them on the thread that trains, so that the time between the calls is that of the steps.

    Args:
        package: The module of Keras 3 or of Keras 2. Idempotent for each.
    """
    made: Any = package.callbacks.CallbackList
    if hasattr(made.__init__, "hvdlab"):
        return
    original = made.__init__

    @functools.wraps(original)
    def initialize(self: Any, callbacks: Any = None, *args: Any, **kwargs: Any) -> None:
        model = kwargs.get("model")
        meter, watch = _meter_of(model), getattr(model, DIVERGENCE_WATCH, None)
        if (meter is not None or watch is not None) and "epochs" in kwargs:  # not an evaluation
            given = (
                list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks else []
            )
            # RecordFit comes before the user's callbacks, which may change the logs; CompareModels after them, since one may
            # broadcast the variables.
            first = [] if meter is None else [RecordFit(meter)]
            last = [] if watch is None else [CompareModels(watch)]
            callbacks = [*first, *given, *last]
        original(self, callbacks, *args, **kwargs)

    initialize.hvdlab = True  # type: ignore[attr-defined]
    made.__init__ = initialize
    package.Model.fit = _measuring_samples(package.Model.fit)


def _measuring_samples(original: Any) -> Any:
    """Wrap ``fit`` so that it sets the meter's batch size, if that is known."""

    @functools.wraps(original)
    def fit(
        self: Any, x: Any = None, y: Any = None, batch_size: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        meter, watch = _meter_of(self), _watch_of(self)
        if meter is not None and not (watch is not None and watch.knows_batch_size):
            meter.batch_size = batch_size or _batch_size(x)
        return original(self, x, y, batch_size, *args, **kwargs)

    return fit


def _batch_size(x: Any) -> int | None:
    """Return the batch size of data that the user gave to ``fit`` without one: Keras' default for arrays, a dataset's own; otherwise ``None``."""
    if isinstance(x, tf.data.Dataset):
        while x is not None:
            size = getattr(x, "_batch_size", None)
            if size is not None:
                return int(size)
            x = getattr(x, "_input_dataset", None)
        return None
    flat = tf.nest.flatten(x)
    return _KERAS_BATCH_SIZE if flat and all(hasattr(each, "shape") for each in flat) else None


def _meter_of(model: Any) -> StepMeter | None:
    meter: StepMeter | None = getattr(
        _without_scaling(getattr(model, "optimizer", None)), "hvdlab_meter", None
    )
    return meter


def _watch_of(model: Any) -> FitWatch | None:
    found: FitWatch | None = getattr(
        _without_scaling(getattr(model, "optimizer", None)), "hvdlab_watch", None
    )
    return found


def _without_scaling(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)
