"""An estimator of Spark's ML pipelines that trains a torch module on ranks, and the model that it gives."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import torch

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.spark.common.backend import Backend
from hvdlab.spark.common.datamodule import ParquetDataModule
from hvdlab.spark.common.estimator import HorovodEstimator, HorovodModel
from hvdlab.spark.common.params import declared
from hvdlab.spark.common.util import check_columns, check_shape_compatibility, get_output_cols, to_list
from hvdlab.spark.torch.training import Trained, Training, dtype_of, tensor_of

_ROWS = 1024
"""Rows that a model is given at once by ``transform``."""


class TorchEstimator(HorovodEstimator):
    """Trains a torch module on ranks; its parameters are keyword arguments, and each has ``setX`` and ``getX``.

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

    input_shapes = declared("input_shapes", "shape of each feature, with the batch as -1")
    loss_constructors = declared("loss_constructors", "functions that make the losses, on each rank")
    train_minibatch_fn = declared("train_minibatch_fn", "does one batch instead of the usual way")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._setDefault(input_shapes=None, loss_constructors=None, train_minibatch_fn=None)
        for name in kwargs:
            if not self.hasParam(name):
                raise TypeError(f"TorchEstimator has no parameter {name!r}.")
        self._set_given(kwargs)

    def _checked(self, dataset: Any) -> Backend:
        if not self.getOptimizer():
            raise InvalidRequestError("Optimizer parameter is required")
        if bool(self.getLoss()) == bool(self.getLossConstructors()):
            raise InvalidRequestError("Give one of loss and loss_constructors.")
        return super()._checked(dataset)

    def _train_on(self, backend: Backend, index: int | None, rows: int, val_rows: int, metadata: Any) -> Any:
        features, labels, run_id = self.getFeatureCols(), self.getLabelCols(), self.getRunId() or _new_run()
        # A transformation may change them.
        shapes = {} if self.getTransformationFn() else metadata
        if shapes:
            check_shape_compatibility(
                metadata, features, labels, self.getInputShapes(), label_shapes=self.getLabelShapes()
            )
        store = self.getStore()
        training = Training(
            model=self.getModel(),
            optimizer=self.getOptimizer(),
            losses=to_list(self.getLoss(), len(labels))
            or [make() for make in to_list(self.getLossConstructors(), len(labels)) or ()],
            loss_weights=to_list(self.getLossWeights(), len(labels)) or [1 / len(labels)] * len(labels),
            metrics=_for_each_label(self.getMetrics(), len(labels)),
            features=features,
            labels=labels,
            weight=self.getSampleWeightCol(),
            input_shapes=self.getInputShapes(),
            label_shapes=self.getLabelShapes(),
            metadata=shapes,
            rows=rows,
            val_rows=val_rows,
            batch_size=self.getBatchSize(),
            val_batch_size=self.getValBatchSize() or self.getBatchSize(),
            epochs=self.getEpochs(),
            steps=self.getTrainStepsPerEpoch(),
            val_steps=self.getValidationStepsPerEpoch(),
            passes_per_step=self.getBackwardPassesPerStep(),
            compression=self.getGradientCompression(),
            callbacks=self.getCallbacks(),
            minibatch=self.getTrainMinibatchFn(),
            store=store,
            remote=store.to_remote(run_id, index),
            data_module=self.getDataModule() or ParquetDataModule,
            data_options={
                "shuffle": self.getShuffle(),
                "transform_fn": self.getTransformationFn(),
                "inmemory_cache_all": self.getInmemoryCacheAll(),
                "random_seed": self.getRandomSeed(),
                "storage_options": getattr(store, "storage_options", None),
            },
            seed=self.getRandomSeed(),
            use_gpu=self.getUseGpu(),
            verbose=self.getVerbose(),
        )
        trained = next(each for each in backend.run(training) if each is not None)
        return self._model(trained, run_id, metadata)

    def _model(self, trained: Trained, run_id: str, metadata: Any) -> TorchModel:
        # The estimator's own module and optimizer stay as they were.
        model, optimizer = cloudpickle.loads(cloudpickle.dumps((self.getModel(), self.getOptimizer())))
        model.load_state_dict(trained.model)
        optimizer.load_state_dict(trained.optimizer)
        labels = self.getLabelCols()
        known = {name: dict(about) for name, about in metadata.items()}
        for label, shape in zip(labels, trained.output_shapes, strict=False):
            known[label]["output_shape"] = shape
        return TorchModel(
            model=model,
            optimizer=optimizer,
            history=trained.history,
            feature_columns=self.getFeatureCols(),
            label_columns=labels,
            input_shapes=self.getInputShapes(),
            loss=self.getLoss(),
            loss_constructors=self.getLossConstructors(),
            run_id=run_id,
            metadata=known,
        )


