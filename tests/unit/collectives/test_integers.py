from __future__ import annotations

from fractions import Fraction
from math import trunc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlab.collectives.planes.base import storage_type
from hvdlab.collectives.reduce import WideReduction, needs_width
from hvdlab.collectives.types import AVERAGE, SUM, DType, ReduceOp, Reduction

INTEGERS = [DType.U8, DType.I8, DType.I16, DType.I32, DType.I64]


def reduced(
    dtype: DType, op: ReduceOp, rows: list[list[int]], pre: float = 1.0, post: float = 1.0
) -> list[int]:
    wide = WideReduction(dtype, Reduction(op, pre, post), len(rows))
    encoded = [wide.encode(np.array(row, storage_type(dtype))) for row in rows]
    ufunc = {ReduceOp.SUM: np.add, ReduceOp.MAX: np.maximum}[wide.of_encoded.op]
    out = np.empty(len(rows[0]), storage_type(dtype))
    wide.decode(ufunc.reduce(encoded), out)
    return [int(value) for value in out]


@given(st.data(), st.sampled_from(INTEGERS), st.integers(1, 40))
def test_averages_are_exact_and_truncated(data: st.DataObject, dtype: DType, members: int) -> None:
    info = np.iinfo(storage_type(dtype))
    values = data.draw(
        st.lists(st.integers(int(info.min), int(info.max)), min_size=members, max_size=members)
    )
    expected = trunc(Fraction(sum(values), members))
    assert reduced(dtype, ReduceOp.AVERAGE, [[v, values[0]] for v in values])[0] == expected
    assert reduced(dtype, ReduceOp.AVERAGE, [[values[0]]] * members) == [values[0]]


@pytest.mark.parametrize(
    ("dtype", "op", "values", "pre", "post", "expected"),
    [
        (DType.I8, ReduceOp.AVERAGE, [127, 127, 127], 1.0, 1.0, 127),
        (DType.I64, ReduceOp.AVERAGE, [2**62 + 1] * 4, 1.0, 1.0, 2**62 + 1),
        (DType.I8, ReduceOp.SUM, [127, 127, 127], 1.0, 1 / 3, 127),
        (DType.I8, ReduceOp.SUM, [100, 100], 3.0, 1 / 6, 100),
        (DType.I8, ReduceOp.MAX, [100, 50], 3.0, 1 / 3, 100),
        (DType.U8, ReduceOp.SUM, [200, 200], 1.0, 0.9, 360 - 256),  # does not fit: modulo the width
        (DType.I32, ReduceOp.AVERAGE, [-7, 0], 1.0, 1.0, -3),
        (DType.I32, ReduceOp.AVERAGE, [7, 8], 0.5, 1.0, 3),  # 3 and 4 are averaged
        (DType.I64, ReduceOp.AVERAGE, [7, 8], 1.0, 2.0, 15),
    ],
)
def test_values(
    dtype: DType, op: ReduceOp, values: list[int], pre: float, post: float, expected: int
) -> None:
    assert reduced(dtype, op, [[value] for value in values], pre, post) == [expected]


def test_plain_sums_and_floats_go_the_short_way() -> None:
    for dtype in DType:
        integer = dtype in INTEGERS
        assert needs_width(dtype, AVERAGE) is integer
        assert not needs_width(dtype, SUM)
        assert needs_width(dtype, Reduction(ReduceOp.SUM, postscale=0.5)) is (
            integer and dtype is not DType.I64
        )
