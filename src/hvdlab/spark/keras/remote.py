"""The ranks' side of a :class:`KerasEstimator`: read a share of the rows, ``fit``, and, on rank 0, keep checkpoints. Needs no pyspark.

:func:`pack` makes bytes of Keras models and of all that belongs to them, with the user's own classes, which the process that
unpacks need not know before.
"""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import keras
import numpy as np
import numpy.typing as npt

import hvdlab.tensorflow.keras as hvd
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.spark.common.datamodule import Batch
from hvdlab.spark.common.plan import TrainingPlan
from hvdlab.tensorflow.functions import allgather_object, broadcast_object
from hvdlab.tensorflow.installed import tf

History = dict[str, list[float]]
"""As ``keras.callbacks.History`` has it: for each metric its values by epoch."""

_ABOUT = "hvdlab.json"
"""The member of a checkpoint, beside what Keras has in its files, that says how far the run is."""


@dataclass(frozen=True)
class KerasTrained:
    """Result of rank 0.

    Attributes:
        model: The bytes of a ``.keras`` file, with the optimizer.
        history: See :data:`History`.
        output_shapes: The shape of a row's output, for each label; empty if the model does not know it.
    """

    model: bytes
    history: History
    output_shapes: list[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class KerasTraining(TrainingPlan):
    """A function for ranks.

    Attributes:
        packed: Model, optimizer, losses, metrics, callbacks and checkpoint callback, by :func:`~hvdlab.spark.keras.remote.pack`.
        custom_objects: The user's classes and functions, by name.
    """

    packed: bytes
    custom_objects: dict[str, Any]

    def __call__(self) -> KerasTrained | None:
        """Train; only rank 0 returns something."""
        hvd.init()
        try:
            return _Fit(self).train()
        finally:
            hvd.shutdown()


class _Fit:
    def __init__(self, job: KerasTraining) -> None:
        self.job = job
        if not job.use_gpu:
            # Before anything touches TensorFlow's devices: once they are initialized it refuses to hide
            # one.
            tf.config.set_visible_devices([], "GPU")
        if job.seed is not None:
            keras.utils.set_random_seed(job.seed + hvd.rank())
        model, optimizer, self.loss, self.metrics, self.callbacks, self.best = unpack(job.packed)
        #: As in ``keras.callbacks.History``, with the epochs before a run was continued.
        self.history: History = {}
        #: The epoch to begin with, which _resume() sets, and the one to stop before.
        self.first = 0
        self.model, self.optimizer = self._resumed() or (model, optimizer or model.optimizer)
        self.last = job.epochs_until(self.first)
        #: Why no more could be read; TensorFlow, which calls for batches, would report it as a failed operation.
        self.unread: Exception | None = None

    def train(self) -> KerasTrained | None:
        job = self.job
        self._compile()
        with (
            job.open_data(hvd.rank(), hvd.size()) as data,
            job.remote.get_local_output_dir() as place,
        ):
            batches = data.train_data()
            saved = Path(place, f"{job.remote.checkpoint_filename}.keras")
            try:
                self.model.fit(
                    self._all_prepared(batches),
                    steps_per_epoch=job.steps_per_epoch(hvd.size()),
                    initial_epoch=self.first,
                    epochs=self.last,
                    callbacks=self._callbacks(data, saved),
                    verbose=0,
                )
            except Exception:
                if self.unread is not None:
                    raise self.unread from None
                raise
            finally:
                close = getattr(batches, "close", None)
                if close is not None:
                    close()
            if hvd.rank():
                return None
            # A checkpoint callback has kept the best model.
            kept = saved.read_bytes() if self.best is not None and saved.exists() else None
            shapes = [tuple(each.shape[1:]) for each in _tensors(self.model, "outputs")]
            known = shapes if all(None not in shape for shape in shapes) else []
            return KerasTrained(kept or model_bytes(self.model), self.history, known)

    def _compile(self) -> None:
        job = self.job
        outputs = len(job.labels)
        self.model.compile(
            optimizer=hvd.DistributedOptimizer(
                self.optimizer,
                compression=job.compression or hvd.Compression.none,
                backward_passes_per_step=job.passes_per_step,
                average_aggregated_gradients=job.passes_per_step > 1,
            ),
            loss=self.loss,
            loss_weights=list(job.loss_weights) if outputs > 1 else None,
            metrics=self.metrics or None,
            jit_compile=False,
        )

    def _callbacks(self, data: Any, saved: Path) -> list[Any]:
        chosen = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
        ]
        if self.job.val_rows:
            # After the averaging callback: these values are of all ranks already.
            chosen.append(_Validation(self, data))
        # Callbacks are on all ranks, with the same metrics: one that ends the training ends it everywhere.
        chosen += self.callbacks
        if hvd.rank() == 0:
            if self.best is not None:
                self.best.filepath = str(saved)
                chosen.append(self.best)
            chosen.append(_EpochReporter(self, saved))
        return chosen

    def validation_batches(self, data: Any) -> Iterator[tuple[Any, ...]]:
        """Return the batches of one validation, as ``evaluate`` expects them."""
        return self._all_prepared(islice(data.val_data(), self.job.val_steps))

    def _all_prepared(self, batches: Iterable[Batch]) -> Iterator[tuple[Any, ...]]:
        try:
            yield from map(self._prepared, batches)
        except Exception as error:
            self.unread = error
            raise

    def _prepared(self, batch: Batch) -> tuple[Any, ...]:
        """Return a batch as ``fit`` expects it: inputs, labels and the weights, if any."""
        job = self.job
        inputs = [batch[name] for name in job.features]
        given = _tensors(self.model, "inputs")
        if given:
            _check_count("inputs", given, "features", job.features)
            inputs = [as_input(values, tensor) for values, tensor in zip(inputs, given, strict=True)]
        labels = [_as_label(batch[name]) for name in job.labels]
        if job.label_shapes:
            labels = [
                values.reshape(tuple(shape)) for values, shape in zip(labels, job.label_shapes, strict=True)
            ]
        elif outputs := _tensors(self.model, "outputs"):
            _check_count("outputs", outputs, "labels", job.labels)
            labels = [_like(values, tensor) for values, tensor in zip(labels, outputs, strict=True)]
        parts: list[Any] = [_one_or_all(inputs), _one_or_all(labels)]
        if job.weight:
            parts.append(_one_or_all([batch[job.weight].astype(np.float32)] * len(labels)))
        return tuple(parts)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _resumed(self) -> tuple[Any, Any] | None:
        """Return model and optimizer of the run's checkpoint, which rank 0 reads for all."""
        data = self.job.read_checkpoint() if hvd.rank() == 0 else None
        data = broadcast_object(data, 0, name="hvdlab.spark.checkpoint")
        if data is None:
            return None
        with zipfile.ZipFile(io.BytesIO(data)) as members:
            about = json.loads(members.read(_ABOUT))
        self.first = int(about["epoch"]) + 1
        self.history = about["history"]
        model = model_of(data, self.job.custom_objects)
        return model, model.optimizer

    def ended(self, epoch: int, logs: dict[str, Any], saved: Path) -> None:
        """Store the results of an epoch. On rank 0."""
        for name, value in logs.items():
            self.history.setdefault(name, []).append(float(value))
        job = self.job
        if job.checkpoint is not None:
            buffer = io.BytesIO(model_bytes(self.model))
            with zipfile.ZipFile(buffer, "a") as members:
                members.writestr(_ABOUT, json.dumps({"epoch": epoch, "history": self.history}))
            job.write_checkpoint(buffer.getvalue())
            if self.best is not None and saved.exists():
                job.store.write(f"{job.remote.checkpoint_path}/best.keras", saved.read_bytes())
        if job.verbose:
            words = [f"{name} {float(value):.4g}" for name, value in logs.items()]
            print(f"epoch {epoch + 1}/{self.last}: {', '.join(words)}", flush=True)


