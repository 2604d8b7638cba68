"""Base of the estimators of all frameworks: from a data frame over Parquet to ranks, and saving and loading."""

from __future__ import annotations

import base64
import uuid
from abc import abstractmethod
from typing import Any, ClassVar

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
from pyspark.ml import Estimator, Model  # pyright: ignore[reportMissingImports]
from pyspark.ml.util import (  # pyright: ignore[reportMissingImports]
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)

from hvdlab.collectives.errors import InvalidRequestError, UnsupportedError
from hvdlab.spark.common.backend import Backend, SparkBackend
from hvdlab.spark.common.datamodule import ParquetDataModule
from hvdlab.spark.common.params import EstimatorParams, ModelParams
from hvdlab.spark.common.prediction import Network, Predict
from hvdlab.spark.common.util import (
    check_columns,
    check_validation,
    get_output_cols,
    get_simple_meta_from_parquet,
    prepare_data,
    to_list,
)


class _Saved(MLReadable, MLWritable):  # type: ignore[misc]  # pyspark is not there where types are checked
    """Writer of parameters as pickles: they are modules, functions and stores. Loading runs code in them."""

    def write(self) -> Any:
        return _Writer(self)

    @classmethod
    def read(cls) -> Any:
        return _Reader(cls)

    def _pack(self, given: dict[str, Any]) -> bytes:
        """Return parameters as bytes, all together: an optimizer's parameters stay its model's."""
        packed: bytes = cloudpickle.dumps(given)
        return packed

    @classmethod
    def _unpack(cls, data: bytes) -> dict[str, Any]:
        """Return the object that :meth:`_pack` was given."""
        given: dict[str, Any] = cloudpickle.loads(data)
        return given


class _Writer(MLWriter):  # type: ignore[misc]
    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        instance = self._instance
        given = {param.name: value for param, value in instance._paramMap.items()}
        packed = base64.b64encode(instance._pack(given)).decode()
        DefaultParamsWriter.saveMetadata(instance, path, self.sparkSession, {"pickled": packed}, {})


class _Reader(MLReader):  # type: ignore[misc]
    def __init__(self, cls: type) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Any:
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        instance = self._cls()
        instance._resetUid(metadata["uid"])
        for name, value in instance._unpack(base64.b64decode(metadata["pickled"])).items():
            instance.set(instance.getParam(name), value)
        return instance


