"""Ranks' input: shares of row groups, batches, and columns that can't be arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.spark.common import util
from hvdlab.spark.common.datamodule import Batches, arrays_of, shard
from hvdlab.spark.common.store import LocalStore
from hvdlab.spark.common.util import (
    check_shape_compatibility,
    check_validation,
    get_dataset_properties,
    get_simple_meta_from_parquet,
    prepare_data,
    to_list,
)


def write(tmp_path: Path, rows: int, *, groups: int = 4, files: int = 2) -> LocalStore:
    place = tmp_path / "intermediate_train_data"
    place.mkdir()
    for number, part in enumerate(np.array_split(np.arange(rows), files)):
        table = pa.table({"x": [[float(each), -float(each)] for each in part], "y": part})
        pq.write_table(table, place / f"part-{number}.parquet", row_group_size=groups)
    return LocalStore(str(tmp_path))


def test_shares_have_each_row_once_and_batches_are_whole(tmp_path: Path) -> None:
    store = write(tmp_path, 23)
    dataset = store.get_parquet_dataset(store.get_train_data_path())
    for size in (1, 2, 3, 7):
        for seed in (None, 5):
            seen: list[int] = []
            counts = []
            for rank in range(size):
                batches = Batches(shard(dataset, rank, size), ["x", "y"], 3, seed=seed, shapes={"x": (2,)})
                found = list(batches)
                assert [len(each["y"]) for each in found[:-1]] == [3] * (len(found) - 1)
                assert all((each["x"][:, 0] == each["y"]).all() for each in found)
                mine = [int(row) for each in found for row in each["y"]]
                assert len(mine) == batches.rows
                counts.append(len(mine))
                again = [int(row) for each in batches for row in each["y"]]
                assert sorted(again) == sorted(mine)
                if len(mine) > 9:
                    assert (again == mine) is (seed is None)
                seen += mine
            assert sorted(seen) == list(range(23))
            assert max(counts) - min(counts) <= 1


def test_a_transformation_makes_columns_and_memory_keeps_them(tmp_path: Path) -> None:
    store = write(tmp_path, 10)
    pieces = shard(store.get_parquet_dataset(store.get_train_data_path()), 0, 1)
    calls = []

    def double(frame: Any) -> Any:
        calls.append(len(frame))
        return frame[frame.y >= 4].assign(z=lambda kept: kept.y * 2)

    batches = Batches(pieces, ["z"], 4, transform=double, cached=True)
    for _ in range(2):
        assert [list(each["z"]) for each in batches] == [[8, 10, 12, 14], [16, 18]]
    assert calls == [4, 1, 4, 1]
    with pytest.raises(InvalidRequestError, match=r"leaves no columns \['w'\]"):
        list(Batches(pieces, ["w"], 4, transform=double))
    with pytest.raises(InvalidRequestError, match="no rows"):
        next(Batches(pieces, ["y"], 4, transform=lambda frame: frame[frame.y < 0]).forever())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1, None, 3], r"Column 'c' has 1 nulls in row group 3 of p, the first in row 11;"),
        ([[1, 2], [3], [4, 5]], r"Column 'c' has 1 values in row 11 of row group 3 of p, and 2 elsewhere"),
        ([[1, 2], None, [4, 5]], r"Column 'c' has 1 nulls"),
        ([[1, 2], [3, None], [4, 5]], r"An element of column 'c' has 1 nulls"),
        (["a", "b", "c"], r"Column 'c' has values of type string in row group 3 of p, which are no numbers"),
    ],
)
def test_columns_that_are_no_arrays_name_column_and_row_group(values: list[Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        arrays_of(pa.table({"c": values}), "row group 3 of p", start=10)


def test_lists_of_lists_and_other_numbers() -> None:
    table = pa.table({"m": [[[1, 2], [3, 4]], [[5, 6], [7, 8]]], "b": [True, False]})
    found = arrays_of(table, "p", {"m": (2, 2)})
    assert found["m"].tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    assert found["b"].tolist() == [True, False]


def test_what_is_known_of_parquet(tmp_path: Path) -> None:
    store = write(tmp_path, 9)
    rows, val_rows, metadata, size = get_simple_meta_from_parquet(store, ["y"], ["x"])
    assert (rows, val_rows, metadata["x"]["shape"], metadata["y"]["shape"]) == (9, 0, (2,), ())
    assert size > 8
    check_shape_compatibility(metadata, ["x"], ["y"], [[-1, 2, 1]], label_shapes=[[-1]])
    with pytest.raises(ValueError, match=r"Column 'x' has 2 values in a row, and input_shapes .* asks for 3"):
        check_shape_compatibility(metadata, ["x"], ["y"], [[-1, 3]])
    with pytest.raises(ValueError, match="2 shapes for 1 features"):
        check_shape_compatibility(metadata, ["x"], ["y"], [[-1, 2], [-1]])
    with pytest.raises(
        ValueError, match=r"Columns \['w'\] are not in the data set .* which has \['x', 'y'\]"
    ):
        get_simple_meta_from_parquet(store, ["y"], ["w"])
    with pytest.raises(ValueError, match=r"There is no Parquet data set at .*train_data\.7"):
        get_simple_meta_from_parquet(store, ["y"], ["x"], dataset_idx=7)
    for wrong in (1.0, -0.1, True, [1]):
        with pytest.raises(ValueError, match="neither a share"):
            check_validation(wrong)  # type: ignore[arg-type]
    assert to_list(3, 2) == to_list([3], 2) == [3, 3]
    with pytest.raises(ValueError, match="2 values for 3 labels"):
        to_list([1, 2], 3)


def test_properties_are_found_while_another_frame_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    class Meanwhile:
        """Data frame in whose turn another fit adds its own, as its thread may at any time."""

        @property
        def index(self) -> int:
            written["third",] = util._Written(None, 3)
            return 1

    properties: tuple[int, int | None, dict[str, Any], float] = (9, None, {}, 8.0)
    written: dict[Any, Any] = {("first",): Meanwhile(), ("second",): util._Written(None, 2, properties)}
    monkeypatch.setattr(util, "_written", written)
    assert get_dataset_properties(2) == properties


def test_rows_without_a_validation_value_are_refused(spark: Any, tmp_path: Path) -> None:
    from pyspark.sql import SparkSession

    session = SparkSession(spark)
    store = LocalStore(str(tmp_path))
    whole = session.createDataFrame([(1.0, 2.0, 0), (3.0, 4.0, 1)], "x double, y double, v int")
    with prepare_data(1, store, whole, ["y"], ["x"], "v") as index:
        assert get_dataset_properties(index)[:2] == (1, 1)
    holed = session.createDataFrame([(1.0, 2.0, 0), (3.0, 4.0, None)], "x double, y double, v int")
    with (
        pytest.raises(ValueError, match="Column 'v', which chooses the rows for validation, has nulls"),
        prepare_data(1, store, holed, ["y"], ["x"], "v"),
    ):
        pass
