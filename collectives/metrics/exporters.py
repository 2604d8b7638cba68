"""Exporters for the usual trackers: JSON lines, TensorBoard, Weights & Biases, MLflow. Each imports its package when it is made."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.metrics.export import Point

BY_RANK = "{name}/rank{rank}"
"""Name of a rank's metric in a tracker that knows no ranks."""
STEP = "hvdlab/step"
TIME = "hvdlab/time"

_WRITERS = ("torch.utils.tensorboard", "tensorboardX")
_NOT_ALLOWED = re.compile(r"[^\w\-. /:]")


class JsonLines:
    """Exporter to a file, to which it adds lines: ``{"time": 1767225600.5, "rank": 0, "name": "loss", "value": 0.25, "step": 3}`` and so on.

    A step that is not known and values that are not finite, which JSON has no word for, are ``null``.

    Args:
        path: The file; its directory must exist. Lines of several ranks in one file of one host do not mix.

    Raises:
        OSError: It can't be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.target = os.path.abspath(path)
        # Appended without a buffer: each write adds whole lines at the end of the file, also if several ranks write to it.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (close() closes it)

    def write(self, points: Sequence[Point]) -> None:
        """Add a line for each of the points, all at once."""
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


class TensorBoard:
    """Exporter that writes each rank's metrics to a run of its own, ``rank0``, ``rank1``, …, so that a chart has a curve per rank.

    A metric without a step gets the number of its points so far.

    Args:
        directory: The directory for ``tensorboard --logdir``.
        writer: Makes the writer of a run; by default the ``SummaryWriter`` of torch, or without torch that of tensorboardX.

    Raises:
        ModuleNotFoundError: Neither is installed; torch's needs ``tensorboard``.
    """

    def __init__(self, directory: str | os.PathLike[str], writer: Callable[[str], Any] | None = None) -> None:
        self._directory = Path(directory)
        self.target = os.path.abspath(directory)
        self._make = writer or _summary_writer()
        self._writers: dict[int, Any] = {}
        self._counts: dict[tuple[int, str], int] = {}

    def write(self, points: Sequence[Point]) -> None:
        """Add the points to the runs' files."""
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


class WandB:
    """Exporter to a run of Weights & Biases.

    Its own step only grows, and ranks differ in their steps. So a metric is drawn over ``hvdlab/step``, its training step,
    or over ``hvdlab/time``, in seconds since 1970, if it has none. The run is left open: the code that has begun it finishes it.

    Args:
        run: The run that ``wandb.init()`` returned; by default the active one.
        key: Name in the run; ``{name}`` and ``{rank}`` are filled in.

    Raises:
        ModuleNotFoundError: wandb is not installed.
        InvalidRequestError: ``key`` has other fields, or no run is active.
    """

    def __init__(self, run: Any = None, *, key: str = BY_RANK) -> None:
        self._key = key_of(key)
        self._run = _active() if run is None else run
        self.target = getattr(self._run, "id", None)
        self._known: set[str] = set()

    def write(self, points: Sequence[Point]) -> None:
        """Log the points; those of one step together."""
        rows: dict[tuple[str, float], dict[str, float]] = {}
        for point in points:
            key = self._key(point)
            axis = (TIME, point.time) if point.step is None else (STEP, point.step)
            if key not in self._known:
                self._known.add(key)
                self._run.define_metric(key, step_metric=axis[0])
            row = rows.get(axis)
            if row is None or key in row:  # a second value in the same step comes after the first
                if row is not None:
                    self._run.log(rows.pop(axis))
                row = rows[axis] = {axis[0]: axis[1]}
            row[key] = point.value
        for row in rows.values():
            self._run.log(row)

    def close(self) -> None:
        """Do nothing: no resource is held."""


def _active() -> Any:
    wandb: Any = importlib.import_module("wandb")
    if wandb.run is None:
        raise InvalidRequestError(
            "no run of Weights & Biases is active: call wandb.init() first, or give the run."
        )
    return wandb.run


class MLflow:
    """Exporter to a run of MLflow, with the time at which each was measured.

    A metric without a step gets step 0; MLflow can draw it over time. Characters that MLflow does not accept in names become
    ``_``. The run is left open: the code that has begun it ends it.

    Args:
        run_id: The run; by default the one that is active (``mlflow.start_run()``), or a new one.
        key: Name in MLflow; ``{name}`` and ``{rank}`` are filled in.
        client: An ``MlflowClient``; by default one for the tracking server that is set.

    Raises:
        ModuleNotFoundError: mlflow (or mlflow-skinny) is not installed.
        InvalidRequestError: ``key`` has other fields.
    """

    def __init__(self, run_id: str | None = None, *, key: str = BY_RANK, client: Any = None) -> None:
        mlflow: Any = importlib.import_module("mlflow")
        self._metric: Any = importlib.import_module("mlflow.entities").Metric
        self._key = key_of(key)
        if run_id is None:
            run = mlflow.active_run() or mlflow.start_run()
            run_id = run.info.run_id
        self.run_id = self.target = run_id
        self._client = mlflow.MlflowClient() if client is None else client

    def write(self, points: Sequence[Point]) -> None:
        """Log the points in one request."""
        metrics = [self._metric(self._name(p), p.value, round(p.time * 1000), p.step or 0) for p in points]
        self._client.log_batch(self.run_id, metrics=metrics)

    def _name(self, point: Point) -> str:
        return _NOT_ALLOWED.sub("_", self._key(point))

    def close(self) -> None:
        """Do nothing: no resource is held."""


def key_of(pattern: str) -> Callable[[Point], str]:
    """Return a function that fills ``pattern`` in, as ``str.format`` does, with ``name`` and ``rank``.

    Raises:
        InvalidRequestError: It has other fields.
    """
    try:
        pattern.format(name="loss", rank=0)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise InvalidRequestError(
            f"key={pattern!r} may have {{name}} and {{rank}} in it: {error!r}"
        ) from None
    return lambda point: pattern.format(name=point.name, rank=point.rank)
