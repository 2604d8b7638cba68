"""What each rank of a :class:`TorchEstimator` does: read its share, train, and, on rank 0, keep checkpoints. Needs no pyspark."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import hvdlab.torch as hvd
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.spark.common.datamodule import Batch, DataModule
from hvdlab.spark.common.store import RemoteStore, Store
from hvdlab.spark.common.util import Metadata

Logs = dict[str, Any]


@dataclass(frozen=True)
class Trained:
    """What rank 0 returns.

    Attributes:
        model, optimizer: Their states, on the CPU.
        history: For each epoch ``epoch``, ``train`` and, with validation, ``validation``.
        output_shapes: The shape of a row's output, for each label.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any]
    history: list[Logs]
    output_shapes: list[tuple[int, ...]]


@dataclass(frozen=True)
class Training:
    """A function for ranks. Model and optimizer are pickled together, so the optimizer's parameters stay the model's."""

    model: Any
    optimizer: Any
    losses: Sequence[Any]
    loss_weights: Sequence[float]
    metrics: Sequence[Sequence[Any]]
    features: Sequence[str]
    labels: Sequence[str]
    weight: str | None
    input_shapes: Sequence[Sequence[int]] | None
    label_shapes: Sequence[Sequence[int]] | None
    metadata: Metadata
    rows: int
    val_rows: int
    batch_size: int
    val_batch_size: int
    epochs: int
    steps: int | None
    val_steps: int | None
    passes_per_step: int
    compression: Any
    callbacks: Sequence[Any]
    minibatch: Callable[..., Any] | None
    store: Store
    remote: RemoteStore
    data_module: type[DataModule]
    data_options: dict[str, Any]
    seed: int | None
    use_gpu: bool
    verbose: int

    def __call__(self) -> Trained | None:
        """Train; only rank 0 returns something."""
        hvd.init()
        try:
            return _Rank(self).train()
        finally:
            hvd.shutdown()


