"""Stores: where an estimator keeps the data that it trains on, and the checkpoints and logs of its runs. Over fsspec."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem

from hvdlab.collectives.errors import InvalidRequestError

LOGS = "logs"
CHECKPOINT = "checkpoint"


class Store(ABC):
    """Store of data sets and runs. Derive from it to keep them in a place that is no file system.

    A store is picklable, and holds no connection: each process that gets one opens its own.
    """

    @staticmethod
    def create(prefix_path: str, *args: Any, **kwargs: Any) -> Store:
        """Return the store for a path or URL.

        Args:
            prefix_path: ``hdfs://…`` gives a :class:`HDFSStore`; on Databricks, ``dbfs:/…``, ``/dbfs/…`` and ``file:/dbfs/…``
                give a :class:`DBFSLocalStore`; any other path a :class:`FilesystemStore`.
            args, kwargs: Go to its constructor.
        """
        if HDFSStore.matches(prefix_path):
            return HDFSStore(prefix_path, *args, **kwargs)
        if is_databricks() and DBFSLocalStore.matches_dbfs(prefix_path):
            return DBFSLocalStore(prefix_path, *args, **kwargs)
        return FilesystemStore(prefix_path, *args, **kwargs)

    @abstractmethod
    def is_parquet_dataset(self, path: str) -> bool:
        """Return whether there is a Parquet data set at this path."""

    @abstractmethod
    def get_parquet_dataset(self, path: str) -> Any:
        """Return the ``pyarrow.dataset.Dataset`` at this path."""

    @abstractmethod
    def get_train_data_path(self, idx: int | str | None = None) -> str:
        """Return where the rows to train on are; ``idx`` distinguishes data sets."""

    @abstractmethod
    def get_val_data_path(self, idx: int | str | None = None) -> str:
        """Return where the rows for validation are.

        Args:
            idx: Number of the data set; ``None`` for the directory of all.
        """

    @abstractmethod
    def get_test_data_path(self, idx: int | str | None = None) -> str:
        """Return where the rows for tests are.

        Args:
            idx: Number of the data set; ``None`` for the directory of all.
        """

    @abstractmethod
    def saving_runs(self) -> bool:
        """Return whether checkpoints and logs are kept."""

    @abstractmethod
    def get_runs_path(self) -> str:
        """Return the directory of all runs."""

    @abstractmethod
    def get_run_path(self, run_id: str) -> str:
        """Return the directory of one run.

        Args:
            run_id: The run's name.
        """

    @abstractmethod
    def get_checkpoint_path(self, run_id: str) -> str | None:
        """Return where a run's checkpoints are; ``None`` if runs are not saved.

        Args:
            run_id: The run's name.
        """

    @abstractmethod
    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        """Return the paths of a run's checkpoints that end so, sorted by name.

        Args:
            run_id: The run's name.
            suffix: End of the names.
        """

    @abstractmethod
    def get_logs_path(self, run_id: str) -> str | None:
        """Return where a run's logs are; ``None`` if runs are not saved.

        Args:
            run_id: The run's name.
        """

    @abstractmethod
    def get_checkpoint_filename(self) -> str:
        """Return the name of a checkpoint in its run."""

    @abstractmethod
    def get_logs_subdir(self) -> str:
        """Return the name of the logs' directory in their run."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Return whether there is a file or directory at this path."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the content of the file at this path."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Put ``data`` into the file at this path; a reader sees the whole file or the one before."""

    def write_text(self, path: str, text: str) -> None:
        """Put text into the file at this path, as UTF-8."""
        self.write(path, text.encode())

    @abstractmethod
    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], contextlib.AbstractContextManager[str]]:
        """Return a function that gives a temporary local directory, which is removed with its ``with``.

        Args:
            run_id: The run's name.
        """

    @abstractmethod
    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        """Return a function that copies the contents of a local directory into the run's.

        Args:
            run_id: The run's name.
        """

    def check_writable(self) -> None:  # noqa: B027  # a store that can't know lets the writing itself fail
        """Raise :class:`InvalidRequestError` if nothing can be written here. Estimators ask before they start anything."""

    def get_data_metadata_path(self, path: str) -> str:
        """Return where the metadata of the data at this path are kept."""
        return f"{path.rstrip('/')}/_metadata"

    def to_remote(self, run_id: str, dataset_idx: int | str | None = None) -> RemoteStore:
        """Return the paths of one run, for its ranks; picklable.

        Args:
            run_id: The run's name.
            dataset_idx: Number of the data set; ``None`` for the directory of all.
        """
        saves = self.saving_runs()
        return RemoteStore(
            train_data_path=self.get_train_data_path(dataset_idx),
            val_data_path=self.get_val_data_path(dataset_idx),
            test_data_path=self.get_test_data_path(dataset_idx),
            saving_runs=saves,
            runs_path=self.get_runs_path(),
            run_path=self.get_run_path(run_id),
            checkpoint_path=self.get_checkpoint_path(run_id),
            logs_path=self.get_logs_path(run_id),
            checkpoint_filename=self.get_checkpoint_filename(),
            logs_subdir=self.get_logs_subdir(),
            get_local_output_dir=self.get_local_output_dir_fn(run_id),
            sync=self.sync_fn(run_id),
        )


