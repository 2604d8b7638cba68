"""An estimator of Spark's ML pipelines that has Lightning train a module on ranks."""

from __future__ import annotations

from typing import Any, ClassVar

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.spark.common.backend import Backend
from hvdlab.spark.common.estimator import new_run
from hvdlab.spark.common.params import declared
from hvdlab.spark.lightning.remote import LightningTrained, LightningTraining, lightning, package_of
from hvdlab.spark.torch.estimator import ModuleEstimator, TorchModel

__all__ = ["MIN_PL_VERSION", "LightningEstimator", "TorchModel"]

MIN_PL_VERSION = "1.3.8"
"""The oldest Lightning that Horovod's estimator takes, for programs that compare their own with it. hvdlab's needs 2.0."""


class LightningEstimator(ModuleEstimator):
    """Estimator that trains a LightningModule on ranks, or a module of torch by Lightning; ``horovod.spark.lightning.TorchEstimator``.

    Its parameters are keyword arguments, and each has ``setX`` and ``getX``. ``training_step`` and ``validation_step`` get a dictionary
    of tensors by column: floating columns in the type of the model's parameters, whole numbers as int64. Gradients are averaged over all ranks,
    and so are metrics that the module logs with ``sync_dist=True``.

    Args:
        num_proc: Number of ranks in Spark's tasks; by default ``spark.default.parallelism``.
        backend: Where ranks run, instead of ``num_proc``.
        store: A :class:`~hvdlab.spark.common.store.Store` that driver and executors reach.
        model: A LightningModule of ``lightning`` or ``pytorch_lightning``; or a module of torch, called with one tensor for each feature.
        optimizer, loss, loss_constructors, metrics, loss_weights, sample_weight_col: For a module of torch, as of
            :class:`~hvdlab.spark.torch.TorchEstimator`. A LightningModule has its own.
        feature_cols, label_cols: Columns: numbers, arrays of one length, or vectors.
        input_shapes, label_shapes: For each feature or label the shape of a batch, with -1 for its rows.
        validation: Share of rows, chosen at random, or column of zeros and ones.
        batch_size, val_batch_size: Rows of a batch, on each rank.
        epochs: Passes over the rows. A run that ended in the middle is continued up to here; one that is complete, by as many.
        run_id: Name of the run in the store; by default a new one. One that has a checkpoint is continued.
        callbacks: Lightning's, on all ranks.
        logger: Lightning's, on all ranks. By default a CSV file and, where ``tensorboard`` or ``tensorboardX`` is installed, TensorBoard's
            files, which are in the store at ``store.get_logs_path(run_id)`` from each epoch's end on.
        log_every_n_steps, profiler: As the trainer accepts them.
        terminate_on_nan: Whether a loss that is not finite ends the training.
        num_gpus: 0 keeps ranks from using GPUs; otherwise each has its own.
        trainer_args: Further arguments of ``Trainer``, or others than those that are chosen here.
        data_module: A class derived from :class:`~hvdlab.spark.common.datamodule.DataModule`, or a LightningDataModule that has its arguments.
        kwargs: The other parameters of :class:`~hvdlab.spark.common.params.EstimatorParams`.

    Raises:
        TypeError: There is no such parameter.
    """

    train_minibatch_fn = declared("train_minibatch_fn", "not there: training_step is for that")
    num_gpus = declared("num_gpus", "0 keeps ranks from using GPUs")
    logger = declared(
        "logger", "Lightning's logger; by default a CSV file and TensorBoard's files in the store"
    )
    log_every_n_steps = declared("log_every_n_steps", "steps between two lines of the log")
    loader_num_epochs = declared(
        "loader_num_epochs", "without effect; rows are read as often as there are epochs"
    )
    terminate_on_nan = declared("terminate_on_nan", "whether a loss that is not finite ends the training")
    profiler = declared("profiler", "Lightning's profiler")
    trainer_args = declared("trainer_args", "further arguments of the trainer")
    debug_data_loader = declared("debug_data_loader", "without effect")
    train_async_data_loader_queue_size = declared(
        "train_async_data_loader_queue_size", "without effect; two row groups are read ahead"
    )
    val_async_data_loader_queue_size = declared(
        "val_async_data_loader_queue_size", "without effect; two row groups are read ahead"
    )

    OWN_DEFAULTS: ClassVar[dict[str, Any]] = {
        "input_shapes": None, "loss_constructors": None, "train_minibatch_fn": None, "num_gpus": None, "logger": None,
        "log_every_n_steps": 50, "loader_num_epochs": None, "terminate_on_nan": False, "profiler": None, "trainer_args": None,
        "debug_data_loader": False, "train_async_data_loader_queue_size": None, "val_async_data_loader_queue_size": None,
    }  # fmt: skip

    def _checked(self, dataset: Any) -> Backend:
        backend = super()._checked(dataset)
        lightning(package_of(self.getModel()))  # here already, and not on the ranks alone
        if self.getTrainMinibatchFn():
            raise InvalidRequestError("train_minibatch_fn is not there with Lightning; write training_step.")
        if package_of(self.getModel()) is None:
            self._check_objective()
        return backend

    def _train_on(self, backend: Backend, index: int | None, rows: int, val_rows: int, metadata: Any) -> Any:
        run_id = self.getRunId() or new_run()
        training = LightningTraining(
            **self._plan(run_id, index, rows, val_rows, metadata),
            num_gpus=self.getNumGpus(),
            logger=self.getLogger(),
            log_every_n_steps=self.getLogEveryNSteps(),
            terminate_on_nan=self.getTerminateOnNan(),
            profiler=self.getProfiler(),
            trainer_args=dict(self.getTrainerArgs() or {}),
        )
        trained: LightningTrained = next(each for each in backend.run(training) if each is not None)
        # With a module of torch there is one optimizer, the estimator's; a LightningModule makes its own.
        optimizer_state = trained.optimizers[0] if trained.optimizers else None
        return self._model(run_id, metadata, trained.model, optimizer_state, trained.history)