class _Rank:
    def __init__(self, job: Training) -> None:
        self.job = job
        cuda = job.use_gpu and torch.cuda.is_available()
        self.device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
        if job.seed is not None:
            torch.manual_seed(job.seed + hvd.rank())
        self.model = job.model.to(self.device)
        self.dtype = dtype_of(self.model)
        self.losses = [_on(loss, self.device) for loss in job.losses]
        self.history: list[Logs] = []
        self.output_shapes: list[tuple[int, ...]] = []
        self.first = self._resume()
        self.last = self.first + job.epochs if self.first >= job.epochs else job.epochs
        self.optimizer: Any = hvd.DistributedOptimizer(
            job.optimizer,
            named_parameters=self.model.named_parameters(),
            compression=job.compression or hvd.Compression.none,
            backward_passes_per_step=job.passes_per_step,
        )

    def train(self) -> Trained | None:
        job = self.job
        share = -(-job.rows // hvd.size())
        steps = job.steps or -(-share // job.batch_size)
        steps = -(-steps // job.passes_per_step) * job.passes_per_step
        with self._data(steps) as data:
            batches = iter(data.train_data())
            try:
                for epoch in range(self.first, self.last):
                    logs: Logs = {"epoch": epoch, "train": self._train_epoch(batches, steps)}
                    if job.val_rows:
                        logs["validation"] = self._validate(data.val_data())
                    self.history.append(logs)
                    self._ended(epoch, logs)
            finally:
                close = getattr(batches, "close", None)
                if close is not None:
                    close()
        if hvd.rank():
            return None
        state, optimizer = _on_cpu(self.model.state_dict()), _on_cpu(self.optimizer.state_dict())
        return Trained(state, optimizer, self.history, self.output_shapes)

    def _data(self, steps: int) -> DataModule:
        job = self.job
        fields = [*job.features, *job.labels, *([job.weight] if job.weight else [])]
        return job.data_module(
            job.remote.train_data_path,
            job.remote.val_data_path,
            num_train_epochs=job.epochs,
            has_val=bool(job.val_rows),
            train_batch_size=job.batch_size,
            val_batch_size=job.val_batch_size,
            cur_shard=hvd.rank(),
            shard_count=hvd.size(),
            schema_fields=list(dict.fromkeys(fields)),
            steps_per_epoch_train=steps,
            steps_per_epoch_val=job.val_steps or 0,
            verbose=bool(job.verbose),
            dataset=job.store.get_parquet_dataset,
            shapes={name: known["shape"] for name, known in job.metadata.items()},
            **job.data_options,
        )

    def _train_epoch(self, batches: Any, steps: int) -> Logs:
        self.model.train()
        totals, minibatch = _Totals(self.job), self.job.minibatch
        for step in range(steps):
            inputs, labels, weights = self._prepared(next(batches))
            if minibatch is not None:
                outputs, loss = minibatch(
                    self.model, self.optimizer, self._aligned, self._loss, inputs, labels, weights
                )
                outputs, labels = self._aligned(outputs, labels)
            else:
                if step % self.job.passes_per_step == 0:
                    self.optimizer.zero_grad()
                outputs, labels = self._aligned(self.model(*inputs), labels)
                loss = self._loss(outputs, labels, weights)
                loss.backward()
                if (step + 1) % self.job.passes_per_step == 0:
                    self.optimizer.step()
            totals.add(loss, outputs, labels)
            if not self.output_shapes:
                self.output_shapes = [tuple(output.shape[1:]) for output in outputs]
        return totals.over_all_ranks("train")

    @torch.no_grad()
    def _validate(self, batches: Any) -> Logs:
        self.model.eval()
        totals = _Totals(self.job)
        for batch in islice(batches, self.job.val_steps):
            inputs, labels, weights = self._prepared(batch)
            outputs, labels = self._aligned(self.model(*inputs), labels)
            totals.add(self._loss(outputs, labels, weights), outputs, labels)
        return totals.over_all_ranks("validation")

    def _prepared(self, batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor | None]:
        job = self.job

        def tensors(names: Sequence[str], shapes: Sequence[Sequence[int]] | None) -> list[torch.Tensor]:
            made = [tensor_of(batch[name], self.dtype).to(self.device) for name in names]
            return [
                each.reshape(tuple(shape))
                for each, shape in zip(made, shapes or [each.shape for each in made], strict=True)
            ]

        weights = tensor_of(batch[job.weight], self.dtype).to(self.device, self.dtype) if job.weight else None
        return tensors(job.features, job.input_shapes), tensors(job.labels, job.label_shapes), weights

    def _aligned(
        self, outputs: Any, labels: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Outputs as a list; labels get the shape of theirs where both have the same number of values."""
        found = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        if len(found) != len(labels):
            raise InvalidRequestError(
                f"The model has {len(found)} outputs for the labels {list(self.job.labels)}."
            )
        return found, [
            label.reshape(output.shape) if output.numel() == label.numel() else label
            for output, label in zip(found, labels, strict=True)
        ]

    def _loss(
        self,
        outputs: Sequence[torch.Tensor],
        labels: Sequence[torch.Tensor],
        weights: torch.Tensor | None = None,
    ) -> Any:
        total: Any = 0.0
        for loss, share, output, label in zip(
            self.losses, self.job.loss_weights, outputs, labels, strict=True
        ):
            if weights is None:
                value = loss(output, label)
            else:
                value = (_each(loss, output, label).reshape(len(weights), -1).mean(1) * weights).mean()
            total = total + share * value
        return total

    # -- checkpoints and callbacks --------------------------------------------------------------------------------

    def _resume(self) -> int:
        """Load the run's checkpoint, which rank 0 reads for all. Returns the epoch to go on with."""
        found: dict[str, Any] | None = None
        path = self._checkpoint()
        if hvd.rank() == 0 and path is not None and self.job.store.exists(path):
            # Tensors and numbers only: a checkpoint that comes from elsewhere runs nothing.
            found = torch.load(io.BytesIO(self.job.store.read(path)), map_location="cpu", weights_only=True)
        found = hvd.broadcast_object(found, 0, name="hvdlab.spark.checkpoint")
        if found is None:
            return 0
        self.model.load_state_dict(found["model"])
        self.job.optimizer.load_state_dict(found["optimizer"])
        self.history = list(found["history"])
        return int(found["epoch"]) + 1

    def _checkpoint(self) -> str | None:
        place = self.job.remote.checkpoint_path
        return None if place is None else f"{place}/{self.job.remote.checkpoint_filename}"

    def _ended(self, epoch: int, logs: Logs) -> None:
        if hvd.rank():
            return
        path = self._checkpoint()
        if path is not None:
            buffer = io.BytesIO()
            state = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "epoch": epoch,
                "history": self.history,
            }
            torch.save(state, buffer)
            self.job.store.write(path, buffer.getvalue())
        if self.job.verbose:
            parts = [
                f"{name} loss {logs[name]['loss']:.4g}" for name in ("train", "validation") if name in logs
            ]
            print(f"epoch {epoch + 1}/{self.last}: {', '.join(parts)}", flush=True)
        for callback in self.job.callbacks:
            getattr(callback, "on_epoch_end", callback)(epoch, logs)


class _Totals:
    """Loss and metrics of an epoch, weighted by rows."""

    def __init__(self, job: Training) -> None:
        self._metrics = job.metrics
        self._rows = 0
        #: Tensors, not numbers: a GPU is not waited for at each batch.
        self._sums: list[Any] = [0.0] * (1 + sum(map(len, job.metrics)))

    def add(self, loss: Any, outputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> None:
        rows = len(labels[0])
        values = [loss]
        with torch.no_grad():
            for metrics, output, label in zip(self._metrics, outputs, labels, strict=True):
                values += [metric(output, label) for metric in metrics]
        for index, value in enumerate(values):
            number = value.detach().double() if isinstance(value, torch.Tensor) else float(value)
            self._sums[index] = self._sums[index] + number * rows
        self._rows += rows

    def over_all_ranks(self, what: str) -> Logs:
        sums = torch.tensor([*map(float, self._sums), self._rows], dtype=torch.float64)
        total = hvd.allreduce(sums, op=hvd.Sum, name=f"hvdlab.spark.{what}")
        loss, *metrics = (total[:-1] / total[-1]).tolist()
        values = iter(metrics)
        named = [{_name(metric): next(values) for metric in group} for group in self._metrics]
        return {"loss": loss, "all_metrics": named}


def dtype_of(model: Any) -> torch.dtype:
    """The type of a model's floating parameters."""
    return next(
        (each.dtype for each in model.parameters() if each.is_floating_point()), torch.get_default_dtype()
    )


def tensor_of(values: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """Floating values in the model's type, whole numbers as int64, without a copy where they are that."""
    if values.dtype.kind != "f":
        return torch.from_numpy(values.astype(np.int64))
    return torch.from_numpy(values if values.flags.writeable else values.copy()).to(dtype)


def _each(loss: Any, output: torch.Tensor, label: torch.Tensor) -> Any:
    """The loss of each row."""
    if not hasattr(loss, "reduction"):
        return loss(output, label, reduction="none")
    before, loss.reduction = loss.reduction, "none"
    try:
        return loss(output, label)
    finally:
        loss.reduction = before


def _on(loss: Any, device: torch.device) -> Any:
    return loss.to(device) if isinstance(loss, torch.nn.Module) else loss


def _on_cpu(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    return type(state)(map(_on_cpu, state)) if isinstance(state, list | tuple) else state


def _name(metric: Any) -> str:
    return str(getattr(metric, "__name__", type(metric).__name__))
