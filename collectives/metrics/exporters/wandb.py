"""Weights & Biases: the history of a run."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from hvdlab.collectives.errors import InvalidRequestError
from hvdlab.collectives.metrics.exporters.keys import BY_RANK, key_of
from hvdlab.collectives.metrics.points import Point

STEP = "hvdlab/step"
TIME = "hvdlab/time"


class WandB:
    """Logs to a run of Weights & Biases.

    Its own step only grows, and ranks differ in where they are, so a metric is drawn over ``hvdlab/step``, its training step,
    or over ``hvdlab/time``, in seconds since 1970, if it has none. The run is left open: the code that has begun it finishes it.

    Args:
        run: What ``wandb.init()`` returned; by default the run that is active.
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
        """Log them; those of one step together."""
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
        """Nothing is held."""


def _active() -> Any:
    wandb: Any = importlib.import_module("wandb")
    if wandb.run is None:
        raise InvalidRequestError(
            "no run of Weights & Biases is active: call wandb.init() first, or give the run."
        )
    return wandb.run
