"""The ranks' side of a :class:`LightningEstimator`: read a share of the rows, have Lightning's trainer train, keep checkpoints.

Needs no pyspark. The trainers of all ranks train together by a strategy on hvdlab's collectives. Lightning has two packages
with classes of their own, ``lightning.pytorch`` and ``pytorch_lightning``; a module's own one is used.
"""

from __future__ import annotations

import functools
import importlib
import io
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import hvdlab.torch as hvd
from hvdlab.collectives.errors import InvalidRequestError, StartError
from hvdlab.spark.common.datamodule import Batch
from hvdlab.spark.common.plan import TrainingPlan
from hvdlab.spark.torch.objective import Objective, name_of
from hvdlab.spark.torch.remote import on_cpu

Logs = dict[str, Any]

_VALIDATION = "val"
"""The beginning of the names of metrics that are computed from rows for validation."""


@dataclass(frozen=True)
class LightningTrained:
    """Result of rank 0.

    Attributes:
        model: The module's state, on the CPU.
        optimizers: The states of its optimizers.
        history: For each epoch ``epoch``, ``train`` and, with validation, ``validation``.
    """

    model: dict[str, Any]
    optimizers: list[dict[str, Any]]
    history: list[Logs]


@dataclass(frozen=True, kw_only=True)
class LightningTraining(TrainingPlan):
    """A function for ranks.

    Attributes:
        model: A LightningModule, or a module of torch, which gets ``optimizer`` and ``losses``.
        logger, profiler: Lightning's.
        trainer_args: Further arguments of the trainer, or others.
    """

    model: Any
    optimizer: Any
    losses: Sequence[Any]
    metrics: Sequence[Sequence[Any]]
    input_shapes: Sequence[Sequence[int]] | None
    num_gpus: int | None
    logger: Any
    log_every_n_steps: int
    terminate_on_nan: bool
    profiler: Any
    trainer_args: dict[str, Any]

    def __call__(self) -> LightningTrained | None:
        """Train; only rank 0 returns something."""
        hvd.init()
        try:
            return _Trainer(self).train()
        finally:
            hvd.shutdown()


class _Trainer:
    def __init__(self, job: LightningTraining) -> None:
        self.job = job
        self.package = lightning(package_of(job.model))
        if job.seed is not None:
            self.package.seed_everything(job.seed + hvd.rank())
        cuda = job.use_gpu and torch.cuda.is_available() and job.num_gpus != 0
        self.device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")
        self.objective = Objective(job, job.model, job.losses, job.input_shapes, self.device)
        self.module = job.model if package_of(job.model) else _module(self.package, job, self.objective)
        self.history: list[Logs] = []

    def train(self) -> LightningTrained | None:
        job = self.job
        with job.remote.get_local_output_dir() as place, tempfile.TemporaryDirectory() as files:
            self.files = Path(files)
            resumed, first = self._resumed()
            self.last = job.epochs_until(first)
            with job.open_data(hvd.rank(), hvd.size()) as data:
                trainer = self._trainer(place)
                if hasattr(data, "train_dataloader"):  # a LightningDataModule of the user's
                    trainer.fit(self.module, datamodule=data, ckpt_path=resumed, weights_only=True)
                else:
                    self._fit(trainer, data, resumed)
            if trainer.is_global_zero and job.checkpoint is not None:
                job.remote.sync(place)  # with the loggers' files from after the last epoch's checkpoint
        if hvd.rank():
            return None
        optimizers = [on_cpu(optimizer.state_dict()) for optimizer in trainer.optimizers]
        module = self.module if package_of(job.model) else job.model
        return LightningTrained(on_cpu(module.state_dict()), optimizers, self.history)

    def _fit(self, trainer: Any, data: Any, resumed: str | None) -> None:
        batches = iter(data.train_data())
        try:
            trainer.fit(
                self.module,
                train_dataloaders=_TrainingLoader(
                    batches, self.job.steps_per_epoch(hvd.size()), self.objective
                ),
                val_dataloaders=_ValidationLoader(data, self._val_steps(), self.objective)
                if self.job.val_rows
                else None,
                ckpt_path=resumed,
                weights_only=True,
            )
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()

    def _val_steps(self) -> int:
        """Return as many batches as the rank with the fewest rows has: the module may call collectives in each."""
        fewest = self.job.val_rows // hvd.size()
        if not fewest:
            raise InvalidRequestError(
                f"There are {self.job.val_rows} rows for validation, for {hvd.size()} ranks."
            )
        steps = -(-fewest // self.job.val_batch_size)
        return min(steps, self.job.val_steps or steps)

    def _trainer(self, place: str) -> Any:
        job, package = self.job, self.package
        given = dict(job.trainer_args)
        passes = int(given.pop("accumulate_grad_batches", job.passes_per_step))
        if job.steps_per_epoch(hvd.size()) % passes:
            raise InvalidRequestError(
                f"accumulate_grad_batches={passes} does not divide the {job.steps_per_epoch(hvd.size())} batches of an epoch; give "
                "backward_passes_per_step to the estimator instead, which rounds them up."
            )
        logger: Any = job.logger
        if logger is None:
            logger = _loggers(package, place, job.remote.logs_subdir)
        # After the user's callbacks, which may log.
        own = [_epoch_reporter(package, self, place)]
        if job.terminate_on_nan:
            own.append(_nan_guard(package))
        callbacks = [*job.callbacks, *given.pop("callbacks", ()), *own]
        settings: dict[str, Any] = {
            "max_epochs": self.last,
            "accelerator": "gpu" if self.device.type == "cuda" else "cpu",
            "devices": [self.device.index] if self.device.type == "cuda" else 1,
            "strategy": strategy_class(package)(self.device, job.compression, passes),
            "accumulate_grad_batches": passes,
            "logger": logger,
            "log_every_n_steps": job.log_every_n_steps,
            "profiler": job.profiler,
            "default_root_dir": place,
            # The run's checkpoints are in the store.
            "enable_checkpointing": any(isinstance(each, package.callbacks.Checkpoint) for each in callbacks),
            "enable_progress_bar": False,
            "enable_model_summary": job.verbose > 1,
            "num_sanity_val_steps": 0,
            # Data modules get their share as arguments.
            "use_distributed_sampler": False,
            "callbacks": callbacks,
        }
        return package.Trainer(**{**settings, **given})

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _resumed(self) -> tuple[str | None, int]:
        """Return a file with the run's checkpoint, which rank 0 reads for all, and the epoch to go on with."""
        data = self.job.read_checkpoint() if hvd.rank() == 0 else None
        data = hvd.broadcast_object(data, 0, name="hvdlab.spark.checkpoint")
        if data is None:
            return None, 0
        # Tensors and numbers only: a checkpoint that comes from elsewhere runs nothing.
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        file = self.files / "resumed.ckpt"
        file.write_bytes(data)
        return str(file), int(found["epoch"]) + 1

    def ended(self, trainer: Any, place: str) -> None:
        """Store the results of an epoch."""
        # Lightning adds these endings to the names of metrics that are logged by step and by epoch.
        values = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if not name.endswith("_step")
        }
        known = {name.removesuffix("_epoch"): value for name, value in values.items()}
        logs: Logs = {"epoch": trainer.current_epoch, "train": {}}
        if self.job.val_rows:
            logs["validation"] = {}
        for name, value in known.items():
            logs["validation" if name.startswith(_VALIDATION) and self.job.val_rows else "train"][name] = (
                value
            )
        self.history.append(logs)
        job = self.job
        if job.checkpoint is not None:
            file = self.files / "kept.ckpt"
            # On all ranks: only rank 0 writes, but the method ends with a barrier of the strategy.
            trainer.save_checkpoint(file)
            if trainer.is_global_zero:
                job.write_checkpoint(file.read_bytes())
                job.remote.sync(place)  # the logs
        if job.verbose and trainer.is_global_zero:
            words = [f"{name} {value:.4g}" for name, value in known.items()]
            print(f"epoch {trainer.current_epoch + 1}/{self.last}: {', '.join(words)}", flush=True)


