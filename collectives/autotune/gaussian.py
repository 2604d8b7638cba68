"""Regression by a Gaussian process over a few points, and how much better another point may be.

For some tens of points; in pure Python, since the coordinator imports no numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, ...]


class GaussianProcess:
    """What is known of a function on the unit cube from noisy values at some points.

    The values are standardized; the covariance of two points falls with the square of their distance.

    Args:
        points: Points at which the function was measured; at least one.
        values: The measured value at each point.
        noise: How much of the values' variance is noise, from 0.
        length: Distance over which values are alike.
    """

    def __init__(
        self, points: Sequence[Point], values: Sequence[float], noise: float, length: float = 0.3
    ) -> None:
        self._points = list(points)
        self._length = length
        self._mean = math.fsum(values) / len(values)
        variance = math.fsum((value - self._mean) ** 2 for value in values) / len(values)
        self._scale = math.sqrt(variance) or 1.0
        scaled = [(value - self._mean) / self._scale for value in values]
        matrix = [[self._covariance(a, b) for b in self._points] for a in self._points]
        for i, row in enumerate(matrix):
            row[i] += noise + 1e-9
        self._factor = cholesky(matrix)
        self._weights = _solve_upper(self._factor, _solve_lower(self._factor, scaled))

    def _covariance(self, a: Point, b: Point) -> float:
        square = math.fsum((x - y) ** 2 for x, y in zip(a, b, strict=True))
        return math.exp(-0.5 * square / self._length**2)

    def predict(self, point: Point) -> tuple[float, float]:
        """Expected value and standard deviation (of the function, without the noise) at a point."""
        mean, deviation = self._standardized(point)
        return self._mean + self._scale * mean, self._scale * deviation

    def _standardized(self, point: Point) -> tuple[float, float]:
        row = [self._covariance(point, known) for known in self._points]
        mean = math.fsum(k * w for k, w in zip(row, self._weights, strict=True))
        explained = math.fsum(v * v for v in _solve_lower(self._factor, row))
        return mean, math.sqrt(max(0.0, 1.0 - explained))

    def best(self) -> float:
        """The largest expected value among the points that were measured."""
        return max(self.predict(point)[0] for point in self._points)

    def expected_improvement(self, point: Point, best: float) -> float:
        """By how much the function is expected to be above ``best`` at a point, counting nothing where it is below."""
        mean, deviation = self.predict(point)
        gain = mean - best
        if deviation <= 1e-12:
            return max(0.0, gain)
        z = gain / deviation
        density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        below = 0.5 * (1 + math.erf(z / math.sqrt(2)))
        return gain * below + deviation * density


def cholesky(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """The lower triangle whose product with its transpose is ``matrix``. Raises ``ValueError`` if there is none."""
    factor: list[list[float]] = []
    for i, row in enumerate(matrix):
        new: list[float] = []
        for j in range(i):
            dot = math.fsum(a * b for a, b in zip(new, factor[j][:j], strict=False))
            new.append((row[j] - dot) / factor[j][j])
        rest = row[i] - math.fsum(a * a for a in new)
        if rest <= 0:
            raise ValueError("the matrix is not positive definite")
        new.append(math.sqrt(rest))
        factor.append(new)
    return factor


def _solve_lower(factor: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    found: list[float] = []
    for row, value in zip(factor, right, strict=True):
        dot = math.fsum(a * x for a, x in zip(row, found, strict=False))
        found.append((value - dot) / row[len(found)])
    return found


def _solve_upper(factor: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """Solve with the transpose of a lower triangle."""
    size = len(factor)
    found = [0.0] * size
    for i in reversed(range(size)):
        dot = math.fsum(factor[j][i] * found[j] for j in range(i + 1, size))
        found[i] = (right[i] - dot) / factor[i][i]
    return found
