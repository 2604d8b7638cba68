"""The ranks' side of a :class:`TorchEstimator`: read a share of the rows, train, and, on rank 0, keep checkpoints. Needs no pyspark."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

import hvdlab.torch as hvd
from hvdlab.spark.common.plan import TrainingPlan
from hvdlab.spark.torch.objective import Objective, name_of

Logs = dict[str, Any]

_TOGETHER = 1 << 20
"""Up to so many bytes of gradients, one operation reduces all: several cost more than they could overlap with the backward pass."""
_FOLDED = 256
"""Batches whose losses are kept before they are added up."""


@dataclass(frozen=True)
class Trained:
    """Result of rank 0.

    Attributes:
        model, optimizer: Their states, on the CPU.
        history: For each epoch ``epoch``, ``train`` and, with validation, ``validation``.
        output_shapes: The shape of a row's output, for each label.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any]
    history: list[Logs]
    output_shapes: list[tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Training(TrainingPlan):
    """A function for ranks. Model and optimizer are pickled together, so the optimizer's parameters stay the model's."""

    model: Any
    optimizer: Any
    losses: Sequence[Any]
    metrics: Sequence[Sequence[Any]]
    input_shapes: Sequence[Sequence[int]] | None
    minibatch: Callable[..., Any] | None

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
        self.objective = Objective(job, self.model, job.losses, job.input_shapes, self.device)
        self.history: list[Logs] = []
        self.output_shapes: list[tuple[int, ...]] = []
        self.first = self._resume()
        self.last = job.epochs_until(self.first)
        self.optimizer: Any = self._optimizer()

    def _optimizer(self) -> Any:
        """Return the optimizer, which reduces gradients unless this rank is alone and has nothing to reduce, compress or add up."""
        job = self.job
        if hvd.size() == 1 and job.passes_per_step == 1 and not job.compression and job.minibatch is None:
            return job.optimizer
        return hvd.DistributedOptimizer(
            job.optimizer,
            named_parameters=self.model.named_parameters(),
            compression=job.compression or hvd.Compression.none,
            backward_passes_per_step=job.passes_per_step,
            groups=1 if _bytes_of_gradients(self.model) <= _TOGETHER else None,
        )

    def train(self) -> Trained | None:
        job = self.job
        steps = job.steps_per_epoch(hvd.size())
        with job.open_data(hvd.rank(), hvd.size()) as data:
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
        state, optimizer = on_cpu(self.model.state_dict()), on_cpu(self.optimizer.state_dict())
        return Trained(state, optimizer, self.history, self.output_shapes)

    def _train_epoch(self, batches: Any, steps: int) -> Logs:
        self.model.train()
        totals, minibatch, objective = _Totals(self.job), self.job.minibatch, self.objective
        for step in range(steps):
            inputs, labels, weights = objective.prepared(next(batches))
            if minibatch is not None:
                outputs, loss = minibatch(
                    self.model, self.optimizer, objective.aligned, objective.loss, inputs, labels, weights
                )
                outputs, labels = objective.aligned(outputs, labels)
            else:
                if step % self.job.passes_per_step == 0:
                    self.optimizer.zero_grad()
                outputs, labels = objective.aligned(self.model(*inputs), labels)
                loss = objective.loss(outputs, labels, weights)
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
        totals, objective = _Totals(self.job), self.objective
        for batch in islice(batches, self.job.val_steps):
            inputs, labels, weights = objective.prepared(batch)
            outputs, labels = objective.aligned(self.model(*inputs), labels)
            totals.add(objective.loss(outputs, labels, weights), outputs, labels)
        return totals.over_all_ranks("validation")

    # -- checkpoints and callbacks --------------------------------------------------------------------------------

    def _resume(self) -> int:
        """Load the run's checkpoint, which rank 0 reads for all. Returns the epoch to go on with."""
        found: dict[str, Any] | None = None
        if hvd.rank() == 0 and (data := self.job.read_checkpoint()) is not None:
            # Tensors and numbers only: a checkpoint that comes from elsewhere runs nothing.
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        found = hvd.broadcast_object(found, 0, name="hvdlab.spark.checkpoint")
        if found is None:
            return 0
        self.model.load_state_dict(found["model"])
        self.job.optimizer.load_state_dict(found["optimizer"])
        self.history = list(found["history"])
        return int(found["epoch"]) + 1

    def _ended(self, epoch: int, logs: Logs) -> None:
        if hvd.rank():
            return
        if self.job.checkpoint is not None:
            buffer = io.BytesIO()
            state = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "epoch": epoch,
                "history": self.history,
            }
            torch.save(state, buffer)
            self.job.write_checkpoint(buffer.getvalue())
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
        self._sums = torch.zeros(2 + sum(map(len, job.metrics)), dtype=torch.float64)
        #: Of the last batches the rows, and loss and metrics. Tensors, not numbers: a GPU is not waited for at each batch.
        self._rows: list[int] = []
        self._values: list[list[torch.Tensor]] = []

    def add(self, loss: Any, outputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> None:
        rows = len(labels[0])
        values = [loss]
        with torch.no_grad():
            for metrics, output, label in zip(self._metrics, outputs, labels, strict=True):
                values += [metric(output, label) for metric in metrics]
        self._rows.append(rows)
        self._values.append([torch.as_tensor(value).detach() for value in values])
        if len(self._rows) == _FOLDED:
            self._fold()

    def _fold(self) -> None:
        """Add up the kept values: a few operations for many batches."""
        if not self._rows:
            return
        rows = torch.tensor(self._rows, dtype=torch.float64)
        for index, values in enumerate(zip(*self._values, strict=True)):
            self._sums[index] += rows @ torch.stack(values).reshape(-1).double().cpu()
        self._sums[-1] += rows.sum()
        self._rows.clear()
        self._values.clear()

    def over_all_ranks(self, what: str) -> Logs:
        self._fold()
        total = hvd.allreduce(self._sums, op=hvd.Sum, name=f"hvdlab.spark.{what}")
        loss, *metrics = (total[:-1] / total[-1]).tolist()
        values = iter(metrics)
        named = [{name_of(metric): next(values) for metric in group} for group in self._metrics]
        return {"loss": loss, "all_metrics": named}


def _bytes_of_gradients(model: Any) -> int:
    return sum(each.numel() * each.element_size() for each in model.parameters() if each.requires_grad)


def on_cpu(state: Any) -> Any:
    """Return a state dictionary whose tensors are on the CPU."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if isinstance(state, dict):
        return {key: on_cpu(value) for key, value in state.items()}
    return type(state)(map(on_cpu, state)) if isinstance(state, list | tuple) else state