class HorovodEstimator(Estimator, EstimatorParams, _Saved):  # type: ignore[misc]
    """Estimator that trains a model on ranks, on the rows of a data frame or of Parquet that is in the store already."""

    OWN_DEFAULTS: ClassVar[dict[str, Any]] = {}
    """Of the parameters that a framework's estimator has beside the common ones."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self._setDefault(**self.OWN_DEFAULTS)
        for name in kwargs:
            if not self.hasParam(name):
                raise TypeError(f"{type(self).__name__} has no parameter {name!r}.")
        self._set_given(kwargs)

    def fit_on_parquet(self, params: dict[Any, Any] | None = None, dataset_idx: int | None = None) -> Any:
        """Train on the Parquet in the store, at ``get_train_data_path(dataset_idx)`` and its like for validation.

        Args:
            params: Parameters for this call alone.
            dataset_idx: Which of the store's data sets.

        Returns:
            The trained model.

        Raises:
            ValueError: Parameters or data make no sense; nothing was started.
            RankFailedError: A rank failed; also an instance of the class of its exception.
        """
        estimator = self.copy(params) if params else self
        backend = estimator._checked(None)
        return estimator._trained(backend, dataset_idx)

    def _fit(self, dataset: Any) -> Any:
        if not hasattr(dataset, "_jdf"):
            raise UnsupportedError(
                "Estimators need a SparkContext, and a data frame of Spark Connect has none; use a classic session."
            )
        backend = self._checked(dataset)
        with prepare_data(
            backend.num_processes(),
            self.getStore(),
            dataset,
            self.getLabelCols(),
            self.getFeatureCols(),
            self.getValidation(),
            self.getSampleWeightCol(),
            self.getCompressSparseCols(),
            self.getPartitionsPerProcess(),
            self.getVerbose(),
        ) as index:
            return self._trained(backend, index)

    def _checked(self, dataset: Any) -> Backend:
        """Refuse parameters that make no sense, before anything is started."""
        if self.getNumProc() is not None and self.getBackend() is not None:
            raise InvalidRequestError(
                "num_proc and backend exclude each other: the backend knows its number of ranks."
            )
        for name, what in (
            ("model", "Model"),
            ("store", "Store"),
            ("feature_cols", "Feature"),
            ("label_cols", "Label"),
        ):
            if not self.getOrDefault(name):
                raise InvalidRequestError(f"{what} parameter is required")
        for name in ("batch_size", "epochs", "backward_passes_per_step"):
            if self.getOrDefault(name) < 1:
                raise InvalidRequestError(f"{name}={self.getOrDefault(name)}: it must be at least 1.")
        check_validation(self.getValidation(), dataset)
        self.getStore().check_writable()
        found: Backend = self.getBackend() or SparkBackend(self.getNumProc(), verbose=self.getVerbose())
        return found

    def _trained(self, backend: Backend, index: int | None) -> Any:
        rows, val_rows, metadata, _ = get_simple_meta_from_parquet(
            self.getStore(), self.getLabelCols(), self.getFeatureCols(), self.getSampleWeightCol(), index
        )
        size = backend.num_processes()
        if rows < size:
            raise InvalidRequestError(f"There are {rows} rows to train on, for {size} ranks.")
        return self._train_on(backend, index, rows, val_rows, metadata)

    @abstractmethod
    def _train_on(self, backend: Backend, index: int | None, rows: int, val_rows: int, metadata: Any) -> Any:
        """Train on a data set of the store and return the model."""

    def _plan(
        self, run_id: str, index: int | None, rows: int, val_rows: int, metadata: Any
    ) -> dict[str, Any]:
        """Return the arguments of a :class:`~hvdlab.spark.common.plan.TrainingPlan`."""
        labels, store = self.getLabelCols(), self.getStore()
        return {
            "features": self.getFeatureCols(),
            "labels": labels,
            "weight": self.getSampleWeightCol(),
            "label_shapes": self.getLabelShapes(),
            "loss_weights": to_list(self.getLossWeights(), len(labels)) or [1 / len(labels)] * len(labels),
            "metadata": metadata,
            "rows": rows,
            "val_rows": val_rows,
            "batch_size": self.getBatchSize(),
            "val_batch_size": self.getValBatchSize() or self.getBatchSize(),
            "epochs": self.getEpochs(),
            "train_steps": self.getTrainStepsPerEpoch(),
            "val_steps": self.getValidationStepsPerEpoch(),
            "passes_per_step": self.getBackwardPassesPerStep(),
            "compression": self.getGradientCompression(),
            "callbacks": self.getCallbacks(),
            "store": store,
            "remote": store.to_remote(run_id, index),
            "data_module": self.getDataModule() or ParquetDataModule,
            "data_options": {
                "shuffle": self.getShuffle(),
                "transform_fn": self.getTransformationFn(),
                "inmemory_cache_all": self.getInmemoryCacheAll(),
                "random_seed": self.getRandomSeed(),
                "storage_options": getattr(store, "storage_options", None),
            },
            "seed": self.getRandomSeed(),
            "use_gpu": self.getUseGpu(),
            "verbose": self.getVerbose(),
        }


class HorovodModel(Model, ModelParams, _Saved):  # type: ignore[misc]
    """Model that an estimator has trained: adds columns to data frames.

    An output of one number is a double; one of several is a vector.
    """

    @abstractmethod
    def _network(self) -> Network:
        """Return the model as a function of arrays."""

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
        network = self._network()
        sizes = self._output_sizes(dataset, Predict(network, features, dataset.columns))
        if len(sizes) != len(names):
            raise InvalidRequestError(f"The model has {len(sizes)} outputs for the columns {names}.")
        added = [
            StructField(name, DoubleType() if size == 1 else VectorUDT())
            for name, size in zip(names, sizes, strict=True)
        ]
        schema = StructType([*dataset.schema.fields, *added])
        predict = Predict(network, features, dataset.columns, tuple(sizes))
        return dataset.sparkSession.createDataFrame(dataset.rdd.mapPartitions(predict), schema)

    def _output_sizes(self, dataset: Any, predict: Predict) -> list[int]:
        known = [
            (self.getMetadata() or {}).get(label, {}).get("output_shape") for label in self.getLabelColumns()
        ]
        if None not in known:
            return [int(np.prod(shape)) for shape in known]
        outputs = predict.outputs(dataset.head(1))
        return [int(np.prod(output.shape[1:])) for output in outputs]


def new_run() -> str:
    """Return a name for a run that was given none."""
    return f"run_{uuid.uuid4().hex[:12]}"


def with_output_shapes(metadata: Any, labels: Any, shapes: Any) -> dict[str, dict[str, Any]]:
    """Return the metadata of a model: the data's metadata with the shape of a row's output for each label."""
    known: dict[str, dict[str, Any]] = {name: dict(about) for name, about in metadata.items()}
    for label, shape in zip(labels, shapes, strict=False):
        known[label]["output_shape"] = tuple(shape)
    return known
