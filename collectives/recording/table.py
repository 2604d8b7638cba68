"""Spans as a pandas table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hvdlab.collectives.dtypes import DType, OpKind
from hvdlab.collectives.recording.arrivals import arrivals
from hvdlab.collectives.recording.rows import FAILED, NOT_READY, NOT_STARTED, Rows, distance

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]  # has no types

    from hvdlab.collectives.recording.recording import Recording


def columns(recording: Recording) -> dict[str, NDArray[Any]]:
    """The table's columns as arrays, for users without pandas. Times in seconds since the recording's origin."""
    _, rows = recording.rows_since(0)
    origin = recording.origin_ns or 0
    came = arrivals(rows, recording.clock_errors())
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


def table(recording: Recording) -> DataFrame:
    """The columns as a table; ``last_rank`` is missing where it is not known which rank came last."""
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


def _texts(texts: list[str]) -> NDArray[Any]:
    return np.array(texts, object)


__all__ = ["Rows", "columns", "table"]
