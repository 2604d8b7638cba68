"""Metrics that the program of a rank reports: ``metric()``, the times of training steps, and ``export()``."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat, SupportsIndex

from hvdlab.collectives import context
from hvdlab.collectives.engine.telemetry import RankExport
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.metrics.export import Exporter, checked, patterns
from hvdlab.collectives.metrics.sampler import SAMPLES_PER_SECOND, STEP_TIME

_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


def metric(name: str, value: SupportsFloat, step: SupportsIndex | None = None) -> None:
    """Record a number to show over time: a loss, an accuracy, a temperature.

    Any rank may call it, from any thread, at any time; ranks need not agree. It costs about a microsecond and
    nothing waits for it. It is shown with the metrics of all ranks, with the rank and the moment of this call.

    Args:
        name: Its name, such as ``loss`` or ``train/accuracy``; at most 1,024 bytes of it are kept. Names that begin with
            ``hvdlab/`` are those of hvdlab's own metrics.
        value: A number, or a tensor or an array with one element. (One on a GPU is waited for.) NaN and infinities
            are kept as such.
        step: The number of the training step, if it belongs to one.

    Raises:
        NotInitializedError: ``hvd.init()`` was not called.
        InvalidRequestError: ``name`` is not a text or empty, ``value`` is not one number, or ``step`` not a whole one
            that fits 64 bits.
    """
    engine = context.engine("hvd.metric()")
    if type(value) is not float:
        value = _number(name, value)
    if step is not None and (type(step) is not int or not _LEAST <= step <= _MOST):
        step = _whole_number(name, step)
    if not isinstance(name, str) or not name:
        raise InvalidRequestError(f"hvd.metric() needs a name, such as 'loss', not {name!r}.")
    engine.metric(name, value, step)


def _number(name: object, value: Any) -> float:
    item = getattr(value, "item", None)  # of tensors and arrays: float() warns of gradients and dimensions
    try:
        return float(value if item is None else item())
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        shape = getattr(value, "shape", None)
        what = type(value).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")
        raise InvalidRequestError(
            f"hvd.metric({name!r}) takes one number, or a tensor with one element, not a {what}: {error}"
        ) from None


def _whole_number(name: object, step: Any) -> int:
    number = operator.index(step) if hasattr(step, "__index__") else None
    if number is None or not _LEAST <= number <= _MOST:
        raise InvalidRequestError(
            f"hvd.metric({name!r}): step= is a whole number of at most 64 bits, not {step!r} ({type(step).__name__})."
        )
    return number


class StepMeter:
    """Meter of the time from the end of each step to the end of the next.

    A step that ended in another cell or another world than the next does not count: between them the user was thinking.

    Attributes:
        count: Steps so far; set it to go on where an earlier training ended.
    """

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.count = 0
        self._now_ns = now_ns
        self._batch_size: float | None = None
        self._before: tuple[int, object] | None = None

    @property
    def batch_size(self) -> float | None:
        """Return the number of samples that this rank trains with in a step; ``None`` if that is not known."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, samples: float | None) -> None:
        if samples is not None and not 0 < samples < float("inf"):
            raise InvalidRequestError(f"batch_size= is the number of samples in a step, not {samples!r}.")
        self._batch_size = samples

    def pause(self) -> None:
        """Exclude the time from now until the end of the next step: it does not count as the time of a step."""
        self._before = None

    def step(self, steps: int = 1) -> None:
        """Record that a step has ended now; or several whose ends can't be distinguished: then each counts as its part of the time."""
        now = self._now_ns()
        self.count += steps
        if not context.is_initialized():
            self._before = None
            return
        engine = context.engine()
        where = (id(engine), engine.cells_begun)
        if self._before is not None and self._before[1] == where:
            seconds = max(now - self._before[0], 1) / 1e9 / steps
            engine.metric(STEP_TIME, seconds, self.count, now)
            if self._batch_size is not None:
                engine.metric(SAMPLES_PER_SECOND, self._batch_size / seconds, self.count, now)
        self._before = now, where


def export(exporter: Exporter, names: str | Sequence[str] = "*", *, all_ranks: bool = False) -> RankExport:
    """Hand metrics to a tracker from now on: those of ``hvd.metric()``, and hvdlab's own.

    They reach it a moment after they were recorded, on a thread of its own: a tracker that is slow or away does not hold up the
    training. Once 100,000 points wait, the oldest are dropped, and counted. Exporting to the same place again replaces the
    export before, so a cell may be run twice.

    Args:
        exporter: One of :mod:`hvdlab.exporters`, or any object with ``write(points)`` and ``close()``, see
            :class:`hvdlab.collectives.metrics.export.Exporter`.
        names: Patterns of the metrics to export, such as ``["loss*", "hvdlab/step_time"]``.
        all_ranks: Also hand over the other ranks' metrics. Then call it on one rank.

    Returns:
        The export, with ``exported``, ``dropped`` and ``failed`` counts. ``close()`` ends it, and so does ``hvd.shutdown()``
        or the end of the program.

    Raises:
        NotInitializedError: ``hvd.init()`` was not called.
        InvalidRequestError: ``exporter`` lacks one of the methods.
    """
    engine = context.engine("hvd.export()")
    checked(exporter)
    return engine.exports.add(exporter, patterns(names), all_ranks)
