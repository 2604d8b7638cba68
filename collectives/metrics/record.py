"""``metric()``: the function with which users record a number."""

from __future__ import annotations

import operator
from typing import Any, SupportsFloat, SupportsIndex

from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError

_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


def metric(name: str, value: SupportsFloat, step: SupportsIndex | None = None) -> None:
    """Record a number that you want to see over time: a loss, an accuracy, a temperature.

    Any rank may call it, from any thread, at any time; ranks need not agree. It takes about a microsecond and
    nothing waits for it. It is shown with the metrics of all ranks, with the rank and the moment of this call.

    Args:
        name: What it is, ``loss`` or ``train/accuracy``; at most 1,024 bytes of it are kept. Names that begin with
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
        step = _whole(name, step)
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


def _whole(name: object, step: Any) -> int:
    number = operator.index(step) if hasattr(step, "__index__") else None
    if number is None or not _LEAST <= number <= _MOST:
        raise InvalidRequestError(
            f"hvd.metric({name!r}): step= is a whole number of at most 64 bits, not {step!r} ({type(step).__name__})."
        )
    return number
