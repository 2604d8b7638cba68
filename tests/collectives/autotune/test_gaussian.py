"""Regression and expected improvement, on functions whose truth is known."""

from __future__ import annotations

import math
import random

import pytest

from hvdlab.collectives.autotune.gaussian import GaussianProcess, cholesky


def test_the_factor_times_its_transpose_is_the_matrix() -> None:
    rng = random.Random(1)
    half = [[rng.uniform(-1, 1) for _ in range(6)] for _ in range(6)]
    matrix = [
        [sum(a * b for a, b in zip(r, s, strict=True)) + (i == j) for j, s in enumerate(half)]
        for i, r in enumerate(half)
    ]
    factor = cholesky(matrix)
    for i in range(6):
        for j in range(i + 1):
            product = sum(factor[i][k] * factor[j][k] for k in range(j + 1))
            assert product == pytest.approx(matrix[i][j])


def test_a_matrix_that_is_not_positive_definite_is_refused() -> None:
    with pytest.raises(ValueError, match="positive definite"):
        cholesky([[1.0, 2.0], [2.0, 1.0]])


def test_without_noise_it_goes_through_the_points() -> None:
    points = [(0.1,), (0.5,), (0.9,)]
    process = GaussianProcess(points, [3.0, -1.0, 7.0], noise=0.0)
    for point, value in zip(points, [3.0, -1.0, 7.0], strict=True):
        mean, deviation = process.predict(point)
        assert mean == pytest.approx(value, abs=1e-4)
        assert deviation < 1e-3


def test_far_from_all_points_it_knows_nothing() -> None:
    process = GaussianProcess([(0.0,), (0.1,)], [1.0, 3.0], noise=0.0, length=0.05)
    mean, deviation = process.predict((1.0,))
    assert (mean, deviation) == (pytest.approx(2.0), pytest.approx(1.0))


def test_with_noise_it_smooths() -> None:
    rng = random.Random(2)
    points = [(i / 39,) for i in range(40)]
    process = GaussianProcess(points, [math.sin(3 * x) + rng.gauss(0, 0.3) for (x,) in points], noise=0.5)
    errors = [abs(process.predict((x,))[0] - math.sin(3 * x)) for (x,) in points]
    assert max(errors) < 0.3


def test_equal_values_have_no_scale_of_their_own() -> None:
    process = GaussianProcess([(0.2,), (0.8,)], [5.0, 5.0], noise=0.1)
    assert process.predict((0.5,))[0] == pytest.approx(5.0)


def test_improvement_is_expected_where_little_is_known_or_much_is_promised() -> None:
    process = GaussianProcess([(0.0,), (0.3,)], [0.0, 1.0], noise=0.0, length=0.2)
    best = process.best()
    assert process.expected_improvement((0.3,), best) == pytest.approx(0.0, abs=1e-3)
    assert process.expected_improvement((0.4,), best) > 0.01
    assert process.expected_improvement((1.0,), best) > process.expected_improvement((0.0,), best)
