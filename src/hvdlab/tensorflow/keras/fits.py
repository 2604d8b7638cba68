"""What ``model.fit`` tells as metrics, without a line of the user's: its own metrics, the learning rate, the time of its steps, samples/s."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from hvdlab.collectives import context
from hvdlab.collectives.metrics import names
from hvdlab.tensorflow.functions import plain_variable
from hvdlab.tensorflow.installed import tf
from hvdlab.tensorflow.keras.base import Callback
from hvdlab.tensorflow.keras.callbacks import learning_rate

if TYPE_CHECKING:
    from hvdlab.collectives.metrics.steps import StepMeter
    from hvdlab.tensorflow.keras.watch import Watch

ATTRIBUTE_OF_WATCH = "_hvdlab_divergence"
"""Where a model has what :func:`hvdlab.tensorflow.watch_divergence` returned for it."""

_OF_VALIDATION = "val_"
_KERAS_BATCH_SIZE = 32
"""What ``fit`` divides arrays into, if it is not told."""


class RecordFit(Callback):
    """Records what Keras has computed anyway, as this rank's: the other ranks' metrics are not averaged in.

    Keras' metrics of training are means since the beginning of the epoch.
    """

    def __init__(self, meter: StepMeter) -> None:
        super().__init__()
        self._meter = meter
        #: Of this epoch.
        self._batches = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._batches = 0
        self._meter.pause()  # a validation, a checkpoint, the compilation of the first step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        ended = batch + 1  # further than the last one by as many as are executed together
        known = (self.params or {}).get("steps")
        if known:
            ended = min(ended, known)
        steps, self._batches = max(1, ended - self._batches), ended
        self._meter.step(steps)
        self._record(logs)
        rate = plain_variable(getattr(self._optimizer, "_learning_rate", None))
        if hasattr(rate, "assign") and context.is_initialized():
            context.engine().metric(names.LEARNING_RATE, float(rate.numpy()), self._meter.count)
        watch = _watch_of(self.model)
        if watch is not None:
            watch.counted(steps)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._record({name: value for name, value in (logs or {}).items() if name.startswith(_OF_VALIDATION)})
        rate = plain_variable(getattr(self._optimizer, "_learning_rate", None))
        if not hasattr(rate, "assign"):  # a schedule, which would be computed anew for each step
            self._record({names.LEARNING_RATE: learning_rate(self._optimizer)})

    @property
    def _optimizer(self) -> Any:
        return _without_scaling(self.model.optimizer)

    def _record(self, logs: Any) -> None:
        if not logs or not context.is_initialized():
            return
        engine = context.engine()
        for name, value in logs.items():
            if isinstance(value, (int, float)):  # what Keras makes of scalars
                engine.metric(name, float(value), self._meter.count)


class CompareModels(Callback):
    """Has a model that is watched compared with the other ranks' after its steps."""

    def __init__(self, watch: Any) -> None:
        super().__init__()
        self._watch = watch
        #: Of this epoch.
        self._batches = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._watch.step_ended(batch + 1 - self._batches)
        self._batches = batch + 1


def record_fits(package: Any) -> None:
    """Have every ``fit`` of a model recorded whose optimizer is distributed or watched; ``package`` is Keras 3 or Keras 2.

    Models that are watched are compared.

    ``fit`` makes its list of callbacks by this class, and looks then at which methods they have. With one for batches it calls all
    of them on the thread that trains, where the steps are measured.
    """
    made: Any = package.callbacks.CallbackList
    if hasattr(made.__init__, "hvdlab"):
        return
    original = made.__init__

    @functools.wraps(original)
    def initialize(self: Any, callbacks: Any = None, *args: Any, **kwargs: Any) -> None:
        model = kwargs.get("model")
        meter, watch = _meter_of(model), getattr(model, ATTRIBUTE_OF_WATCH, None)
        if (meter is not None or watch is not None) and "epochs" in kwargs:  # not an evaluation
            given = (
                list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks else []
            )
            # Others may change the logs, and broadcast the variables.
            first = [] if meter is None else [RecordFit(meter)]
            last = [] if watch is None else [CompareModels(watch)]
            callbacks = [*first, *given, *last]
        original(self, callbacks, *args, **kwargs)

    initialize.hvdlab = True  # type: ignore[attr-defined]
    made.__init__ = initialize
    package.Model.fit = _measuring_samples(package.Model.fit)


def _measuring_samples(original: Any) -> Any:
    """``fit`` that tells the meter how many samples a batch has, where that is known."""

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
    """Of what was given to ``fit`` without a number: arrays are divided by Keras, datasets are batched already."""
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


def _watch_of(model: Any) -> Watch | None:
    found: Watch | None = getattr(_without_scaling(getattr(model, "optimizer", None)), "hvdlab_watch", None)
    return found


def _without_scaling(optimizer: Any) -> Any:
    return getattr(optimizer, "inner_optimizer", optimizer)
