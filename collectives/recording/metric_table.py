"""Points of series as a pandas table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]  # has no types

    from hvdlab.collectives.recording.recording import Recording


def metric_columns(recording: Recording) -> dict[str, NDArray[Any]]:
    """The table's columns as arrays, by time. Times in seconds since the recording's origin."""
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


def metric_table(recording: Recording) -> DataFrame:
    """The columns as a table; ``step`` is missing where none was said."""
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
