"""``hvd.watch()``: records metrics of a model's training, without a line in the training loop."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from hvdlab.bindings.training_watch import TrainingWatch, check_every, record
from hvdlab.collectives import context
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.metrics import names
from hvdlab.torch.late_values import LateValues
from hvdlab.torch.steps import meter_of

_ATTRIBUTE = "_hvdlab_watch"
_HALF = (torch.float16, torch.bfloat16)


class Scaler(Protocol):
    """The part of ``torch.amp.GradScaler`` that is used here."""

    def get_scale(self) -> float: ...


class Watch(TrainingWatch):
    """What :func:`watch` returns. Recording ends with :meth:`close`, or when the optimizer is watched anew."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        batch_size: float | None,
        scaler: Scaler | None,
        every: int,
    ) -> None:
        super().__init__(model, meter_of(optimizer), batch_size, every)
        self._optimizer = optimizer
        self._scaler = scaler
        self._meter.batch_size = batch_size
        self._late = LateValues(record)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def _due(self, step: int) -> bool:
        return self._every > 0 and step % self._every == 0 and context.is_initialized()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Any) -> None:
        step = self._meter.count + 1
        if not self._due(step):
            return
        now = time.monotonic_ns()
        if self._scaler is not None:
            record(names.LOSS_SCALE, self._scaler.get_scale(), step, now)
        if not _closure(args, kwargs):
            self._norm(optimizer, step, now)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Any) -> None:
        step, now = self._meter.count, time.monotonic_ns()  # the meter's hook ran before this one
        self._late.take()
        if context.is_initialized():
            for name, rate in learning_rates(optimizer):
                record(name, rate, step, now)
        if self._due(step) and _closure(args, kwargs):  # gradients come from the closure
            self._norm(optimizer, step, now)

    def _norm(self, optimizer: torch.optim.Optimizer, step: int, now: int) -> None:
        norm = gradient_norm(self._model.parameters())
        if norm is None:
            return
        # A GradScaler sets this attribute on a fused optimizer, which divides by it itself.
        scale = getattr(optimizer, "grad_scale", None)
        self._late.put(names.GRADIENT_NORM, norm if scale is None else norm / scale, step, now)

    def close(self) -> None:
        """Record no more learning rates, norms of gradients and loss scales. Idempotent.

        The optimizer's step times are still recorded.
        """
        for hook in self._hooks:
            hook.remove()
        self._late.finish()
        vars(self._optimizer).pop(_ATTRIBUTE, None)


def watch(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    batch_size: float | None = None,
    scaler: Scaler | None = None,
    every: int = 10,
) -> Watch:
    """Record metrics of the training on this rank: step time, learning rate, norm of the gradients.

    ``docs/reference/metrics.md`` has the names and what each costs. Calling it again for the same optimizer replaces the earlier
    watch, so a cell may be run twice.

    Args:
        model: The model whose gradients are measured.
        optimizer: The optimizer whose steps are counted, distributed or not.
        batch_size: Samples that this rank trains with in a step, for samples per second; ``None`` if that is not known.
        scaler: The ``torch.amp.GradScaler``, for the loss scale; ``None`` if there is none.
        every: After how many steps the norm of the gradients and the loss scale are recorded; 0 for never.

    Returns:
        The watch, whose ``batch_size`` and ``step`` may be set later, and which ``close()`` ends; it can be used as a context
        manager.

    Raises:
        InvalidRequestError: An argument has the wrong type, ``every`` is negative, or ``batch_size`` is not positive and finite.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidRequestError(f"hvd.watch() takes a torch.nn.Module, not a {type(model).__name__}.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidRequestError(f"hvd.watch() takes a torch optimizer, not a {type(optimizer).__name__}.")
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise InvalidRequestError(f"scaler= is a torch.amp.GradScaler, not a {type(scaler).__name__}.")
    check_every(every)
    before: Watch | None = vars(optimizer).get(_ATTRIBUTE)
    if before is not None:
        before.close()
    made = Watch(model, optimizer, batch_size, scaler, every)
    vars(optimizer)[_ATTRIBUTE] = made
    return made


@torch.no_grad()
def gradient_norm(parameters: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """The 2-norm of all gradients together, as a tensor with one element; ``None`` if there are none."""
    norms = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
        wide = torch.float32 if gradient.dtype in _HALF else None  # the squares of float16 would overflow
        norms.append(torch.linalg.vector_norm(gradient, dtype=wide))
    if not norms:
        return None
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total


def learning_rates(optimizer: torch.optim.Optimizer) -> list[tuple[str, float]]:
    """Name and value of each learning rate: a single one if all parameter groups have the same."""
    groups = optimizer.param_groups
    rates = [float(group["lr"]) for group in groups if "lr" in group]
    if len(rates) == len(groups) and len(set(rates)) > 1:
        labels = [str(group.get("name", number)) for number, group in enumerate(groups)]
        return [(f"{names.LEARNING_RATE}/{label}", rate) for label, rate in zip(labels, rates, strict=True)]
    return [(names.LEARNING_RATE, rate) for rate in rates[:1]]


def _closure(args: Sequence[Any], kwargs: Any) -> bool:
    """Whether a closure was given to the step; the first argument in ``args`` is the optimizer itself."""
    return (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
