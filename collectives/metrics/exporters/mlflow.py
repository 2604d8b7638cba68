"""MLflow: metrics of a run."""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence
from typing import Any

from hvdlab.collectives.metrics.exporters.keys import BY_RANK, key_of
from hvdlab.collectives.metrics.points import Point

_NOT_ALLOWED = re.compile(r"[^\w\-. /:]")


class MLflow:
    """Logs to a run of MLflow, with the time at which each was measured.

    A metric without a step gets step 0; MLflow can draw it over time. Characters that MLflow does not take in names become
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
        """Log them in one request."""
        metrics = [self._metric(self._name(p), p.value, round(p.time * 1000), p.step or 0) for p in points]
        self._client.log_batch(self.run_id, metrics=metrics)

    def _name(self, point: Point) -> str:
        return _NOT_ALLOWED.sub("_", self._key(point))

    def close(self) -> None:
        """Nothing is held."""
