"""An estimator of Spark's ML pipelines that trains a Keras model on ranks, and the model that it gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import keras
import numpy.typing as npt

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.spark.common.backend import Backend
from hvdlab.spark.common.estimator import HorovodEstimator, HorovodModel, new_run, with_output_shapes
from hvdlab.spark.common.params import declared
from hvdlab.spark.common.prediction import Network
from hvdlab.spark.common.util import check_shape_compatibility
from hvdlab.spark.keras.remote import KerasTrained, KerasTraining, as_input, model_of, pack, unpack


class _KerasSaved:
    """Writer of parameters with the user's own classes, and loads those first."""

    def _pack(self, given: dict[str, Any]) -> bytes:
        return pack(given, given.get("custom_objects"))

    @classmethod
    def _unpack(cls, data: bytes) -> dict[str, Any]:
        given: dict[str, Any] = unpack(data)
        return given


class KerasEstimator(_KerasSaved, HorovodEstimator):
    """Estimator that trains a Keras model on ranks; its parameters are keyword arguments, and each has ``setX`` and ``getX``.

    Columns come in the type and shape of the model's inputs. Labels that are floating numbers come in Keras' ``floatx``, others as int64; a label
    gets the shape of its output if it has the same number of values.

    Args:
        num_proc: Number of ranks in Spark's tasks; by default ``spark.default.parallelism``.
        backend: Where ranks run, instead of ``num_proc``.
        store: A :class:`~hvdlab.spark.common.store.Store` that driver and executors reach.
        model: The model, with one input for each feature and one output for each label. It stays as it is.
        optimizer: An optimizer of Keras, or its name; by default that with which the model is compiled.
        loss: A loss of Keras, its name, or one for each label.
        loss_weights: A factor for each label's loss; by default the same for all, 1 in sum.
        metrics: As ``compile`` accepts them.
        custom_objects: The user's classes and functions in the model, by name.
        feature_cols, label_cols: Columns: numbers, arrays of one length, or vectors.
        label_shapes: For each label the shape of a batch, with -1 for its rows.
        sample_weight_col: Column of rows' weights in the loss.
        validation: Share of rows, chosen at random, or column of zeros and ones.
        batch_size, val_batch_size: Rows of a batch, on each rank.
        epochs: Passes over the rows. A run that ended in the middle is continued up to here; one that is complete, by as many.
        run_id: Name of the run in the store; by default a new one. One that has a checkpoint is continued.
        callbacks: Callbacks of Keras, on all ranks; metrics of training and validation are those of all ranks.
        checkpoint_callback: A ``ModelCheckpoint`` or ``BestModelCheckpoint`` of whole models, on rank 0: its file is chosen here, and the model that it
            kept last is the trained model. It is in the store as ``best.keras`` of the run.
        transformation_fn: Called with a pandas frame of each row group of a rank's share, and returns one.
        backend_env: Variables for the ranks.
        kwargs: The other parameters of :class:`~hvdlab.spark.common.params.EstimatorParams`.

    Raises:
        TypeError: There is no such parameter.
    """

    custom_objects = declared("custom_objects", "the user's classes and functions, by name")
    checkpoint_callback = declared("checkpoint_callback", "keeps models on rank 0")
    backend_env = declared("backend_env", "variables for the ranks")

    OWN_DEFAULTS: ClassVar[dict[str, Any]] = {
        "custom_objects": {},
        "checkpoint_callback": None,
        "backend_env": {},
    }

    def _checked(self, dataset: Any) -> Backend:
        backend = super()._checked(dataset)
        self._check_version()
        if not self.getLoss():
            raise InvalidRequestError("Loss parameter is required for the model to compile")
        if not (self.getOptimizer() or getattr(self.getModel(), "optimizer", None)):
            raise InvalidRequestError(
                "Optimizer must be provided either as a parameter or as part of a compiled model"
            )
        if getattr(self.getCheckpointCallback(), "save_weights_only", False):
            raise InvalidRequestError(
                "checkpoint_callback keeps weights only, and the trained model is loaded from what it keeps; "
                "use save_weights_only=False."
            )
        return backend

    def _check_version(self) -> None:
        """Refuse a model and an optimizer of Keras 2, and objects that are no model at all."""
        for name, value in (("model", self.getModel()), ("optimizer", self.getOptimizer())):
            if any(base.__module__.startswith("tf_keras.") for base in type(value).__mro__):
                raise InvalidRequestError(
                    f"{name} is a {type(value).__name__} of tf_keras, which is Keras 2, and KerasEstimator trains with Keras 3: make it "
                    "with `keras`, or train the model by hvdlab.spark.run with hvdlab.tensorflow.keras, which takes both."
                )
        if not isinstance(self.getModel(), keras.Model):
            raise InvalidRequestError(f"model is no model of Keras 3 but a {type(self.getModel()).__name__}.")

    def get_model_shapes(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the shapes of batches of the model's inputs and of its outputs, with -1 for dimensions that are not fixed."""
        model = self.getModel()

        def shapes(tensors: Any) -> list[list[int]]:
            return [
                [-1 if size is None else size for size in each.shape] for each in keras.tree.flatten(tensors)
            ]

        return shapes(model.inputs), shapes(model.outputs)

    def _train_on(self, backend: Backend, index: int | None, rows: int, val_rows: int, metadata: Any) -> Any:
        run_id = self.getRunId() or new_run()
        # A transformation may change them.
        shapes = {} if self.getTransformationFn() else metadata
        if shapes:
            self._check_shapes(shapes)
        packed = pack(
            (
                self.getModel(),
                self.getOptimizer(),
                self.getLoss(),
                self.getMetrics(),
                self.getCallbacks(),
                self.getCheckpointCallback(),
            ),
            self.getCustomObjects(),
        )
        # Callbacks are packed with the rest: they can hold objects that only Keras can unpickle.
        plan = {**self._plan(run_id, index, rows, val_rows, shapes), "callbacks": ()}
        training = KerasTraining(**plan, packed=packed, custom_objects=self.getCustomObjects())
        trained = next(each for each in backend.run(training, env=self.getBackendEnv()) if each is not None)
        return self._model(trained, run_id, metadata)

    def _check_shapes(self, metadata: Any) -> None:
        """Refuse columns that can't be a batch of the model's inputs. The loss decides on permitted labels."""
        features, labels = self.getFeatureCols(), self.getLabelCols()
        if not self.getModel().built:
            return
        inputs, outputs = self.get_model_shapes()
        for what, shapes, columns in (("inputs", inputs, features), ("outputs", outputs, labels)):
            if len(shapes) != len(columns):
                raise InvalidRequestError(f"The model has {len(shapes)} {what} for the columns {columns}.")
        for name, shape in zip(features, inputs, strict=True):
            if -1 not in shape[1:]:
                check_shape_compatibility(metadata, [name], [], [shape])
        check_shape_compatibility(metadata, features, labels, label_shapes=self.getLabelShapes())

    def _model(self, trained: KerasTrained, run_id: str, metadata: Any) -> KerasModel:
        labels = self.getLabelCols()
        return KerasModel(
            model=model_of(trained.model, self.getCustomObjects()),
            history=trained.history,
            feature_columns=self.getFeatureCols(),
            label_columns=labels,
            custom_objects=self.getCustomObjects(),
            run_id=run_id,
            metadata=with_output_shapes(metadata, labels, trained.output_shapes),
        )


class KerasModel(_KerasSaved, HorovodModel):
    """Trained model; ``transform`` adds a column for each label, ``<label>__output`` unless ``output_cols`` names others.

    Args:
        kwargs: ``model``, ``feature_columns``, ``label_columns``, and any of ``history`` (metrics' values by epoch),
            ``custom_objects``, ``output_cols``, ``run_id``, ``metadata``.
    """

    custom_objects = declared("custom_objects", "the user's classes and functions, by name")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._setDefault(custom_objects={})
        self._set_given(kwargs)

    def getOptimizer(self) -> Any:
        """Return the optimizer, with its state; ``None`` if the model has none."""
        return getattr(self.getModel(), "optimizer", None)

    def _get_metadata(self) -> Any:
        """Return the shapes by column, under the name that programs call on Horovod's model."""
        return self.getMetadata()

    def _get_floatx(self) -> str:
        """Return the type of Keras' floats, such as ``"float32"``, under the name that programs call on Horovod's model."""
        return str(keras.backend.floatx())

    def _network(self) -> Network:
        return KerasNetwork(pack(self.getModel(), self.getCustomObjects()))


@dataclass
class KerasNetwork:
    """A model as a function of arrays; each process unpacks it once.

    Attributes:
        packed: The model, by :func:`~hvdlab.spark.keras.remote.pack`.
    """

    packed: bytes
    _model: Any = field(default=None, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return KerasNetwork, (self.packed,)

    def __call__(self, arrays: list[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        if self._model is None:
            self._model = unpack(self.packed)
        given = keras.tree.flatten(self._model.inputs) if self._model.built else [None] * len(arrays)
        if len(given) != len(arrays):
            raise InvalidRequestError(f"The model has {len(given)} inputs for {len(arrays)} columns.")
        inputs = [
            array if tensor is None else as_input(array, tensor)
            for array, tensor in zip(arrays, given, strict=True)
        ]
        found = self._model.predict_on_batch(inputs[0] if len(inputs) == 1 else tuple(inputs))
        return list(keras.tree.flatten(found))
