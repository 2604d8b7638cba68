"""Parameters of estimators and models, each with its setter and getter."""

from __future__ import annotations

from typing import Any, ClassVar

try:
    from pyspark.ml.param import Param, Params  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError(f"Estimators need pyspark ({error}): pip install 'hvdlab[spark]'") from error


def camel(name: str) -> str:
    """
    >>> camel("sample_weight_col")
    'SampleWeightCol'
    """
    return "".join(part.capitalize() for part in name.split("_"))


class HasAccessors(Params):  # type: ignore[misc]  # pyspark is not there where types are checked
    """Mixin that gives each parameter of a class its ``setX`` and ``getX``; ``SPELLINGS`` has other names that Horovod has for them."""

    SPELLINGS: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for param in [value for value in vars(cls).values() if isinstance(value, Param)]:
            for name in {camel(param.name), cls.SPELLINGS.get(param.name, camel(param.name))}:
                setter, getter = _accessors(param)
                for accessor, verb in ((setter, "set"), (getter, "get")):
                    accessor.__name__ = f"{verb}{name}"
                    accessor.__qualname__ = f"{cls.__qualname__}.{verb}{name}"
                    if accessor.__name__ not in vars(cls):
                        setattr(cls, accessor.__name__, accessor)

    def _set_given(self, given: dict[str, Any]) -> None:
        """Set the parameters that a constructor got; ``None`` leaves the default."""
        for name, value in given.items():
            if value is not None:
                self.set(self.getParam(name), value)


def _accessors(param: Any) -> tuple[Any, Any]:
    def setter(self: Any, value: Any) -> Any:
        self.set(self.getParam(param.name), value)
        return self

    def getter(self: Any) -> Any:
        return self.getOrDefault(param.name)

    setter.__doc__ = f"Set ``{param.name}``: {param.doc}. Returns the estimator or model."
    getter.__doc__ = f"``{param.name}``: {param.doc}."
    return setter, getter


def declared(name: str, doc: str) -> Any:
    """Return a parameter, for the body of a class."""
    return Param(Params._dummy(), name, doc)


class EstimatorParams(HasAccessors):
    """Parameters of all estimators."""

    SPELLINGS: ClassVar[dict[str, str]] = {
        "train_reader_num_workers": "TrainReaderNumWorker",
        "val_reader_num_workers": "ValReaderNumWorker",
        "inmemory_cache_all": "InMemoryCacheAll",
    }

    num_proc = declared("num_proc", "number of ranks")
    backend = declared("backend", "where ranks run, instead of num_proc")
    store = declared("store", "where data, checkpoints and logs are")
    model = declared("model", "what is trained")
    optimizer = declared("optimizer", "the optimizer of the model")
    loss = declared("loss", "a function or one for each label")
    loss_weights = declared("loss_weights", "the weight of each label's loss")
    metrics = declared("metrics", "functions of output and label")
    sample_weight_col = declared("sample_weight_col", "column of rows' weights in the loss")
    feature_cols = declared("feature_cols", "columns that the model gets")
    label_cols = declared("label_cols", "columns that it learns")
    continuous_cols = declared("continuous_cols", "features that are continuous; for data modules")
    categorical_cols = declared("categorical_cols", "features that are categories; for data modules")
    validation = declared("validation", "share of rows, or column of zeros and ones, for validation")
    gradient_compression = declared("gradient_compression", "a compression of hvdlab.torch.Compression")
    compress_sparse_cols = declared("compress_sparse_cols", "not there: True is refused")
    batch_size = declared("batch_size", "rows of a batch, on each rank")
    val_batch_size = declared("val_batch_size", "rows of a batch for validation; batch_size by default")
    epochs = declared("epochs", "passes over the rows")
    verbose = declared("verbose", "0 says nothing, 1 each epoch, 2 also how ranks start")
    callbacks = declared("callbacks", "called with epoch and logs after each epoch, on rank 0")
    random_seed = declared("random_seed", "of shuffling and torch")
    shuffle_buffer_size = declared("shuffle_buffer_size", "without effect; row groups are shuffled whole")
    shuffle = declared("shuffle", "whether rows to train on are shuffled")
    partitions_per_process = declared("partitions_per_process", "files for each rank")
    run_id = declared("run_id", "name of the run; one that has a checkpoint is continued")
    train_steps_per_epoch = declared(
        "train_steps_per_epoch", "batches of an epoch; by default those of all rows"
    )
    validation_steps_per_epoch = declared(
        "validation_steps_per_epoch", "batches of validation; by default all"
    )
    transformation_fn = declared("transformation_fn", "called with a pandas frame of each row group")
    transformation_edit_fields = declared(
        "transformation_edit_fields", "without effect; Arrow finds types itself"
    )
    transformation_removed_fields = declared("transformation_removed_fields", "without effect")
    train_reader_num_workers = declared("train_reader_num_workers", "without effect; one thread reads ahead")
    val_reader_num_workers = declared("val_reader_num_workers", "without effect; one thread reads ahead")
    reader_pool_type = declared("reader_pool_type", "without effect; one thread reads ahead")
    label_shapes = declared("label_shapes", "shape of each label, with the batch as -1")
    inmemory_cache_all = declared("inmemory_cache_all", "keep rows in memory after the first epoch")
    use_gpu = declared("use_gpu", "train on GPUs where there are some")
    mp_start_method = declared("mp_start_method", "without effect; no processes are started for reading")
    backward_passes_per_step = declared("backward_passes_per_step", "batches for each step of the optimizer")
    data_module = declared("data_module", "class of a DataModule that reads the rows")

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "num_proc": None, "backend": None, "store": None, "model": None, "optimizer": None, "loss": None,
        "loss_weights": None, "metrics": [], "sample_weight_col": None, "feature_cols": None, "label_cols": None,
        "continuous_cols": None, "categorical_cols": None, "validation": None, "gradient_compression": None,
        "compress_sparse_cols": False, "batch_size": 32, "val_batch_size": None, "epochs": 1, "verbose": 1,
        "callbacks": [], "random_seed": None, "shuffle_buffer_size": None, "shuffle": True,
        "partitions_per_process": 10, "run_id": None, "train_steps_per_epoch": None,
        "validation_steps_per_epoch": None, "transformation_fn": None, "transformation_edit_fields": None,
        "transformation_removed_fields": None, "train_reader_num_workers": 2, "val_reader_num_workers": 2,
        "reader_pool_type": "thread", "label_shapes": None, "inmemory_cache_all": False, "use_gpu": True,
        "mp_start_method": None, "backward_passes_per_step": 1, "data_module": None,
    }  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(**self.DEFAULTS)


class ModelParams(HasAccessors):
    """Parameters of all models that estimators return."""

    SPELLINGS: ClassVar[dict[str, str]] = {"label_columns": "LabelColoumns"}

    history = declared("history", "what training gave, by epoch")
    model = declared("model", "the trained model")
    feature_columns = declared("feature_columns", "columns that the model gets")
    label_columns = declared("label_columns", "columns that it has learnt")
    output_cols = declared("output_cols", "columns that transform adds")
    run_id = declared("run_id", "name of the run")
    metadata = declared("metadata", "shapes by column")

    def __init__(self) -> None:
        super().__init__()
        names = ("history", "model", "feature_columns", "label_columns", "output_cols", "run_id", "metadata")
        self._setDefault(**dict.fromkeys(names))
