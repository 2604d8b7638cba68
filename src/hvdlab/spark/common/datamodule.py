"""Data of ranks: each reads its share of the rows of a Parquet data set, in batches of numpy arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.data.data_loader_base import Ahead

Batch = dict[str, npt.NDArray[Any]]

_AHEAD = 2
"""Row groups that are read ahead of the one whose batches are being used."""


@dataclass(frozen=True)
class RowChunk:
    """Consecutive rows of one row group.

    Attributes:
        fragment: Arrow's fragment of one row group.
        name: For messages: ``row group 2 of part-00000.parquet``.
        start, stop: The rows.
    """

    fragment: Any
    name: str
    start: int
    stop: int


def shard(dataset: Any, rank: int, size: int) -> list[RowChunk]:
    """Return the share of one rank: whole row groups except the first and last, so that shares differ by one row at most.

    Args:
        dataset: A ``pyarrow.dataset.Dataset`` of Parquet files.
        rank, size: Which share of how many.
    """
    groups = []
    # Sorted, since each rank lists the files itself: shares overlap unless all ranks have one order.
    for fragment in sorted(dataset.get_fragments(), key=lambda each: each.path):
        name = fragment.path.rpartition("/")[2]
        for group in fragment.split_by_row_group():
            (info,) = group.row_groups
            groups.append((group, f"row group {info.id} of {name}", info.num_rows))
    total = sum(rows for *_, rows in groups)
    begin, end = total * rank // size, total * (rank + 1) // size
    pieces, first = [], 0
    for group, name, rows in groups:
        start, stop = max(begin - first, 0), min(end - first, rows)
        if start < stop:
            pieces.append(RowChunk(group, name, start, stop))
        first += rows
    return pieces


def arrays_of(
    table: Any, where: str, shapes: Mapping[str, Sequence[int]] | None = None, start: int = 0
) -> Batch:
    """Return the columns of an Arrow table as numpy arrays: numbers as ``[rows]``, lists of one length as ``[rows, length]``.

    Args:
        table: The table.
        where: The row group, for messages.
        shapes: The shape of a row of a column, where known.
        start: The table's first row in the row group, for messages.

    Raises:
        InvalidRequestError: A column has nulls, rows of different lengths or of another one than in ``shapes``, or no numbers.
    """
    return {
        name: _array(
            table.column(name).combine_chunks(), f"Column {name!r}", where, (shapes or {}).get(name), start
        )
        for name in table.column_names
    }


def _array(column: Any, name: str, where: str, shape: Sequence[int] | None, start: int) -> npt.NDArray[Any]:
    import pyarrow as pa  # pyright: ignore[reportMissingImports]
    import pyarrow.compute as pc  # pyright: ignore[reportMissingImports]

    if isinstance(column, pa.ChunkedArray):  # with Arrow's older releases, and without rows
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    if column.null_count:
        row = start + pc.index(column.is_null(), True).as_py()
        raise InvalidRequestError(
            f"{name} has {column.null_count} nulls in {where}, the first in row {row}; fill or drop them."
        )
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
        wanted = shape[0] if shape else int(lengths[0]) if len(lengths) else 0
        if (wrong := lengths != wanted).any():
            row = int(wrong.argmax())
            raise InvalidRequestError(
                f"{name} has {lengths[row]} values in row {start + row} of {where}, and {wanted} elsewhere."
            )
        element = f"An element of column {name.partition(' ')[2]}"
        values = _array(column.flatten(), element, where, shape[1:] if shape else None, 0)
        return values.reshape((len(column), wanted, *values.shape[1:]))
    if pa.types.is_decimal(kind):
        column = column.cast(pa.float64())
    elif not (pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise InvalidRequestError(f"{name} has values of type {kind} in {where}, which are no numbers.")
    # A copy is allowed: Arrow packs booleans as bits, which numpy can't view.
    array: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return array


class Batches:
    """The batches of one rank's share, one pass for each ``iter``. Row groups are read ahead in a thread.

    Args:
        pieces: The share, by :func:`shard`.
        columns: The columns to read.
        batch_size: Rows of a batch; the last of a pass may have fewer.
        seed: Shuffle row groups and the rows in each, differently in each pass; ``None`` keeps their order.
        transform: Called with a pandas frame of each row group, and returns one; its columns may be others.
        shapes: The shapes of columns.
        cached: Whether rows that were read stay in memory.
    """

    def __init__(
        self,
        pieces: Sequence[RowChunk],
        columns: Sequence[str],
        batch_size: int,
        *,
        seed: int | None = None,
        transform: Callable[[Any], Any] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        cached: bool = False,
    ) -> None:
        if batch_size < 1:
            raise InvalidRequestError(f"batch_size={batch_size}: a batch has at least one row.")
        self._pieces, self._columns, self._batch_size = pieces, list(columns), batch_size
        self._seed, self._transform, self._shapes, self._cached = seed, transform, shapes, cached
        #: Row groups that were read, by their place in the share, if they are cached; and the passes that
        #: were begun.
        self._cache: dict[int, Batch] = {}
        self._passes = 0

    @property
    def rows(self) -> int:
        """Return the number of rows of the share, before a transformation."""
        return sum(piece.stop - piece.start for piece in self._pieces)

    def __iter__(self) -> Iterator[Batch]:
        order = np.arange(len(self._pieces))
        random = None if self._seed is None else np.random.default_rng((self._seed, self._passes))
        # Before the first batch: a pass that is left early must not be repeated in the same order.
        self._passes += 1
        if random is not None:
            random.shuffle(order)
        rest: Batch = {}
        with closing(Ahead((self._read(int(index)) for index in order), _AHEAD)) as groups:
            for group in groups:
                rows = _rows(group)
                if random is not None:
                    chosen = random.permutation(rows)
                    group = {name: values[chosen] for name, values in group.items()}
                if rest:
                    group = {name: np.concatenate([rest[name], values]) for name, values in group.items()}
                    rows = _rows(group)
                whole = rows - rows % self._batch_size
                for start in range(0, whole, self._batch_size):
                    yield {name: values[start : start + self._batch_size] for name, values in group.items()}
                rest = {name: values[whole:] for name, values in group.items()} if whole < rows else {}
        if rest:
            yield rest

    def forever(self) -> Iterator[Batch]:
        """Yield the batches of one pass after another, without end."""
        while True:
            count = 0
            for batch in self:
                count += 1
                yield batch
            if not count:
                raise InvalidRequestError(
                    "This rank has no rows: its share is empty, or transformation_fn drops all of them."
                )

    def _read(self, index: int) -> Batch:
        if index in self._cache:
            return self._cache[index]
        piece = self._pieces[index]
        # A transformation may need any column, and makes others.
        table = piece.fragment.to_table(columns=None if self._transform else self._columns, use_threads=False)
        table = table.slice(piece.start, piece.stop - piece.start)
        if self._transform is not None:
            import pyarrow as pa  # pyright: ignore[reportMissingImports]

            table = pa.Table.from_pandas(self._transform(table.to_pandas()), preserve_index=False)
            if missing := [name for name in self._columns if name not in table.column_names]:
                raise InvalidRequestError(f"transformation_fn leaves no columns {missing}.")
            table = table.select(self._columns)
        batch = arrays_of(table, piece.name, self._shapes, piece.start)
        if self._cached:
            self._cache[index] = batch
        return batch


def _rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))


class DataModule(ABC):
    """Data of a rank; a context manager. Derive from it for other formats, and give the class as ``data_module``.

    Args:
        train_dir, val_dir: Where the data sets are, by the store's names.
        num_train_epochs: Passes over the training rows.
        has_val: Whether there are rows for validation.
        train_batch_size, val_batch_size: Rows of a batch.
        shuffle: Whether rows to train on are shuffled.
        transform_fn: Called with a pandas frame of each row group.
        inmemory_cache_all: Whether rows stay in memory after the first pass.
        cur_shard, shard_count: Rank and size.
        schema_fields: Columns to read.
        storage_options: Goes to fsspec.
        steps_per_epoch_train, steps_per_epoch_val: Batches of an epoch.
        verbose: Whether to print which files are read.
        kwargs: ``dataset``: a function that gives the Arrow data set of a path; ``shapes`` of columns; ``random_seed``.
    """

    short_name: str = ""

    def __init__(
        self,
        train_dir: str,
        val_dir: str,
        num_train_epochs: int = 1,
        has_val: bool = True,
        train_batch_size: int = 32,
        val_batch_size: int = 32,
        shuffle: bool = True,
        transform_fn: Callable[[Any], Any] | None = None,
        inmemory_cache_all: bool = False,
        cur_shard: int = 0,
        shard_count: int = 1,
        schema_fields: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        steps_per_epoch_train: int = 1,
        steps_per_epoch_val: int = 1,
        verbose: bool = True,
        **kwargs: Any,
    ) -> None:
        self.train_dir, self.val_dir, self.has_val = train_dir, val_dir, has_val
        self.num_train_epochs = num_train_epochs
        self.train_batch_size, self.val_batch_size, self.shuffle = train_batch_size, val_batch_size, shuffle
        self.transform_fn, self.inmemory_cache_all = transform_fn, inmemory_cache_all
        self.cur_shard, self.shard_count = cur_shard, shard_count
        self.schema_fields, self.storage_options = schema_fields, storage_options
        self.steps_per_epoch_train, self.steps_per_epoch_val = steps_per_epoch_train, steps_per_epoch_val
        self.verbose, self.kwargs = verbose, kwargs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    @abstractmethod
    def train_data(self) -> Any:
        """Iterate over batches of training rows, endlessly: dictionaries of arrays by column."""

    @abstractmethod
    def val_data(self) -> Any:
        """Iterate once over batches of rows for validation; ``None`` without these."""


class ParquetDataModule(DataModule):
    """Data module of Parquet, read by Arrow: the default."""

    short_name = "parquet"

    def train_data(self) -> Iterator[Batch]:
        seed = self.kwargs.get("random_seed") or 0
        return self._batches(self.train_dir, self.train_batch_size, seed if self.shuffle else None).forever()

    def val_data(self) -> Batches | None:
        return self._batches(self.val_dir, self.val_batch_size, None) if self.has_val else None

    def _batches(self, place: str, batch_size: int, seed: int | None) -> Batches:
        dataset = self.kwargs["dataset"](place)
        return Batches(
            shard(dataset, self.cur_shard, self.shard_count),
            self.schema_fields if self.schema_fields is not None else dataset.schema.names,
            batch_size,
            seed=seed,
            transform=self.transform_fn,
            shapes=self.kwargs.get("shapes"),
            cached=self.inmemory_cache_all,
        )


PetastormDataModule = ParquetDataModule
"""Horovod's name of its default. Petastorm itself is not needed, and not used."""
