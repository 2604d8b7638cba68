"""What ``model.fit`` tells as metrics, without a line of the user's: its own metrics, and the time of its steps."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from hvdlab.collectives import context
from hvdlab.tensorflow.keras.base import Callback

if TYPE_CHECKING:
    from hvdlab.collectives.metrics.steps import StepMeter

_OF_VALIDATION = "val_"


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
        self._meter.step(max(1, ended - self._batches))
        self._batches = ended
        self._record(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._record({name: value for name, value in (logs or {}).items() if name.startswith(_OF_VALIDATION)})

    def _record(self, logs: Any) -> None:
        if not logs or not context.is_initialized():
            return
        engine = context.engine()
        for name, value in logs.items():
            if isinstance(value, (int, float)):  # what Keras makes of scalars
                engine.metric(name, float(value), self._meter.count)


def record_fits(package: Any) -> None:
    """Have every ``fit`` of a model with a distributed optimizer recorded; ``package`` is Keras 3 or Keras 2.

    ``fit`` makes its list of callbacks by this class, and looks then at which methods they have. With one for batches it calls all
    of them on the thread that trains, where the steps are measured.
    """
    made: Any = package.callbacks.CallbackList
    if hasattr(made.__init__, "hvdlab"):
        return
    original = made.__init__

    @functools.wraps(original)
    def initialize(self: Any, callbacks: Any = None, *args: Any, **kwargs: Any) -> None:
        meter = _meter_of(kwargs.get("model"))
        if meter is not None and "epochs" in kwargs:  # not an evaluation
            given = (
                list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks] if callbacks else []
            )
            # The first one, since others may change the logs.
            callbacks = [RecordFit(meter), *given]
        original(self, callbacks, *args, **kwargs)

    initialize.hvdlab = True  # type: ignore[attr-defined]
    made.__init__ = initialize


def _meter_of(model: Any) -> StepMeter | None:
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of loss scaling
    meter: StepMeter | None = getattr(inner, "hvdlab_meter", None)
    return meter
