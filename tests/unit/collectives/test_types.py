from __future__ import annotations

import math

import pytest

from hvdlab.collectives.errors import UnsupportedError
from hvdlab.collectives.types import AVERAGE, PLAIN, SUM, DType, OpKind, ReduceOp, Reduction, check_supported


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


@pytest.mark.parametrize("kind", [OpKind.ALLGATHER, OpKind.BROADCAST, OpKind.ALLTOALL, OpKind.BARRIER])
def test_collectives_that_move_data_take_every_type(kind: OpKind) -> None:
    for dtype in DType:
        check_supported(kind, dtype, ReduceOp.SUM)


@pytest.mark.parametrize("kind", [OpKind.ALLREDUCE, OpKind.REDUCESCATTER])
def test_reductions_take_numbers_and_bool_only_for_min_and_max(kind: OpKind) -> None:
    for dtype in DType:
        for op in ReduceOp:
            refused = dtype is DType.BOOL and op not in (ReduceOp.MIN, ReduceOp.MAX)
            if op is ReduceOp.ADASUM:
                refused = kind is OpKind.REDUCESCATTER or not dtype.is_floating
            if refused:
                with pytest.raises(UnsupportedError, match=kind.label):
                    check_supported(kind, dtype, op)
            else:
                check_supported(kind, dtype, op)


def test_the_refusal_of_bool_says_what_to_do() -> None:
    with pytest.raises(UnsupportedError, match=r"average.*Min.*Max.*cast"):
        check_supported(OpKind.ALLREDUCE, DType.BOOL, ReduceOp.AVERAGE)
