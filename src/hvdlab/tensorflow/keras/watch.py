"""``hvd.watch()`` for optimizers of Keras: records metrics of a training.

A watched optimizer computes the norm of its gradients when it applies them, within the function that Keras has traced for a step,
and leaves it in a variable. Another variable says whether the next step has to compute it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

from hvdlab.bindings.monitoring import TrainingWatch, check_every, record_metric
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.metrics import names
from hvdlab.collectives.metrics.steps import StepMeter
from hvdlab.tensorflow.functions import plain_variable
from hvdlab.tensorflow.installed import tf
from hvdlab.tensorflow.keras.callbacks import learning_rate
from hvdlab.tensorflow.keras.fits import record_fits
from hvdlab.tensorflow.keras.models import package_of
from hvdlab.tensorflow.keras.optimizers import (
    Distributed,
    is_keras_optimizer,
    loss_scale,
    package_of_optimizer,
    without_scaling,
)

_NOTHING = -1.0
"""The value of the norm's variable until a norm has been computed."""


class KerasWatch(TrainingWatch):
    """What :func:`watch` returns. Recording ends with :meth:`close`, or when the optimizer is watched anew."""

    def __init__(self, model: Any, optimizer: Any, batch_size: float | None, every: int) -> None:
        self._optimizer, self._inner = optimizer, without_scaling(optimizer)
        meter = getattr(self._inner, "hvdlab_meter", None) or StepMeter()
        super().__init__(model, meter, batch_size, every)
        if batch_size is not None:
            self._meter.batch_size = batch_size
        #: Whether the next step computes the norm, as in the variable ``_due``, which traced functions read.
        self._measuring = False
        with tf.init_scope(), tf.device("CPU:0"):
            self._due = tf.Variable(False, trainable=False, name="hvdlab_watch_due")
            self._norm = tf.Variable(_NOTHING, trainable=False, name="hvdlab_watch_norm")
        #: The loss scale before the next step; ``None`` without loss scaling.
        self._scale: float | None = None
        kind: Any = type(self._inner)
        self._plain_class = kind
        self._inner.__class__ = _watched_class(kind)
        for name, value in (("hvdlab_watch", self), ("hvdlab_meter", self._meter)):
            object.__setattr__(self._inner, name, value)  # past Keras, which would track them
        if hasattr(model, "train_function"):
            model.train_function = None  # so that Keras traces the step anew
        self._prepare(1)

    def _step_set(self) -> None:
        self._prepare(1)

    def step_ended(self, steps: int = 1) -> None:
        """Count a step, or several, that have ended in a loop of your own, and record metrics. ``fit`` does so itself."""
        self._meter.step(steps)
        rate = plain_variable(getattr(self._inner, "_learning_rate", None))
        if hasattr(rate, "assign") or self._measuring:  # a schedule would compute the rate at each step
            record_metric(names.LEARNING_RATE, learning_rate(self._inner), self.step, time.monotonic_ns())
        self.counted(steps)

    def counted(self, steps: int) -> None:
        """Record the norm of the last of ``steps`` steps that have ended together, and that the meter has counted already."""
        now = time.monotonic_ns()
        if self._measuring:
            norm = float(self._norm.numpy())
            if norm != _NOTHING:  # else loss scaling has skipped the step
                record_metric(names.GRADIENT_NORM, norm, self.step, now)
            if self._scale is not None:
                record_metric(names.LOSS_SCALE, self._scale, self.step, now)
        self._prepare(steps)

    def _prepare(self, steps: int) -> None:
        """Have the norm computed in the next steps if it is due in one of them; they are expected to be ``steps`` many."""
        self._measure(self._every > 0 and (self.step + steps) // self._every > self.step // self._every)

    def _measure(self, due: bool) -> None:
        if due != self._measuring:
            self._due.assign(due)
            self._measuring = due
        if due:
            self._norm.assign(_NOTHING)
            scale = loss_scale(self._optimizer)
            self._scale = None if scale is None else float(scale)

    def observe(self, gradients: Sequence[Any]) -> None:
        """Compute the norm of the optimizer's gradients if the step is due; in a graph, make the operations that do so."""
        dense = [
            each.values if isinstance(each, tf.IndexedSlices) else each
            for each in gradients
            if each is not None
        ]
        if not dense:
            return

        def measured() -> Any:
            return tf.identity(
                self._norm.assign(tf.linalg.global_norm([tf.cast(each, tf.float32) for each in dense]))
            )

        if tf.executing_eagerly():
            if self._measuring:
                measured()
        else:
            tf.cond(self._due, measured, lambda: tf.identity(self._norm))

    def close(self) -> None:
        """Record no more. Idempotent. ``fit`` still records learning rates and step times of a distributed optimizer."""
        if getattr(self._inner, "hvdlab_watch", None) is not self:
            return
        self._measure(False)
        self._inner.__class__ = self._plain_class
        object.__delattr__(self._inner, "hvdlab_watch")
        if not isinstance(self._inner, Distributed):
            object.__delattr__(self._inner, "hvdlab_meter")


class _Watched:
    """Methods in front of a watched optimizer's own class, but behind those of :class:`Distributed`: they see reduced gradients."""

    hvdlab_watch: KerasWatch | None = None

    def _hvdlab_observe(self, gradients: Sequence[Any]) -> None:
        if self.hvdlab_watch is not None:  # a clone of the optimizer has none
            self.hvdlab_watch.observe(gradients)


class _WatchedApply(_Watched):
    """A watched optimizer of Keras 3."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        plain: Any = super()
        self._hvdlab_observe(grads)
        return plain.apply(grads, trainable_variables)


class _WatchedApplyGradients(_Watched):
    """A watched optimizer of Keras 2."""

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        plain: Any = super()
        pairs = list(grads_and_vars)
        self._hvdlab_observe([gradient for gradient, _ in pairs])
        return plain.apply_gradients(pairs, *args, **kwargs)


@cache
def _watched_class(kind: Any) -> Any:
    if issubclass(kind, _Watched):
        return kind  # the class of a clone
    *distributing, plain = kind.__bases__ if issubclass(kind, Distributed) else (kind,)
    mixin = _WatchedApply if hasattr(plain, "apply") else _WatchedApplyGradients
    members = {"__doc__": kind.__doc__, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (*distributing, mixin, plain), members)


def watch(
    model: Any, optimizer: Any = None, *, batch_size: float | None = None, every: int = 10
) -> KerasWatch:
    """Record metrics of the training on this rank: step time, learning rate, norm of the gradients, loss scale.

    ``docs/reference/metrics.md`` has the names and what each costs. For a distributed optimizer ``fit`` records the first two without
    this call, too. ``fit`` counts its steps itself; in a loop of your own, call the watch's ``step_ended()`` after each step. A
    ``tf.function`` of your own must be traced after this call. Calling it again for the same optimizer replaces the earlier watch, so
    a cell may be run twice.

    Args:
        model: A model of Keras 3 or of Keras 2.
        optimizer: The optimizer whose steps are counted, distributed or not; by default the one that the model was compiled with.
        batch_size: Samples that this rank trains with in a step, for samples per second; by default ``fit``'s, if that is known.
        every: After how many steps the norm of the gradients and the loss scale are recorded; 0 for never.

    Returns:
        The watch, whose ``batch_size`` and ``step`` may be set later, and which ``close()`` ends; it can be used as a context
        manager.

    Raises:
        InvalidRequestError: An argument has the wrong type, the model has no optimizer, ``every`` is negative, or ``batch_size`` is
            not positive and finite.
    """
    if package_of(model) is None:
        raise InvalidRequestError(f"hvd.watch() takes a model of Keras, not a {type(model).__name__}.")
    chosen = getattr(model, "optimizer", None) if optimizer is None else optimizer
    if chosen is None:
        raise InvalidRequestError(
            "hvd.watch() finds no optimizer: compile the model before, or give optimizer=."
        )
    if not is_keras_optimizer(chosen):
        raise InvalidRequestError(f"hvd.watch() takes an optimizer of Keras, not a {type(chosen).__name__}.")
    check_every(every)
    StepMeter().batch_size = batch_size  # raises for a wrong one before anything is changed
    record_fits(sys.modules[package_of_optimizer(chosen)])
    before: KerasWatch | None = getattr(without_scaling(chosen), "hvdlab_watch", None)
    if before is not None:
        before.close()
    return KerasWatch(model, chosen, batch_size, every)
