"""Stores over fsspec, on a local and a remote-like file system, and backends."""

from __future__ import annotations

import pickle
import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.spark.common.backend import LocalBackend, SparkBackend
from hvdlab.spark.common.store import (
    AbstractFilesystemStore,
    DBFSLocalStore,
    FilesystemStore,
    HDFSStore,
    LocalStore,
    Store,
)


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> AbstractFilesystemStore:
    place = f"memory://{uuid.uuid4().hex}" if request.param == "memory" else str(tmp_path)
    made = Store.create(place)
    assert isinstance(made, FilesystemStore)
    return made


def test_paths_files_and_data_sets(store: AbstractFilesystemStore, tmp_path: Path) -> None:
    prefix = store.prefix_path
    assert store.get_train_data_path() == f"{prefix}/intermediate_train_data"
    assert store.get_val_data_path(3) == f"{prefix}/intermediate_val_data.3"
    assert store.get_test_data_path("a") == f"{prefix}/intermediate_test_data.a"
    assert store.get_run_path("r") == store.get_checkpoint_path("r") == f"{store.get_runs_path()}/r"
    assert store.get_logs_path("r") == f"{prefix}/runs/r/{store.get_logs_subdir()}"
    with pytest.raises(InvalidRequestError, match=r"run_id='\.\./x'"):
        store.get_run_path("../x")

    assert store.get_checkpoints("r") == []
    for name in ("b.ckpt", "a.ckpt", "c.txt"):
        store.write(f"{store.get_run_path('r')}/{name}", name.encode())
    store.write_text(f"{store.get_run_path('r')}/a.ckpt", "naïve")
    found = store.get_checkpoints("r")
    assert [each.rpartition("/")[2] for each in found] == ["a.ckpt", "b.ckpt"]
    assert store.read(found[0]).decode() == "naïve"
    assert not store.exists(f"{prefix}/none")

    data = store.get_train_data_path(0)
    assert not store.is_parquet_dataset(data)
    local = tmp_path / "x.parquet"
    pq.write_table(pa.table({"x": [1, 2, 3]}), local)
    store.write(f"{data}/part-0.parquet", local.read_bytes())
    assert store.is_parquet_dataset(data)
    assert store.get_parquet_dataset(data).to_table().column("x").to_pylist() == [1, 2, 3]

    remote = store.to_remote("r", 0)
    assert (remote.train_data_path, remote.checkpoint_filename) == (data, "checkpoint")
    copy = pickle.loads(pickle.dumps(remote))  # noqa: S301
    with copy.get_local_output_dir() as place:
        (Path(place) / "deep").mkdir()
        (Path(place) / "deep" / "file").write_text("here")
        copy.sync(place)
    assert not Path(place).exists()
    assert store.read(f"{store.get_run_path('r')}/deep/file") == b"here"


def test_options(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path), train_path="/elsewhere/t", save_runs=False, checkpoint_filename="w.pt")
    assert store.get_train_data_path() == "file:///elsewhere/t"
    assert (store.get_logs_path("r"), store.get_checkpoint_path("r"), store.get_checkpoints("r")) == (
        None,
        None,
        [],
    )
    assert store.get_checkpoint_filename() == "w.pt"


def test_what_is_half_written_leaves_what_was_there(
    store: AbstractFilesystemStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"{store.prefix_path}/w"
    store.write(place, b"before")

    def full(path: str, data: bytes) -> None:
        store.fs.__class__.__mro__[1].pipe_file(store.fs, path, data[:1])
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(type(store.fs), "pipe_file", lambda self, path, data: full(path, data))
        with pytest.raises(OSError, match="disk full"):
            store.write(place, b"after")
    assert store.read(place) == b"before"
    assert len(store.fs.ls(store.get_localized_path(store.prefix_path))) == 1


def test_which_class_a_path_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(Store.create("/dbfs/x")) is FilesystemStore
    with pytest.raises(InvalidRequestError, match="No store for nonsense://x"):
        Store.create("nonsense://x")
    hdfs = Store.create("hdfs://node:8020/user/me")
    assert isinstance(hdfs, HDFSStore)
    assert hdfs.get_runs_path() == "hdfs://node:8020/user/me/runs"
    assert hdfs.get_full_path("/other") == "hdfs://node:8020/other"
    with pytest.raises(ValueError, match="another name node"):
        hdfs.get_full_path("hdfs://else:8020/x")
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17")
    for path in ("dbfs:/x/y", "/dbfs/x/y", "file:/dbfs/x/y", "file:///dbfs/x/y"):
        made = Store.create(path)
        assert isinstance(made, DBFSLocalStore)
        assert made.get_localized_path(made.get_runs_path()) == "/dbfs/x/y/runs"
    with pytest.raises(InvalidRequestError, match="not a DBFS path: /x"):
        DBFSLocalStore("/x")


def test_what_cannot_be_written_is_refused_in_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InvalidRequestError, match=r"^The store file://.*/file/below can't be written: \w+: "):
        Store.create(str(file / "below")).check_writable()
    Store.create(str(tmp_path / "new")).check_writable()
    assert list((tmp_path / "new").iterdir()) == []


def test_backends(spark: Any) -> None:
    assert SparkBackend().num_processes() == 2

    def of_rank(name: str) -> tuple[str | None, str | None]:
        import os

        return os.environ.get(name), os.environ.get("CUDA_VISIBLE_DEVICES")

    backend = SparkBackend(1, {"A": "1", "CUDA_VISIBLE_DEVICES": "7"})
    assert backend.run(of_rank, ("A",), env={"B": "2"}) == [("1", None)]
    assert LocalBackend(1).run(of_rank, ("B",), env={"B": "2"})[0][0] == "2"
