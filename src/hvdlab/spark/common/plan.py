"""Plan of an estimator's training: its data and where ranks keep the result, for all frameworks. Needs no pyspark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdlab.spark.common.datamodule import DataModule
from hvdlab.spark.common.store import RemoteStore, Store
from hvdlab.spark.common.util import Metadata


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The parameters of an estimator that do not depend on the framework, as its ranks get them.

    Attributes:
        features, labels, weight: Columns.
        label_shapes: For each label the shape of a batch, with -1 for its rows.
        loss_weights: A factor for each label's loss.
        metadata: Shapes by column; empty if a transformation may change them.
        rows, val_rows: Rows of the data sets.
        batch_size, val_batch_size: Rows of a batch.
        epochs: Passes over the rows.
        train_steps, val_steps: Batches of an epoch, if the estimator has their number.
        passes_per_step: Batches for each step of the optimizer.
        compression: Of gradients.
        callbacks: As the framework understands them.
        store, remote: Where data and the run are.
        data_module, data_options: The data module that reads the rows, and its further arguments.
        seed: Of the framework's random numbers.
        use_gpu: Whether GPUs are used where there are some.
        verbose: How much is printed.
    """

    features: Sequence[str]
    labels: Sequence[str]
    weight: str | None
    label_shapes: Sequence[Sequence[int]] | None
    loss_weights: Sequence[float]
    metadata: Metadata
    rows: int
    val_rows: int
    batch_size: int
    val_batch_size: int
    epochs: int
    train_steps: int | None
    val_steps: int | None
    passes_per_step: int
    compression: Any
    callbacks: Sequence[Any]
    store: Store
    remote: RemoteStore
    data_module: type[DataModule]
    data_options: dict[str, Any]
    seed: int | None
    use_gpu: bool
    verbose: int

    def steps_per_epoch(self, size: int) -> int:
        """Return the number of batches of an epoch: the same on all ranks, and whole steps of the optimizer."""
        share = -(-self.rows // size)
        steps = self.train_steps or -(-share // self.batch_size)
        return -(-steps // self.passes_per_step) * self.passes_per_step

    def open_data(self, rank: int, size: int) -> DataModule:
        """Return a rank's data, as a context manager."""
        fields = [*self.features, *self.labels, *([self.weight] if self.weight else [])]
        return self.data_module(
            self.remote.train_data_path,
            self.remote.val_data_path,
            num_train_epochs=self.epochs,
            has_val=bool(self.val_rows),
            train_batch_size=self.batch_size,
            val_batch_size=self.val_batch_size,
            cur_shard=rank,
            shard_count=size,
            schema_fields=list(dict.fromkeys(fields)),
            steps_per_epoch_train=self.steps_per_epoch(size),
            steps_per_epoch_val=self.val_steps or 0,
            verbose=bool(self.verbose),
            dataset=self.store.get_parquet_dataset,
            shapes={name: known["shape"] for name, known in self.metadata.items()},
            **self.data_options,
        )

    def epochs_until(self, first: int) -> int:
        """Return the epoch before which a run that continues with ``first`` ends: a complete run is trained for as many epochs again."""
        return first + self.epochs if first >= self.epochs else self.epochs

    @property
    def checkpoint(self) -> str | None:
        """Return where the run's checkpoint is; ``None`` if the store keeps none."""
        place = self.remote.checkpoint_path
        return None if place is None else f"{place}/{self.remote.checkpoint_filename}"

    def read_checkpoint(self) -> bytes | None:
        """Return the run's checkpoint, if there is one; for rank 0."""
        path = self.checkpoint
        return self.store.read(path) if path is not None and self.store.exists(path) else None

    def write_checkpoint(self, data: bytes) -> None:
        """Keep a checkpoint in place of the one before, if the store keeps any; for rank 0."""
        path = self.checkpoint
        if path is not None:
            self.store.write(path, data)
