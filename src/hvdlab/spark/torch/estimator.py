"""An estimator of Spark's ML pipelines that trains a torch module on ranks, and the model that it gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import cloudpickle  # type: ignore[import-untyped]
import numpy.typing as npt
import torch

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.spark.common.backend import Backend
from hvdlab.spark.common.estimator import HorovodEstimator, HorovodModel, new_run, with_output_shapes
from hvdlab.spark.common.params import declared
from hvdlab.spark.common.prediction import Network
from hvdlab.spark.common.util import check_shape_compatibility, to_list
from hvdlab.spark.torch.objective import dtype_of, tensor_of
from hvdlab.spark.torch.remote import Trained, Training


class ModuleEstimator(HorovodEstimator):
    """Base of the estimators of torch's modules."""

    input_shapes = declared("input_shapes", "shape of each feature, with the batch as -1")
    loss_constructors = declared("loss_constructors", "functions that make the losses, on each rank")

    def _check_objective(self) -> None:
        """Refuse a module without an optimizer or a loss."""
        if not self.getOptimizer():
            raise InvalidRequestError("Optimizer parameter is required")
        if bool(self.getLoss()) == bool(self.getLossConstructors()):
            raise InvalidRequestError("Give one of loss and loss_constructors.")

    def _plan(
        self, run_id: str, index: int | None, rows: int, val_rows: int, metadata: Any
    ) -> dict[str, Any]:
        labels = self.getLabelCols()
        # A transformation may change them.
        shapes = {} if self.getTransformationFn() else metadata
        if shapes:
            check_shape_compatibility(
                metadata,
                self.getFeatureCols(),
                labels,
                self.getInputShapes(),
                label_shapes=self.getLabelShapes(),
            )
        return {
            **super()._plan(run_id, index, rows, val_rows, shapes),
            "model": self.getModel(),
            "optimizer": self.getOptimizer(),
            "losses": to_list(self.getLoss(), len(labels))
            or [make() for make in to_list(self.getLossConstructors(), len(labels)) or ()],
            "metrics": for_each_label(self.getMetrics(), len(labels)),
            "input_shapes": self.getInputShapes(),
        }

    def _model(
        self,
        run_id: str,
        metadata: Any,
        model_state: dict[str, Any],
        optimizer_state: dict[str, Any] | None,
        history: list[dict[str, Any]],
        output_shapes: Sequence[tuple[int, ...]] = (),
    ) -> TorchModel:
        """Return the trained model of these states; an optimizer without one stays as it is."""
        # The estimator's own module and optimizer stay as they were.
        model, optimizer = cloudpickle.loads(cloudpickle.dumps((self.getModel(), self.getOptimizer())))
        model.load_state_dict(model_state)
        if optimizer is not None and optimizer_state is not None:
            optimizer.load_state_dict(optimizer_state)
        labels = self.getLabelCols()
        return TorchModel(
            model=model,
            optimizer=optimizer,
            history=history,
            feature_columns=self.getFeatureCols(),
            label_columns=labels,
            input_shapes=self.getInputShapes(),
            loss=self.getLoss(),
            loss_constructors=self.getLossConstructors(),
            run_id=run_id,
            metadata=with_output_shapes(metadata, labels, output_shapes),
        )