@dataclass(frozen=True)
class RemoteStore:
    """The paths of one run, for its ranks.

    Attributes:
        get_local_output_dir: Gives a temporary directory, as a context manager.
        sync: Copies the contents of a local directory into the run's.
    """

    train_data_path: str
    val_data_path: str
    test_data_path: str
    saving_runs: bool
    runs_path: str
    run_path: str
    checkpoint_path: str | None
    logs_path: str | None
    checkpoint_filename: str
    logs_subdir: str
    get_local_output_dir: Callable[[], contextlib.AbstractContextManager[str]]
    sync: Callable[[str], None]


class AbstractFilesystemStore(Store):
    """A store in a directory of a file system.

    Args:
        prefix_path: The directory: a path or a URL.
        train_path, val_path, test_path, runs_path: Other places for these; by default ``intermediate_train_data``,
            ``intermediate_val_data``, ``intermediate_test_data`` and ``runs`` in it.
        save_runs: Whether checkpoints and logs are kept.
        storage_options: Goes to fsspec: keys, endpoints and the like.
        checkpoint_filename: A checkpoint's name; by default ``checkpoint``.
    """

    def __init__(
        self,
        prefix_path: str,
        train_path: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        runs_path: str | None = None,
        save_runs: bool = True,
        storage_options: Mapping[str, Any] | None = None,
        checkpoint_filename: str | None = None,
    ) -> None:
        self.prefix_path = self.get_full_path(prefix_path)
        self.storage_options = dict(storage_options or {})
        self._train_path = self._place(train_path, "intermediate_train_data")
        self._val_path = self._place(val_path, "intermediate_val_data")
        self._test_path = self._place(test_path, "intermediate_test_data")
        self._runs_path = self._place(runs_path, "runs")
        self._save_runs = save_runs
        self._checkpoint_filename = checkpoint_filename or CHECKPOINT

    def _place(self, path: str | None, name: str) -> str:
        return self.get_full_path(path) if path else f"{self.prefix_path.rstrip('/')}/{name}"

    @property
    @abstractmethod
    def fs(self) -> Any:
        """Return the fsspec file system, which accepts paths with and without the protocol."""

    def get_full_path(self, path: str) -> str:
        """Return the path with its protocol: ``/tmp/x`` is ``file:///tmp/x``."""
        if urlsplit(path).scheme:
            return path
        return f"file://{os.path.abspath(path)}"

    def get_localized_path(self, path: str) -> str:
        """Return the path without its protocol."""
        return str(self.fs._strip_protocol(path))

    def is_parquet_dataset(self, path: str) -> bool:
        return bool(self._parquet_files(path))

    def get_parquet_dataset(self, path: str) -> Any:
        import pyarrow.dataset  # pyright: ignore[reportMissingImports]
        import pyarrow.fs  # pyright: ignore[reportMissingImports]

        # Without a detour over Python for each read, where that is possible.
        local = isinstance(self.fs, LocalFileSystem)
        system = (
            pyarrow.fs.LocalFileSystem()
            if local
            else pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(self.fs))
        )
        return pyarrow.dataset.dataset(self._parquet_files(path), filesystem=system, format="parquet")

    def _parquet_files(self, path: str) -> list[str]:
        names = self.fs.find(self.get_localized_path(path)) if self.exists(path) else ()
        return sorted(name for name in names if name.endswith(".parquet"))

    def get_train_data_path(self, idx: int | str | None = None) -> str:
        return _numbered(self._train_path, idx)

    def get_val_data_path(self, idx: int | str | None = None) -> str:
        return _numbered(self._val_path, idx)

    def get_test_data_path(self, idx: int | str | None = None) -> str:
        return _numbered(self._test_path, idx)

    def saving_runs(self) -> bool:
        return self._save_runs

    def get_runs_path(self) -> str:
        return self._runs_path

    def get_run_path(self, run_id: str) -> str:
        """Return the directory of one run.

        Raises:
            InvalidRequestError: ``run_id`` can't be the name of a directory.
        """
        if not run_id or run_id in (".", "..") or "/" in run_id:
            raise InvalidRequestError(f"run_id={run_id!r} can't be the name of a directory of the store.")
        return f"{self._runs_path.rstrip('/')}/{run_id}"

    def get_checkpoint_path(self, run_id: str) -> str | None:
        return self.get_run_path(run_id) if self._save_runs else None

    def get_checkpoints(self, run_id: str, suffix: str = ".ckpt") -> list[str]:
        place = self.get_checkpoint_path(run_id)
        if place is None or not self.exists(place):
            return []
        found = self.fs.ls(self.get_localized_path(place), detail=False)
        return sorted(self.fs.unstrip_protocol(name) for name in found if str(name).endswith(suffix))

    def get_logs_path(self, run_id: str) -> str | None:
        return f"{self.get_run_path(run_id)}/{LOGS}" if self._save_runs else None

    def get_checkpoint_filename(self) -> str:
        return self._checkpoint_filename

    def get_logs_subdir(self) -> str:
        return LOGS

    def exists(self, path: str) -> bool:
        return bool(self.fs.exists(self.get_localized_path(path)))

    def read(self, path: str) -> bytes:
        return bytes(self.fs.cat_file(self.get_localized_path(path)))

    def write(self, path: str, data: bytes) -> None:
        system, place = self.fs, self.get_localized_path(path)
        system.makedirs(place.rpartition("/")[0], exist_ok=True)
        # A process that ends in the middle leaves the file that was there.
        part = f"{place}.{uuid.uuid4().hex[:8]}.part"
        try:
            system.pipe_file(part, data)
            if isinstance(system, LocalFileSystem):
                os.replace(part, place)
            else:
                system.mv(part, place)
        except BaseException:
            with contextlib.suppress(Exception):
                system.rm_file(part)
            raise

    def check_writable(self) -> None:
        """Check that the store can be written to. Estimators do it before they start anything.

        Raises:
            InvalidRequestError: It can't; the text has the file system's reason.
        """
        probe = f"{self.prefix_path.rstrip('/')}/.writable-{uuid.uuid4().hex[:8]}"
        try:
            self.write(probe, b"")
            self.fs.rm_file(self.get_localized_path(probe))
        except Exception as error:  # fsspec's file systems raise their libraries' exceptions
            raise InvalidRequestError(
                f"The store {self.prefix_path} can't be written: {type(error).__name__}: {error}."
            ) from error

    def get_local_output_dir_fn(self, run_id: str) -> Callable[[], contextlib.AbstractContextManager[str]]:
        return _temporary_directory

    def sync_fn(self, run_id: str) -> Callable[[str], None]:
        return _Sync(self, self.get_run_path(run_id))


