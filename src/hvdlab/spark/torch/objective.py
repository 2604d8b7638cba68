"""From batches of columns to a torch module's inputs, and from its outputs to the loss, for the estimators of torch and of Lightning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.spark.common.datamodule import Batch
from hvdlab.spark.common.plan import TrainingPlan


class Objective:
    """The inputs that a module gets and the outputs that it should give.

    Args:
        plan: Columns, shapes of labels and weights of losses.
        model: The module.
        losses: One for each label; called with output and label.
        input_shapes: For each feature the shape of a batch, with -1 for its rows.
        device: Where the module is.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        model: Any,
        losses: Sequence[Any],
        input_shapes: Sequence[Sequence[int]] | None,
        device: torch.device,
    ) -> None:
        self._plan, self._input_shapes, self._device = plan, input_shapes, device
        self._dtype = dtype_of(model)
        self._losses = [loss.to(device) if isinstance(loss, torch.nn.Module) else loss for loss in losses]

    def tensors(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return a batch's columns in the types and shapes of the module."""
        plan = self._plan
        shapes = {
            **dict(zip(plan.features, self._input_shapes or (), strict=False)),
            **dict(zip(plan.labels, plan.label_shapes or (), strict=False)),
        }
        made = {name: tensor_of(values, self._dtype).to(self._device) for name, values in batch.items()}
        return {
            name: values.reshape(tuple(shapes[name])) if name in shapes else values
            for name, values in made.items()
        }

    def prepared(self, batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
        """Return a batch as inputs, labels and the rows' weights."""
        return self.parts(self.tensors(batch))

    def parts(
        self, batch: dict[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
        """Return inputs, labels and the rows' weights of a result of :meth:`tensors`."""
        plan = self._plan
        weights = batch[plan.weight].to(self._dtype) if plan.weight else None
        return [batch[name] for name in plan.features], [batch[name] for name in plan.labels], weights

    def aligned(
        self, outputs: Any, labels: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return outputs as a list; labels get the shape of theirs where both have the same number of values."""
        found = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        if len(found) != len(labels):
            raise InvalidRequestError(
                f"The model has {len(found)} outputs for the labels {list(self._plan.labels)}."
            )
        return found, [
            label.reshape(output.shape) if output.numel() == label.numel() else label
            for output, label in zip(found, labels, strict=True)
        ]

    def loss(
        self,
        outputs: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor],
        weights: torch.Tensor | None = None,
    ) -> Any:
        """Return the sum of the labels' losses, each with its factor."""
        total: Any = 0.0
        for loss, share, output, label in zip(
            self._losses, self._plan.loss_weights, outputs, labels, strict=True
        ):
            if weights is None:
                value = loss(output, label)
            else:
                value = (_each(loss, output, label).reshape(len(weights), -1).mean(1) * weights).mean()
            total = total + share * value
        return total


def dtype_of(model: Any) -> torch.dtype:
    """Return the type of a model's floating parameters."""
    return next(
        (each.dtype for each in model.parameters() if each.is_floating_point()), torch.get_default_dtype()
    )


def tensor_of(values: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """Return floating values in the model's type, whole numbers as int64, without a copy where they have that type already."""
    if values.dtype.kind != "f":
        return torch.from_numpy(values.astype(np.int64))
    return torch.from_numpy(values if values.flags.writeable else values.copy()).to(dtype)


def name_of(metric: Any) -> str:
    """Return the name of a metric in histories."""
    return str(getattr(metric, "__name__", type(metric).__name__))


def _each(loss: Any, output: torch.Tensor, label: torch.Tensor) -> Any:
    """Return the loss of each row."""
    if not hasattr(loss, "reduction"):
        return loss(output, label, reduction="none")
    before, loss.reduction = loss.reduction, "none"
    try:
        return loss(output, label)
    finally:
        loss.reduction = before
