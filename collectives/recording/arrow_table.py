"""Spans as an Arrow table: the same columns as the pandas one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hvdlab.collectives.recording.table import columns

if TYPE_CHECKING:
    from hvdlab.collectives.recording.recording import Recording


def arrow_table(recording: Recording) -> Any:
    """A ``pyarrow.Table``; what is missing is null, and the schema's metadata says how many rows were dropped."""
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
