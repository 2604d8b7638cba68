"""What a pool has recorded of its ranks, as tables and as files."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from hvdlab.collectives.client import Client
from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.kernel_ext.recording import Recording, save_trace

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]  # has no types


class Measuring:
    """The part of a pool that has spans and metrics; :class:`~hvdlab.kernel_ext.pool.Pool` has the rest."""

    _changing: threading.RLock
    _timeline: Recording | None

    @property
    def timeline(self) -> Path | None:
        """The file that a timeline is being written to."""
        return self._timeline.path if self._timeline is not None else None

    def start_timeline(self, path: str | os.PathLike[str]) -> Path:
        """Write what all ranks do from now on to a Chrome trace, also while cells run. Returns the file's whole path.

        Raises:
            InvalidRequestError: A timeline is being written already.
            OSError: The file can't be created.
        """
        self._check_running()
        with self._changing:
            if self._timeline is not None:
                raise InvalidRequestError(
                    f"a timeline is being written to {self._timeline.path} already; stop it first."
                )
            self._timeline = Recording(self.client, Path(path).absolute())
            return self._timeline.path

    def stop_timeline(self) -> Path | None:
        """Complete the file that :meth:`start_timeline` began, and return it; None if there is none.

        Raises:
            OSError: The disk failed; the file holds what was written before.
        """
        with self._changing:
            recording, self._timeline = self._timeline, None
        if recording is None:
            return None
        recording.stop()
        return recording.path

    @overload
    def trace(self, *, arrow: Literal[False] = False) -> DataFrame: ...
    @overload
    def trace(self, *, arrow: Literal[True]) -> Any: ...
    def trace(self, *, arrow: bool = False) -> Any:
        """All collectives that were recorded, as a pandas table with a row per tensor, collective and rank.

        It has all that the ranks did before the call. ``docs/reference/trace.md`` has the columns. The newest million rows are
        kept, from the first use on and with what the coordinator still has of the time before; ``table.attrs["dropped"]`` says
        how many rows are missing.

        Args:
            arrow: Return a ``pyarrow.Table`` instead; ``table.schema.metadata`` has ``dropped`` then.

        Raises:
            ModuleNotFoundError: pandas, or pyarrow, is not installed.
        """
        recording = self.client.gathered()
        return recording.arrow() if arrow else recording.table()

    def metrics(self) -> DataFrame:
        """All that the ranks measured, as a pandas table with a row per point.

        The columns are ``rank``, ``name``, ``time`` (seconds since the origin of :meth:`trace`), ``value``, ``step``
        (missing if none was said) and ``unit``. The newest points of each series are kept;
        ``table.attrs["dropped"]`` says how many are missing.
        """
        return self.client.gathered().metrics()

    def save_trace(self, path: str | os.PathLike[str], format: str | None = None) -> Path:
        """Write everything that :meth:`trace` would have now, with cells, metrics and lost ranks, for a trace viewer.

        Args:
            path: A name that ends in ``.json`` (Chrome's format) or ``.json.gz`` (the same compressed).
            format: One of these, for a file whose name says something else.

        Returns:
            The file's whole path.

        Raises:
            InvalidRequestError: There is no such format.
            OSError: It could not be written; a file that was there stays as it was.
        """
        return save_trace(self.client, path, format)

    # -- what the rest of a pool has ------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        raise NotImplementedError

    def _check_running(self) -> None:
        raise NotImplementedError
