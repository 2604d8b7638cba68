from __future__ import annotations

import math

import pytest

from hvdlab.collectives.types import AVERAGE, PLAIN, SUM, ReduceOp, Reduction


def test_a_plane_averages_by_a_sum_that_is_divided_after_all_other_factors() -> None:
    assert AVERAGE.summed(4) == Reduction(ReduceOp.SUM, 1.0, 0.25)
    assert Reduction(ReduceOp.AVERAGE, 3.0, 2.0).summed(3) == Reduction(ReduceOp.SUM, 3.0, 2.0 / 3)


@pytest.mark.parametrize("op", [op for op in ReduceOp if op is not ReduceOp.AVERAGE])
def test_other_reductions_are_a_planes_own_and_none_is_made(op: ReduceOp) -> None:
    assert PLAIN[op].summed(4) is PLAIN[op]


def test_a_factor_that_is_nan_is_found_on_either_side() -> None:
    assert not Reduction(ReduceOp.SUM, math.inf, -0.0).has_nan
    assert Reduction(ReduceOp.SUM, math.nan).has_nan
    assert Reduction(ReduceOp.SUM, postscale=float("nan")).has_nan


def test_a_factor_on_either_side_is_a_scale() -> None:
    assert not SUM.is_scaled
    assert Reduction(ReduceOp.SUM, 0.5).is_scaled
    assert Reduction(ReduceOp.SUM, postscale=0.5).is_scaled
