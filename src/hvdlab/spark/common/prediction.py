"""A trained model on the rows of a partition, for ``transform`` of all frameworks. Needs pyspark on the executors only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.errors import InvalidRequestError

Network = Callable[[list[npt.NDArray[Any]]], list[npt.NDArray[Any]]]
"""A trained model, picklable: it makes an array of rows for each label from an array of rows for each feature."""

_ROWS = 1024
"""Rows that a model gets at once."""


@dataclass(frozen=True)
class Predict:
    """A function for ``mapPartitions``: rows with the model's outputs behind them.

    Attributes:
        network: The model.
        features: The columns that it gets.
        columns: All columns of the rows.
        sizes: Numbers in each output; one that has one number is a double, others are vectors.
    """

    network: Network
    features: Sequence[str]
    columns: Sequence[str]
    sizes: tuple[int, ...] = ()

    def __call__(self, rows: Iterable[Any]) -> Iterator[Any]:
        from pyspark.ml.linalg import DenseVector  # pyright: ignore[reportMissingImports]

        left = iter(rows)
        while found := list(islice(left, _ROWS)):
            columns: list[Any] = []
            for output, size in zip(self.outputs(found), self.sizes, strict=True):
                values = output.reshape(len(found), -1).astype(np.float64)
                if values.shape[1] != size:
                    raise InvalidRequestError(
                        f"The model gave {values.shape[1]} numbers for a row, not {size}."
                    )
                columns.append(values[:, 0].tolist() if size == 1 else list(map(DenseVector, values)))
            for row, *added in zip(found, *columns, strict=True):
                yield (*row, *added)

    def outputs(self, rows: Sequence[Any]) -> list[npt.NDArray[Any]]:
        """Return the model's outputs for rows."""
        if not rows:
            return []
        inputs = []
        for name in self.features:
            place = list(self.columns).index(name)
            values = [row[place] for row in rows]
            if any(value is None for value in values):
                raise InvalidRequestError(f"Column {name!r} has nulls; fill or drop them.")
            inputs.append(
                np.asarray([value.toArray() if hasattr(value, "toArray") else value for value in values])
            )
        return self.network(inputs)