@contextlib.contextmanager
def _temporary_directory() -> Iterator[str]:
    place = tempfile.mkdtemp(prefix="hvdlab-run-")
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


@dataclass(frozen=True)
class _Sync:
    """Copier of the files below a local directory into a directory of a store."""

    store: AbstractFilesystemStore
    target: str

    def __call__(self, local_path: str) -> None:
        for directory, _, names in os.walk(local_path):
            for name in names:
                source = os.path.join(directory, name)
                with open(source, "rb") as file:
                    self.store.write(f"{self.target}/{os.path.relpath(source, local_path)}", file.read())


class FilesystemStore(AbstractFilesystemStore):
    """Store in any file system that fsspec knows: plain paths, ``file://``, ``s3://``, ``gs://``, ``abfs://``, ``memory://``.

    The library of a protocol (s3fs, gcsfs, adlfs) is needed in the driver
    and the executors, and Spark needs its own for the same protocol.

    Args:
        prefix_path: Directory of the store, with the protocol.
        args, kwargs: As for :class:`AbstractFilesystemStore`.

    Raises:
        InvalidRequestError: fsspec does not know the protocol, or lacks its library.
    """

    def __init__(self, prefix_path: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(prefix_path, *args, **kwargs)
        try:
            fsspec.get_filesystem_class(self.protocol)
        except (ImportError, ValueError) as error:
            raise InvalidRequestError(f"No store for {prefix_path}: {error}.") from error

    @property
    def protocol(self) -> str:
        """Return the protocol of the paths, such as ``s3``; empty for plain paths."""
        return urlsplit(self.prefix_path).scheme

    @property
    def fs(self) -> Any:
        # Not kept in an attribute: the store travels to the ranks by pickle, and fsspec caches its
        # instances itself.
        return fsspec.filesystem(self.protocol, **self.storage_options)

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether this class is for such a path."""
        return not HDFSStore.matches(path)


LocalStore = FilesystemStore
"""Horovod's name for a store on a local or mounted file system."""


class HDFSStore(AbstractFilesystemStore):
    """A store on HDFS, over Arrow's ``libhdfs``, which needs Hadoop's libraries (``HADOOP_HOME``, ``CLASSPATH``).

    Args:
        prefix_path: ``hdfs://host:port/path``, ``hdfs:///path`` or a plain path.
        host, port: The name node; by default the URL's, or without one Hadoop's default.
        user: The user to connect as; by default this process's user.
        kerb_ticket: Path of a Kerberos ticket cache.
        driver: ``libhdfs``, the only driver that still exists.
        extra_conf: Hadoop properties.
        args, kwargs: Those of :class:`AbstractFilesystemStore`.

    Raises:
        InvalidRequestError: A path names another name node than ``prefix_path`` or ``host`` do.
    """

    PREFIX = "hdfs://"

    def __init__(
        self,
        prefix_path: str,
        host: str | None = None,
        port: int | None = None,
        user: str | None = None,
        kerb_ticket: str | None = None,
        driver: str = "libhdfs",
        extra_conf: Mapping[str, str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if driver != "libhdfs":
            raise InvalidRequestError(f"driver={driver!r}: Arrow reaches HDFS by libhdfs alone.")
        url = urlsplit(prefix_path)
        self._host, self._port = host or url.hostname, port or url.port
        self._options = {
            "user": user,
            "kerb_ticket": kerb_ticket,
            "extra_conf": dict(extra_conf or {}) or None,
        }
        super().__init__(prefix_path, *args, **kwargs)

    @classmethod
    def matches(cls, path: str) -> bool:
        """Return whether it is a path of HDFS."""
        return path.startswith(cls.PREFIX)

    def get_full_path(self, path: str) -> str:
        """Return the path with its protocol: ``/tmp/x`` is ``hdfs:///tmp/x`` with the store's host and port.

        Raises:
            InvalidRequestError: It is no path of HDFS, or one of another cluster.
        """
        url = urlsplit(path)
        if url.scheme not in ("", "hdfs"):
            raise InvalidRequestError(f"{path} is no path of HDFS.")
        if url.hostname and (url.hostname, url.port or self._port) != (self._host, self._port):
            raise InvalidRequestError(
                f"{path} is on another name node than the store's, {self._host}:{self._port}."
            )
        node = f"{self._host}:{self._port}" if self._port else self._host or ""
        return f"{self.PREFIX}{node}{url.path}"

    @property
    def fs(self) -> Any:
        # The host "default" has libhdfs use the name node of Hadoop's configuration (fs.defaultFS).
        given = {name: value for name, value in self._options.items() if value is not None}
        return fsspec.filesystem(
            "hdfs", host=self._host or "default", port=self._port or 0, **given, **self.storage_options
        )


class DBFSLocalStore(FilesystemStore):
    """A store on Databricks' file system by its mount at ``/dbfs``: ``dbfs:/x`` is ``/dbfs/x``.

    Args:
        prefix_path: Directory of the store, ``dbfs:/x`` or ``/dbfs/x``.
        args, kwargs: As for :class:`AbstractFilesystemStore`.
    """

    DBFS_PATH_FORMAT_ERROR = "The provided path is not a DBFS path: {}. Use dbfs:/…, /dbfs/… or file:/dbfs/…."

    def __init__(self, prefix_path: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(self.normalize_path(prefix_path), *args, **kwargs)

    @classmethod
    def matches_dbfs(cls, path: str) -> bool:
        """Return whether it is a path of DBFS."""
        return path.startswith(("dbfs:/", "/dbfs/", "file:/dbfs/", "file:///dbfs/"))

    @staticmethod
    def normalize_path(path: str) -> str:
        """Return a path of DBFS as the local path below ``/dbfs``.

        >>> DBFSLocalStore.normalize_path("dbfs:/tmp/x")
        '/dbfs/tmp/x'

        Raises:
            InvalidRequestError: It is no path of DBFS.
        """
        for head, mount in (
            ("dbfs:///", "/dbfs/"),
            ("dbfs:/", "/dbfs/"),
            ("file:///dbfs/", "/dbfs/"),
            ("file:/dbfs/", "/dbfs/"),
        ):
            if path.startswith(head):
                return mount + path.removeprefix(head)
        if path.startswith("/dbfs/"):
            return path
        raise InvalidRequestError(DBFSLocalStore.DBFS_PATH_FORMAT_ERROR.format(path))

    def get_full_path(self, path: str) -> str:
        return super().get_full_path(self.normalize_path(path) if self.matches_dbfs(path) else path)


def is_databricks() -> bool:
    """Return whether this process runs on Databricks."""
    return "DATABRICKS_RUNTIME_VERSION" in os.environ


def _numbered(path: str, idx: int | str | None) -> str:
    return path if idx is None else f"{path}.{idx}"
