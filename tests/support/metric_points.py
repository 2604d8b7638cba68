"""The numbers that a rank records, as it records them: points that a test has not read yet are not sent away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class MetricPoints:
    """Points recorded since the last call, by name without ``hvdlab/``: pairs of steps and values."""

    def __init__(self) -> None:
        self._recorded: dict[str, list[tuple[int, float]]] = {}

    def add(self, name: str, value: float, step: int | None) -> None:
        self._recorded.setdefault(name.removeprefix("hvdlab/"), []).append((step or 0, float(value)))

    def __call__(self) -> dict[str, list[tuple[int, float]]]:
        found, self._recorded = self._recorded, {}
        return found


@contextmanager
def recorded_points() -> Iterator[MetricPoints]:
    """Yield the records of this rank's engine in this context."""
    from hvdlab.collectives import context

    engine: Any = context.engine()
    points, original = MetricPoints(), engine.metric

    def metric(name: str, value: float, step: int | None = None, time_ns: int | None = None) -> None:
        points.add(name, value, step)
        original(name, value, step, time_ns)

    engine.metric = metric
    try:
        yield points
    finally:
        del engine.metric