class _EpochReporter(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Callback that reports the end of each epoch, after all other callbacks."""

    def __init__(self, fit: _Fit, saved: Path) -> None:
        super().__init__()
        self._fit, self._saved = fit, saved

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._fit.ended(epoch, logs or {}, self._saved)


class _Validation(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Callback that puts ``val_…`` of all ranks' rows into the logs of an epoch, for the callbacks after it.

    ``fit`` can't validate over ranks: their shares have different numbers of rows, or none.
    """

    def __init__(self, fit: _Fit, data: Any) -> None:
        super().__init__()
        self._fit, self._data = fit, data

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        rows, found = 0, {}
        batches = list(islice(each := self._counted(), 1))
        model: Any = self.model
        # A rank without rows must not call evaluate(), which fails without a batch, but has to take part in
        # the gathering.
        if batches:
            found = model.evaluate(_chained(batches, each), return_dict=True, verbose=0)
            rows = self._rows
        gathered = allgather_object((rows, found), name="hvdlab.spark.validation")
        total = sum(rows for rows, _ in gathered)
        names = next((list(values) for rows, values in gathered if rows), [])
        for name in names:
            mean = sum(rows * values[name] for rows, values in gathered if rows) / total
            if logs is not None:
                logs[f"val_{name}"] = mean

    def _counted(self) -> Iterator[Any]:
        self._rows = 0
        for batch in self._fit.validation_batches(self._data):
            labels = batch[1]
            self._rows += len(labels[0] if isinstance(labels, tuple) else labels)
            yield batch


def _chained(first: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    yield from first
    yield from rest


def _tensors(model: Any, which: str) -> list[Any]:
    """Return a model's symbolic inputs or outputs; none before it is built."""
    try:
        found = getattr(model, which)
    except (AttributeError, ValueError):
        return []
    return list(keras.tree.flatten(found)) if found is not None else []


def _check_count(what: str, tensors: Sequence[Any], of: str, columns: Sequence[str]) -> None:
    if len(tensors) != len(columns):
        raise InvalidRequestError(f"The model has {len(tensors)} {what} for the {of} {list(columns)}.")


def as_input(values: npt.NDArray[Any], tensor: Any) -> npt.NDArray[Any]:
    """Return a column in the type and, if a row has as many numbers, the shape of a model's input."""
    return _like(values.astype(tf.as_dtype(tensor.dtype).as_numpy_dtype, copy=False), tensor)


def _as_label(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return values.astype(keras.config.floatx() if values.dtype.kind == "f" else np.int64, copy=False)


def _like(values: npt.NDArray[Any], tensor: Any) -> npt.NDArray[Any]:
    """Return values in the shape of a model's tensor, if a row has as many numbers."""
    shape = tuple(tensor.shape[1:])
    if None in shape or int(np.prod(shape)) != int(np.prod(values.shape[1:])):
        return values
    return values.reshape((len(values), *shape))


def _one_or_all(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def pack(value: Any, custom_objects: Mapping[str, Any] | None = None) -> bytes:
    """Return a value that may hold models, optimizers, losses and metrics of Keras.

    Args:
        value: The value; Keras' objects in it are saved as Keras does, all others are pickled.
        custom_objects: The user's classes and functions in it, by name.
    """
    with keras.utils.custom_object_scope(custom_objects or {}):
        # Pickled twice: the value can be unpickled only within the scope of the custom objects.
        packed: bytes = cloudpickle.dumps((dict(custom_objects or {}), cloudpickle.dumps(value)))
    return packed


def unpack(data: bytes) -> Any:
    """Return the object that :func:`pack` packed. Unpacking runs code that is in it."""
    custom_objects, value = cloudpickle.loads(data)
    with keras.utils.custom_object_scope(custom_objects):
        return cloudpickle.loads(value)


def model_bytes(model: Any) -> bytes:
    """Return a model with its optimizer as the bytes of Keras' own ``.keras`` file."""
    with tempfile.TemporaryDirectory(prefix="hvdlab-keras-") as place:
        file = Path(place, "model.keras")
        model.save(file)
        return file.read_bytes()


def model_of(data: bytes, custom_objects: Mapping[str, Any] | None) -> Any:
    """Return the model of a ``.keras`` file's bytes, compiled as it was saved; runs no functions that the file holds.

    Raises:
        ValueError: They are no such file, or need a class that is not among ``custom_objects``.
    """
    with tempfile.TemporaryDirectory(prefix="hvdlab-keras-") as place:
        file = Path(place, "model.keras")
        file.write_bytes(data)
        return keras.models.load_model(file, custom_objects=dict(custom_objects or {}))
