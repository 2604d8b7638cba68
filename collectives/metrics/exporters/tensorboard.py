"""TensorBoard: event files."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdlab.collectives.metrics.points import Point

_WRITERS = ("torch.utils.tensorboard", "tensorboardX")


class TensorBoard:
    """Writes each rank's metrics to a run of its own, ``rank0``, ``rank1``, …, so that a chart has a curve per rank.

    A metric without a step gets the number of its points so far.

    Args:
        directory: What ``tensorboard --logdir`` is given.
        writer: Makes what writes a run; by default the ``SummaryWriter`` of torch, or else of tensorboardX.

    Raises:
        ModuleNotFoundError: Neither is there; torch's needs ``tensorboard``.
    """

    def __init__(self, directory: str | os.PathLike[str], writer: Callable[[str], Any] | None = None) -> None:
        self._directory = Path(directory)
        self.target = os.path.abspath(directory)
        self._make = writer or _summary_writer()
        self._writers: dict[int, Any] = {}
        self._counts: dict[tuple[int, str], int] = {}

    def write(self, points: Sequence[Point]) -> None:
        """Add them to the runs' files."""
        for point in points:
            step = point.step
            if step is None:
                step = self._counts.get((point.rank, point.name), 0)
                self._counts[point.rank, point.name] = step + 1
            self._writer(point.rank).add_scalar(point.name, point.value, step, point.time)
        for writer in self._writers.values():
            writer.flush()

    def _writer(self, rank: int) -> Any:
        if rank not in self._writers:
            self._writers[rank] = self._make(str(self._directory / f"rank{rank}"))
        return self._writers[rank]

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()


def _summary_writer() -> Callable[[str], Any]:
    for name in _WRITERS:
        try:
            found: Callable[[str], Any] = importlib.import_module(name).SummaryWriter
        except ImportError:
            continue
        return found
    raise ModuleNotFoundError(
        "event files need the package tensorboard (with torch) or tensorboardX", name="tensorboard"
    )
