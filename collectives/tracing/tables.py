"""Spans and points of a recording as tables of pandas and Arrow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdlab.collectives.tracing.collective_matching import collective_arrivals
from hvdlab.collectives.tracing.columns import FAILED, NOT_READY, NOT_STARTED, Series, distance
from hvdlab.collectives.types import DType, OpKind

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]  # has no types


class TableSource(Protocol):
    """Recording, as far as its tables read it."""

    @property
    def origin_ns(self) -> int | None: ...

    @property
    def names(self) -> list[str]: ...

    @property
    def sites(self) -> list[str]: ...

    @property
    def dropped(self) -> int: ...

    @property
    def points_lost(self) -> int: ...

    def rows_since(self, number: int) -> tuple[int, NDArray[Any]]: ...

    def points_since(self, number: int) -> tuple[int, NDArray[Any]]: ...

    def series(self) -> list[Series]: ...

    def clock_errors(self) -> dict[int, int]: ...


def columns(recording: TableSource) -> dict[str, NDArray[Any]]:
    """Return the table's columns as arrays, for users without pandas. Times in seconds since the recording's origin."""
    _, rows = recording.rows_since(0)
    origin = recording.origin_ns or 0
    came = collective_arrivals(rows, recording.clock_errors())
    begin = (rows["arrival"] - origin).astype(np.float64)
    at = {name: (distance(rows, name)).astype(np.float64) for name in ("ready", "started", "finished")}
    at["ready"][rows["flags"] & NOT_READY != 0] = np.nan
    at["started"][rows["flags"] & NOT_STARTED != 0] = np.nan
    seconds: dict[str, NDArray[Any]] = {
        "arrival": begin,
        "ready": begin + at["ready"],
        "start": begin + at["started"],
        "end": begin + at["finished"],
        "waiting": np.where(np.isnan(at["ready"]), at["finished"], at["ready"]),
        "queued": at["started"] - at["ready"],
        "duration": at["finished"] - at["started"],
        **{f"{name}_sum": distance(rows, name) for name in ("pack", "transfer", "wait", "unpack")},
        "lateness": np.where(came.ranks > 1, rows["arrival"] - came.first_ns, np.nan),
        "held_up": np.where(came.ranks > 1, came.last_ns - came.first_ns, np.nan),
    }
    return {
        "rank": rows["rank"],
        "name": _texts(recording.names)[rows["name"]],
        "site": _texts(recording.sites)[rows["name"]],
        "kind": _texts([kind.label for kind in OpKind])[rows["kind"]],
        "dtype": _texts([dtype.label for dtype in DType])[rows["dtype"]],
        "set": rows["set"],
        "operation": rows["op"],
        "sequence": rows["sequence"],
        "batch": rows["batch"],
        "bytes": rows["nbytes"],
        **{name: values / 1e9 for name, values in seconds.items()},
        "ok": (rows["flags"] & FAILED) == 0,
        "ranks": came.ranks,
        "size": rows["size"],
        "last_rank": came.last_rank,
        "certain": came.certain,
    }


def table(recording: TableSource) -> DataFrame:
    """Return the columns as a table; ``last_rank`` is missing where it is not known which rank came last."""
    try:
        import pandas as pd
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "a table of the trace needs pandas; `pip install pandas` adds it", name="pandas"
        ) from None
    frame = pd.DataFrame(columns(recording))
    for name in ("name", "site", "kind", "dtype"):
        frame[name] = frame[name].astype("category")
    frame["last_rank"] = frame["last_rank"].astype("Int64").mask(frame["last_rank"] < 0)
    frame.attrs["dropped"] = recording.dropped
    return frame


def arrow_table(recording: TableSource) -> Any:
    """Return a ``pyarrow.Table``; missing values are null, and the schema's metadata has the number of dropped rows."""
    try:
        import pyarrow as pa  # type: ignore[import-not-found,import-untyped,unused-ignore]  # need not be installed
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "an Arrow table of the trace needs pyarrow; `pip install pyarrow` adds it", name="pyarrow"
        ) from None
    found = {}
    for name, values in columns(recording).items():
        if values.dtype == object:
            found[name] = pa.array(values, pa.string()).dictionary_encode()
        elif name == "last_rank":
            found[name] = pa.array(values, mask=values < 0)
        else:
            found[name] = pa.array(values, from_pandas=True)
    return pa.table(found, metadata={"dropped": str(recording.dropped)})


def metric_columns(recording: TableSource) -> dict[str, NDArray[Any]]:
    """Return the table's columns as arrays, by time. Times in seconds since the recording's origin."""
    _, points = recording.points_since(0)
    series = recording.series()
    points = points[np.argsort(points["time"], kind="stable")]
    of = points["series"]

    def texts(each: list[str]) -> NDArray[Any]:
        return np.array(each, object)[of] if each else np.empty(0, object)

    return {
        "rank": np.array([one.rank for one in series], np.int64)[of],
        "name": texts([one.name for one in series]),
        "time": (points["time"] - (recording.origin_ns or 0)) / 1e9,
        "value": points["value"],
        "step": points["step"],
        "unit": texts([one.unit for one in series]),
    }


def metric_table(recording: TableSource) -> DataFrame:
    """Return the columns as a table; ``step`` is missing where none was given."""
    try:
        import pandas as pd
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "a table of metrics needs pandas; `pip install pandas` adds it", name="pandas"
        ) from None
    frame = pd.DataFrame(metric_columns(recording))
    for name in ("name", "unit"):
        frame[name] = frame[name].astype("category")
    frame["step"] = frame["step"].astype("Int64")
    frame.attrs["dropped"] = recording.points_lost
    return frame


def _texts(texts: list[str]) -> NDArray[Any]:
    return np.array(texts, object)
