"""A file with a line of JSON per point. Needs nothing."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence

from hvdlab.collectives.metrics.points import Point


class JsonLines:
    """Adds to a file: ``{"time": 1767225600.5, "rank": 0, "name": "loss", "value": 0.25, "step": 3}`` and so on.

    A step that is not known and values that are not finite, which JSON has no word for, are ``null``.

    Args:
        path: The file; its directory must exist. Lines of several ranks in one file of one host do not mix.

    Raises:
        OSError: It can't be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.target = os.path.abspath(path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (close() closes it)

    def write(self, points: Sequence[Point]) -> None:
        """Add a line for each, all at once."""
        text = memoryview("".join(_line(point) for point in points).encode())
        while text:
            text = text[self._file.write(text) :]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _line(point: Point) -> str:
    value = point.value if math.isfinite(point.value) else None
    fields = {
        "time": round(point.time, 6),
        "rank": point.rank,
        "name": point.name,
        "value": value,
        "step": point.step,
    }
    return json.dumps(fields, ensure_ascii=False) + "\n"
