"""Data sets for the estimators' tests, and a backend of one rank that needs no process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hvdlab.spark.common.backend import Backend
from hvdlab.spark.common.store import LocalStore

WEIGHTS = np.array([2.0, -1.0, 0.5])


def write(tmp_path: Path, rows: int = 64, name: str = "intermediate_train_data", **more: Any) -> LocalStore:
    """Write rows of ``x``, three numbers, and ``y``, their sum with weights."""
    x = np.random.default_rng(0).normal(size=(rows, 3))
    place = tmp_path / name
    place.mkdir()
    table = pa.table({"x": list(x), "y": x @ WEIGHTS, **more})
    pq.write_table(table, place / "part-0.parquet", row_group_size=10)
    return LocalStore(str(tmp_path))


def read(tmp_path: Path, name: str = "intermediate_train_data") -> tuple[Any, Any]:
    """Return ``x`` and ``y`` of the file that :func:`write` wrote, as the models get them."""
    table = pq.read_table(tmp_path / name)
    x = np.array(table.column("x").to_pylist(), np.float32)
    return x, np.array(table.column("y").to_pylist(), np.float32)[:, None]


class InThisProcess(Backend):
    """One rank, which is the caller: frameworks are imported once."""

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        return [fn(*args, **(kwargs or {}))]

    def num_processes(self) -> int:
        return 1


class NotToBeUsed(Backend):
    """Backend that fails if anything is started on its ranks."""

    def __init__(self, size: int = 1) -> None:
        self._size = size

    def run(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("started")

    def num_processes(self) -> int:
        return self._size