def _loggers(package: Any, place: str, subdirectory: str) -> list[Any]:
    """Return the default loggers, for a user without own ones: a CSV file, and TensorBoard's files where one of the packages that write them is there."""
    loggers = [package.loggers.CSVLogger(place, name=subdirectory, version="")]
    if any(find_spec(name) is not None for name in ("tensorboard", "tensorboardX")):
        loggers.append(package.loggers.TensorBoardLogger(place, name=subdirectory, version=""))
    return loggers


class _TrainingLoader:
    """Batches of an epoch as tensors; each pass goes on where the last one has stopped."""

    def __init__(self, batches: Iterator[Batch], steps: int, objective: Objective) -> None:
        self._batches, self._steps, self._objective = batches, steps, objective

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        return map(self._objective.tensors, islice(self._batches, self._steps))


class _ValidationLoader:
    """First batches of the data for validation as tensors, the same on each pass."""

    def __init__(self, data: Any, steps: int, objective: Objective) -> None:
        self._data, self._steps, self._objective = data, steps, objective

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        return map(self._objective.tensors, islice(self._data.val_data(), self._steps))


def _module(package: Any, job: LightningTraining, objective: Objective) -> Any:
    """Return a LightningModule around a module of torch, its losses, metrics and optimizer."""

    class Wrapped(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def forward(self, *inputs: Any) -> Any:
            return self.model(*inputs)

        def configure_optimizers(self) -> Any:
            return job.optimizer

        def training_step(self, batch: Any, index: int) -> Any:
            return self._step(batch, "train")

        def validation_step(self, batch: Any, index: int) -> None:
            self._step(batch, _VALIDATION)

        def _step(self, batch: Any, what: str) -> Any:
            inputs, labels, weights = objective.parts(batch)
            outputs, labels = objective.aligned(self(*inputs), labels)
            loss = objective.loss(outputs, labels, weights)
            values = {"loss": loss.detach()}
            with torch.no_grad():
                for label, metrics, output, wanted in zip(
                    job.labels, job.metrics, outputs, labels, strict=True
                ):
                    head = f"{label}_" if len(job.labels) > 1 else ""
                    values |= {f"{head}{name_of(metric)}": metric(output, wanted) for metric in metrics}
            self.log_dict(
                {f"{what}_{name}": value for name, value in values.items()},
                on_step=False,
                on_epoch=True,
                sync_dist=True,
                batch_size=len(labels[0]),
            )
            return loss

    return Wrapped()


def _epoch_reporter(package: Any, owner: _Trainer, place: str) -> Any:
    """Return a callback that reports the end of each epoch; its state is in checkpoints."""

    class EpochReporter(package.Callback):  # type: ignore[misc]
        state_key = "hvdlab.spark"

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            owner.ended(trainer, place)

        def state_dict(self) -> dict[str, Any]:
            return {"history": owner.history}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            owner.history = list(state["history"])

    return EpochReporter()


def _nan_guard(package: Any) -> Any:
    class NanGuard(package.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs
            if loss is not None and not math.isfinite(float(loss)):
                raise ValueError(
                    f"The loss of batch {index} of epoch {trainer.current_epoch} is {float(loss)}."
                )

    return NanGuard()


@functools.cache
def strategy_class(package: Any) -> type:
    """Return the strategy for one of Lightning's two packages.

    It is a strategy for a single device: each rank's trainer has its own, and learns of the others only by rank, size and reductions.
    """
    from_rank_zero = package.utilities.rank_zero.rank_zero_only

    class HvdlabStrategy(package.strategies.SingleDeviceStrategy):  # type: ignore[misc]
        """Strategy that reduces gradients over all ranks before an optimizer's step, and values logged with ``sync_dist=True``.

        Args:
            device: This rank's device.
            compression: Of the gradients.
            passes_per_step: Batches for each step of an optimizer, as the trainer accumulates them.
        """

        strategy_name = "hvdlab"
        optimizers: list[Any]

        def __init__(self, device: torch.device, compression: Any = None, passes_per_step: int = 1) -> None:
            super().__init__(device)
            self.global_rank, self.local_rank, self.world_size = hvd.rank(), hvd.local_rank(), hvd.size()
            self._compression, self._passes = compression or hvd.Compression.none, passes_per_step
            # Lightning reads this at its import from variables such as RANK, and counts a process without them
            # as rank 0.
            from_rank_zero.rank = hvd.rank()

        def setup(self, trainer: Any) -> None:
            super().setup(trainer)
            hvd.broadcast_parameters(self.lightning_module.state_dict(), root_rank=0)

        def setup_optimizers(self, trainer: Any) -> None:
            super().setup_optimizers(trainer)
            names = list(self.lightning_module.named_parameters())
            self.optimizers = [
                hvd.DistributedOptimizer(
                    optimizer,
                    named_parameters=names,
                    compression=self._compression,
                    backward_passes_per_step=self._passes,
                )
                for optimizer in self.optimizers
            ]

        def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
            def reduced() -> Any:
                # Here and not in the optimizer's step: the trainer clips gradients between the two.
                loss = closure()
                optimizer.synchronize()
                return loss

            # The closure has synchronized: step() must not wait for the same reductions again.
            with optimizer.skip_synchronize():
                return super().optimizer_step(optimizer, reduced, model, **kwargs)

        def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
            values = tensor if isinstance(tensor, torch.Tensor) else torch.tensor(tensor)
            word = str(reduce_op or "mean").lower().rpartition(".")[2]
            operations = {"mean": hvd.Average, "avg": hvd.Average, "sum": hvd.Sum}
            operations |= {"min": hvd.Min, "max": hvd.Max}
            if word not in operations:
                raise ValueError(f"reduce_op={reduce_op!r}: it is mean, sum, min or max.")
            if word == "mean" and not values.is_floating_point():
                values = values.double()
            return hvd.allreduce(values, op=operations[word])

        def all_gather(
            self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
        ) -> torch.Tensor:
            # Lightning expects a new first axis, one entry for each rank.
            gathered: torch.Tensor = hvd.allgather(tensor[None])
            return gathered

        def barrier(self, name: str | None = None) -> None:
            hvd.barrier()

        def broadcast(self, obj: Any, src: int = 0) -> Any:
            return hvd.broadcast_object(obj, src)

        @property
        def is_distributed(self) -> bool:
            # Without this the trainer ignores `sync_dist`.
            return bool(self.world_size > 1)

        @property
        def is_global_zero(self) -> bool:
            return bool(self.global_rank == 0)

    return HvdlabStrategy


_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def package_of(model: Any) -> str | None:
    """Return the package whose ``LightningModule`` a module is; ``None`` for a module of torch alone."""
    for kind in type(model).__mro__:
        for name in _PACKAGES:
            if kind.__name__ == "LightningModule" and kind.__module__.startswith(f"{name}."):
                return name
    return None


def lightning(name: str | None) -> Any:
    """Return the package of this name, or whichever is installed."""
    found: ImportError | None = None
    for each in [name] if name else _PACKAGES:
        try:
            return importlib.import_module(each)
        except ImportError as error:
            found = error
    raise StartError(f"The estimator needs Lightning ({found}): pip install lightning") from found
