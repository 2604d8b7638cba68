"""From a data frame to Parquet in a store, and its metadata."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.system import host_key
from hvdlab.spark.common.datamodule import arrays_of
from hvdlab.spark.common.store import Store, is_databricks

__all__ = [
    "check_shape_compatibility",
    "check_validation",
    "clear_training_cache",
    "get_dataset_properties",
    "get_output_cols",
    "get_simple_meta_from_parquet",
    "host_hash",
    "is_databricks",
    "prepare_data",
    "to_list",
]

Metadata = dict[str, dict[str, Any]]
"""By column: ``shape`` of a row's value (``()`` for numbers) and its ``dtype`` as numpy names it."""


@dataclass
class _Written:
    """A data frame that is in a store. A reference to it is kept, so that no other frame gets the same ``id()``."""

    frame: Any
    index: int
    properties: tuple[int, int | None, Metadata, float] | None = None


_lock = threading.Lock()
_written: dict[tuple[Any, ...], _Written] = {}
_indexes = itertools.count()


def clear_training_cache() -> None:
    """Forget which data frames were written, so that they are written again."""
    with _lock:
        _written.clear()


def host_hash(salt: str | None = None) -> str:
    """Return a text that processes of one host share, as Horovod's spark jobs order their ranks by."""
    return hashlib.sha256(f"{host_key()}-{salt or ''}".encode()).hexdigest()[:32]


def to_list(var: Any, length: int) -> list[Any] | None:
    """Return ``var`` for each of so many labels; ``None`` stays. A list of one is repeated.

    Raises:
        ValueError: It is a list of another length.
    """
    if var is None:
        return None
    found = list(var) if isinstance(var, list | tuple) else [var]
    if len(found) == 1:
        found *= length
    if len(found) != length:
        raise InvalidRequestError(f"There are {len(found)} values for {length} labels: {found!r}.")
    return found


def get_output_cols(label_cols: Sequence[str], output_cols: Sequence[str] | None = None) -> list[str]:
    """Return the columns that a model adds: ``<label>__output`` unless named."""
    return list(output_cols) if output_cols else [f"{label}__output" for label in label_cols]


def check_validation(validation: float | str | None, df: Any = None) -> None:
    """Raise ``ValueError`` unless it is a share in [0, 1) or a column."""
    if validation is None:
        return
    if isinstance(validation, str):
        if df is not None and validation not in df.columns:
            raise InvalidRequestError(
                f"validation={validation!r} is no column of the data frame, which has {df.columns}."
            )
    elif isinstance(validation, bool) or not isinstance(validation, int | float) or not 0 <= validation < 1:
        raise InvalidRequestError(
            f"validation={validation!r} is neither a share in [0, 1) nor a column of zeros and ones."
        )


def check_columns(known: Sequence[str], wanted: Sequence[str], where: str) -> None:
    """Raise ``ValueError`` with the names of columns that are not there."""
    if missing := [name for name in wanted if name not in known]:
        raise InvalidRequestError(f"Columns {missing} are not in the {where}, which has {list(known)}.")


def check_shape_compatibility(
    metadata: Metadata,
    feature_columns: Sequence[str],
    label_columns: Sequence[str],
    input_shapes: Sequence[Sequence[int]] | None = None,
    output_shapes: Sequence[Sequence[int]] | None = None,
    label_shapes: Sequence[Sequence[int]] | None = None,
) -> None:
    """Raise ``ValueError`` if values of columns can't have these shapes, in which -1 is the batch."""
    given = (
        ("input_shapes", "features", feature_columns, input_shapes),
        ("output_shapes", "labels", label_columns, output_shapes),
        ("label_shapes", "labels", label_columns, label_shapes),
    )
    for name, what, columns, shapes in given:
        if shapes is None:
            continue
        if len(shapes) != len(columns):
            raise InvalidRequestError(
                f"{name} has {len(shapes)} shapes for {len(columns)} {what} {list(columns)}."
            )
        for column, shape in zip(columns, shapes, strict=True):
            size = int(np.prod(metadata[column]["shape"]))
            # The batch stands as -1 in the shape, which only turns the sign of the product.
            asked = int(abs(np.prod(shape)))
            if size != asked:
                raise InvalidRequestError(
                    f"Column {column!r} has {size} values in a row, and {name} {list(shape)} asks for {asked}."
                )