class TorchEstimator(ModuleEstimator):
    """Estimator that trains a torch module on ranks; its parameters are keyword arguments, and each has ``setX`` and ``getX``.

    Floating columns come in the type of the model's parameters, whole numbers as int64. A label gets the shape of its output if it has the
    same number of values.

    Args:
        num_proc: Number of ranks in Spark's tasks; by default ``spark.default.parallelism``.
        backend: Where ranks run, instead of ``num_proc``.
        store: A :class:`~hvdlab.spark.common.store.Store` that driver and executors reach.
        model: The module, called with one tensor for each feature; gives one output for each label.
        optimizer: Made with the parameters of this very module.
        loss: Called with output and label, and with ``reduction="none"`` where rows have weights; or one for each label.
        loss_constructors: Instead of ``loss``: functions without arguments that make one, on each rank.
        loss_weights: A factor for each label's loss; by default the same for all, 1 in sum.
        metrics: Functions of output and label that give a number; or a list of them for each label.
        feature_cols, label_cols: Columns: numbers, arrays of one length, or vectors.
        input_shapes, label_shapes: For each feature or label the shape of a batch, with -1 for its rows.
        sample_weight_col: Column of rows' weights in the loss.
        validation: Share of rows, chosen at random, or column of zeros and ones.
        batch_size, val_batch_size: Rows of a batch, on each rank.
        epochs: Passes over the rows. A run that ended in the middle is continued up to here; one that is complete, by as many.
        run_id: Name of the run in the store; by default a new one. One that has a checkpoint is continued.
        callbacks: Called as ``callback(epoch, logs)``, or its ``on_epoch_end``, on rank 0 after each epoch.
        transformation_fn: Called with a pandas frame of each row group of a rank's share, and returns one.
        train_minibatch_fn: Does one batch instead of the usual way: called with ``model, optimizer, transform_outputs, loss_fn, inputs, labels,
            sample_weights``; returns outputs and loss.
        kwargs: The other parameters of :class:`~hvdlab.spark.common.params.EstimatorParams`.

    Raises:
        TypeError: There is no such parameter.
    """

    train_minibatch_fn = declared("train_minibatch_fn", "does one batch instead of the usual way")

    OWN_DEFAULTS: ClassVar[dict[str, Any]] = {
        "input_shapes": None,
        "loss_constructors": None,
        "train_minibatch_fn": None,
    }

    def _checked(self, dataset: Any) -> Backend:
        self._check_objective()
        return super()._checked(dataset)

    def _train_on(self, backend: Backend, index: int | None, rows: int, val_rows: int, metadata: Any) -> Any:
        run_id = self.getRunId() or new_run()
        plan = self._plan(run_id, index, rows, val_rows, metadata)
        found = backend.run(Training(**plan, minibatch=self.getTrainMinibatchFn()))
        trained: Trained = next(each for each in found if each is not None)
        return self._model(
            run_id, metadata, trained.model, trained.optimizer, trained.history, trained.output_shapes
        )


class TorchModel(HorovodModel):
    """Trained module; ``transform`` adds a column for each label, ``<label>__output`` unless ``output_cols`` names others.

    An output of one number is a double; one of several is a vector.

    Args:
        kwargs: ``model``, ``feature_columns``, ``label_columns``, and any of ``history``, ``optimizer``, ``input_shapes``,
            ``loss``, ``loss_constructors``, ``output_cols``, ``run_id``, ``metadata``.
    """

    optimizer = declared("optimizer", "the optimizer, with its state")
    input_shapes = declared("input_shapes", "shape of each feature, with the batch as -1")
    loss = declared("loss", "what it was trained for")
    loss_constructors = declared("loss_constructors", "functions that make the losses")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._setDefault(optimizer=None, input_shapes=None, loss=None, loss_constructors=None)
        self._set_given(kwargs)

    def _network(self) -> Network:
        return TorchNetwork(self.getModel(), self.getInputShapes())


@dataclass(frozen=True)
class TorchNetwork:
    """A module as a function of arrays, on the CPU.

    Attributes:
        shapes: For each feature the shape of a batch, with -1 for its rows.
    """

    model: Any
    shapes: Sequence[Sequence[int]] | None

    def __call__(self, arrays: list[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        model = self.model.cpu().eval()
        inputs = [tensor_of(array, dtype_of(model)) for array in arrays]
        if self.shapes:
            inputs = [tensor.reshape(tuple(shape)) for tensor, shape in zip(inputs, self.shapes, strict=True)]
        with torch.no_grad():
            found = model(*inputs)
        return [output.double().numpy() for output in (found if isinstance(found, list | tuple) else [found])]


def for_each_label(metrics: Sequence[Any], labels: int) -> list[list[Any]]:
    """Return the metrics by label: one list is for each of them."""
    if metrics and isinstance(metrics[0], list | tuple):
        return [list(each) for each in to_list(metrics, labels) or ()]
    return [list(metrics) for _ in range(labels)]
