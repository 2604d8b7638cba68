"""What estimators of all frameworks share: from a data frame over Parquet to ranks, and saving and loading."""

from __future__ import annotations

import base64
from abc import abstractmethod
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
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
from hvdlab.spark.common.params import EstimatorParams, ModelParams
from hvdlab.spark.common.util import check_validation, get_simple_meta_from_parquet, prepare_data


class _Saved(MLReadable, MLWritable):  # type: ignore[misc]  # pyspark is not there where types are checked
    """Saves parameters as pickles: they are modules, functions and stores. Loading runs what is in them."""

    def write(self) -> Any:
        return _Writer(self)

    @classmethod
    def read(cls) -> Any:
        return _Reader(cls)


class _Writer(MLWriter):  # type: ignore[misc]
    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        instance = self._instance
        given = {param.name: value for param, value in instance._paramMap.items()}
        # All together: an optimizer's parameters stay its model's.
        packed = base64.b64encode(cloudpickle.dumps(given)).decode()
        DefaultParamsWriter.saveMetadata(instance, path, self.sparkSession, {"pickled": packed}, {})


class _Reader(MLReader):  # type: ignore[misc]
    def __init__(self, cls: type) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Any:
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        instance = self._cls()
        instance._resetUid(metadata["uid"])
        for name, value in cloudpickle.loads(base64.b64decode(metadata["pickled"])).items():
            instance.set(instance.getParam(name), value)
        return instance


class HorovodEstimator(Estimator, EstimatorParams, _Saved):  # type: ignore[misc]
    """Trains a model on ranks, on the rows of a data frame or of Parquet that is in the store already."""

    def fit_on_parquet(self, params: dict[Any, Any] | None = None, dataset_idx: int | None = None) -> Any:
        """Train on the Parquet in the store, at ``get_train_data_path(dataset_idx)`` and its like for validation.

        Args:
            params: Parameters for this call alone.
            dataset_idx: Which of the store's data sets.

        Returns:
            The trained model.

        Raises:
            ValueError: Parameters or data make no sense; nothing was started.
            RankFailedError: A rank failed; also an instance of what it raised.
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


class HorovodModel(Model, ModelParams, _Saved):  # type: ignore[misc]
    """What an estimator has trained: adds columns to data frames."""