class TorchModel(HorovodModel):
    """A trained module; ``transform`` adds a column for each label, ``<label>__output`` unless ``output_cols`` says otherwise.

    An output of one number is a double; one of several is a vector.

    Args:
        kwargs: ``model``, ``feature_columns``, ``label_columns``, and what else there is of ``history``, ``optimizer``, ``input_shapes``,
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

    def _transform(self, dataset: Any) -> Any:
        from pyspark.ml.linalg import VectorUDT  # pyright: ignore[reportMissingImports]
        from pyspark.sql.types import DoubleType, StructField, StructType  # pyright: ignore[reportMissingImports]

        features = self.getFeatureColumns()
        check_columns(dataset.columns, features, "data frame")
        names = get_output_cols(self.getLabelColumns(), self.getOutputCols())
        if taken := [name for name in names if name in dataset.columns]:
            raise InvalidRequestError(
                f"The data frame has columns {taken} already; choose others by setOutputCols."
            )
        predict = Predict(self.getModel(), features, self.getInputShapes(), dataset.columns, ())
        sizes = self._output_sizes(dataset, predict)
        if len(sizes) != len(names):
            raise InvalidRequestError(f"The model has {len(sizes)} outputs for the columns {names}.")
        added = [
            StructField(name, DoubleType() if size == 1 else VectorUDT())
            for name, size in zip(names, sizes, strict=True)
        ]
        schema = StructType([*dataset.schema.fields, *added])
        predict = Predict(predict.model, features, predict.shapes, dataset.columns, tuple(sizes))
        return dataset.sparkSession.createDataFrame(dataset.rdd.mapPartitions(predict), schema)

    def _output_sizes(self, dataset: Any, predict: Predict) -> list[int]:
        known = [
            (self.getMetadata() or {}).get(label, {}).get("output_shape") for label in self.getLabelColumns()
        ]
        if None not in known:
            return [int(np.prod(shape)) for shape in known]
        outputs = predict.outputs(dataset.head(1))
        return [int(np.prod(output.shape[1:])) for output in outputs]


@dataclass(frozen=True)
class Predict:
    """A function for ``mapPartitions``: rows with the model's outputs behind them.

    Attributes:
        sizes: Numbers in each output; one that has one number is a double, others are vectors.
    """

    model: Any
    features: Sequence[str]
    shapes: Sequence[Sequence[int]] | None
    columns: Sequence[str]
    sizes: tuple[int, ...]

    def __call__(self, rows: Iterable[Any]) -> Iterator[Any]:
        from pyspark.ml.linalg import DenseVector  # pyright: ignore[reportMissingImports]

        left = iter(rows)
        while found := list(islice(left, _ROWS)):
            columns: list[Any] = []
            for output, size in zip(self.outputs(found), self.sizes, strict=True):
                values = output.reshape(len(found), -1).double().numpy()
                if values.shape[1] != size:
                    raise InvalidRequestError(
                        f"The model gave {values.shape[1]} numbers for a row, not {size}."
                    )
                columns.append(values[:, 0].tolist() if size == 1 else list(map(DenseVector, values)))
            for row, *added in zip(found, *columns, strict=True):
                yield (*row, *added)

    def outputs(self, rows: Sequence[Any]) -> list[torch.Tensor]:
        """The model's outputs for rows, on the CPU."""
        if not rows:
            return []
        model = self.model.cpu().eval()
        inputs = []
        for number, name in enumerate(self.features):
            place = list(self.columns).index(name)
            values = [row[place] for row in rows]
            if any(value is None for value in values):
                raise InvalidRequestError(f"Column {name!r} has nulls; fill or drop them.")
            array = np.asarray([value.toArray() if hasattr(value, "toArray") else value for value in values])
            tensor = tensor_of(array, dtype_of(model))
            inputs.append(tensor.reshape(tuple(self.shapes[number])) if self.shapes else tensor)
        with torch.no_grad():
            found = model(*inputs)
        return list(found) if isinstance(found, list | tuple) else [found]


def _for_each_label(metrics: Sequence[Any], labels: int) -> list[list[Any]]:
    if metrics and isinstance(metrics[0], list | tuple):
        return [list(each) for each in to_list(metrics, labels) or ()]
    return [list(metrics) for _ in range(labels)]


def _new_run() -> str:
    return f"run_{uuid.uuid4().hex[:12]}"