def get_simple_meta_from_parquet(
    store: Store,
    label_columns: Sequence[str],
    feature_columns: Sequence[str],
    sample_weight_col: str | None = None,
    dataset_idx: int | None = None,
    columns: Sequence[str] | None = None,
) -> tuple[int, int, Metadata, float]:
    """Return the properties of Parquet in the store: rows to train on, rows for validation, shapes by column, bytes of a row.

    Shapes are those of the first row group; a rank that finds another shape refuses it.

    Args:
        columns: The columns whose shapes are determined; by default features, labels and weights.

    Raises:
        ValueError: There is no data, or no rows, or columns are missing.
    """
    place = store.get_train_data_path(dataset_idx)
    if not store.is_parquet_dataset(place):
        raise InvalidRequestError(f"There is no Parquet data set at {place}.")
    train = store.get_parquet_dataset(place)
    wanted = [*feature_columns, *label_columns, *([sample_weight_col] if sample_weight_col else [])]
    wanted = list(dict.fromkeys(wanted if columns is None else columns))
    check_columns(train.schema.names, wanted, f"data set {place}")
    groups = [group for each in train.get_fragments() for group in each.row_groups]
    rows = sum(group.num_rows for group in groups)
    if not rows:
        raise InvalidRequestError(f"The data set {place} has no rows to train on.")
    size = sum(group.total_byte_size for group in groups) / rows
    val = store.get_val_data_path(dataset_idx)
    val_rows = store.get_parquet_dataset(val).count_rows() if store.is_parquet_dataset(val) else 0
    first = train.head(1, columns=wanted)
    arrays = arrays_of(first, f"the data set {place}")
    metadata = {
        name: {"shape": values.shape[1:], "dtype": str(values.dtype)} for name, values in arrays.items()
    }
    return rows, val_rows, metadata, size


@contextlib.contextmanager
def prepare_data(
    num_processes: int,
    store: Store,
    df: Any,
    label_columns: Sequence[str],
    feature_columns: Sequence[str],
    validation: float | str | None = None,
    sample_weight_col: str | None = None,
    compress_sparse: bool = False,
    partitions_per_process: int = 10,
    verbose: int = 0,
) -> Iterator[int]:
    """Write a data frame into the store, for so many ranks, unless this very frame was written before; gives the data set's index.

    Vectors become arrays. Rows for validation are chosen by ``validation``: a share, at random, or a column of zeros and ones.

    Raises:
        ValueError: Columns are missing, the column that chooses rows for validation has nulls, numbers make no sense, or
            there are no rows.
    """
    if compress_sparse:
        raise InvalidRequestError(
            "compress_sparse_cols is not there: sparse vectors are written as arrays, which Parquet packs."
        )
    if num_processes < 1 or partitions_per_process < 1:
        raise InvalidRequestError(
            f"There must be ranks and partitions: num_proc={num_processes}, partitions_per_process={partitions_per_process}."
        )
    check_validation(validation, df)
    columns = [*feature_columns, *label_columns, *([sample_weight_col] if sample_weight_col else [])]
    check_columns(df.columns, columns, "data frame")
    key = (
        id(df),
        store.get_train_data_path(),
        tuple(columns),
        validation,
        num_processes * partitions_per_process,
    )
    with _lock:  # two fits of one frame write it once
        found = _written.get(key)
        if found is None or not store.is_parquet_dataset(store.get_train_data_path(found.index)):
            found = _Written(df, _free_index(store))
            _write(
                df,
                found.index,
                store,
                list(dict.fromkeys(columns)),
                validation,
                num_processes * partitions_per_process,
            )
            found.properties = get_simple_meta_from_parquet(
                store, label_columns, feature_columns, sample_weight_col, found.index
            )
            _written[key] = found
            if verbose:
                print(
                    f"hvdlab.spark: {found.properties[0]} rows to train on, {found.properties[1]} for validation"
                )
    yield found.index


def get_dataset_properties(dataset_idx: int) -> tuple[int, int | None, Metadata, float]:
    """Return the properties that :func:`prepare_data` found: rows to train on, rows for validation, shapes by column, bytes of a row."""
    # A copy, not under the lock, which another fit holds for as long as it writes its frame.
    for written in tuple(_written.values()):
        if written.index == dataset_idx and written.properties is not None:
            return written.properties
    raise InvalidRequestError(f"There is no data set {dataset_idx}.")


def _free_index(store: Store) -> int:
    """Return a free index: another driver can have written into this store."""
    return next(index for index in _indexes if not store.exists(store.get_train_data_path(index)))


def _write(
    df: Any, index: int, store: Store, columns: list[str], validation: float | str | None, partitions: int
) -> None:
    from pyspark.ml.functions import vector_to_array  # pyright: ignore[reportMissingImports]
    from pyspark.ml.linalg import VectorUDT  # pyright: ignore[reportMissingImports]
    from pyspark.sql.functions import col  # pyright: ignore[reportMissingImports]

    vectors = {field.name for field in df.schema.fields if isinstance(field.dataType, VectorUDT)}
    kept = [
        vector_to_array(col(name), "float32").alias(name) if name in vectors else col(name)
        for name in columns
    ]
    chosen = col(validation).cast("int") if isinstance(validation, str) else None
    parts: list[tuple[str, Any]]
    if chosen is not None:
        if df.where(chosen.isNull()).limit(1).count():  # they would be in neither part
            raise InvalidRequestError(
                f"Column {validation!r}, which chooses the rows for validation, has nulls. Set them to 0 or 1, or leave "
                "these rows out."
            )
        parts = [
            (store.get_train_data_path(index), df.where(chosen == 0)),
            (store.get_val_data_path(index), df.where(chosen != 0)),
        ]
    elif validation:
        train, val = df.randomSplit([1 - float(validation), float(validation)], seed=index)
        parts = [(store.get_train_data_path(index), train), (store.get_val_data_path(index), val)]
    else:
        parts = [(store.get_train_data_path(index), df)]
    for place, frame in parts:
        frame.select(*kept).repartition(partitions).write.mode("overwrite").parquet(place)
