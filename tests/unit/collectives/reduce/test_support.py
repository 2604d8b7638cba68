from __future__ import annotations

import pytest

from hvdlab.collectives.errors import UnsupportedError
from hvdlab.collectives.reduce.support import check_supported
from hvdlab.collectives.types import DType, OpKind, ReduceOp


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
