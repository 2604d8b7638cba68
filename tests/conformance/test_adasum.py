"""Adasum on every plane, for any number of members: it is built of the planes' other operations."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.harness import WorkerGroup
from conformance.planes_under_test import CHUNK
from conformance.test_planes import same
from hvdlab.collectives.dtypes import DType

FLOATING = [DType.F32, DType.F64, DType.F16, DType.BF16]


COUNTS = [[1], [2], [1001], [3 * CHUNK + 1], [5, 3, 0, 2000]]


def _case(dtype: DType, counts: list[int]) -> Any:
    """Lengths are one thing and types another: every type sees the longest ones, the rest is for the soak."""
    everyday = dtype is DType.F32 or counts in COUNTS[-2:]
    name = f"{dtype.label}-{'+'.join(map(str, counts))}"
    return pytest.param(dtype, counts, id=name, marks=() if everyday else pytest.mark.soak)


@pytest.mark.parametrize(("dtype", "counts"), [_case(d, c) for d in FLOATING for c in COUNTS])
def test_adasum_is_the_published_formula(group: WorkerGroup, dtype: DType, counts: list[int]) -> None:
    for in_place in (False, True):
        same(group.run("conformance.adasum_cases:formula", counts=counts, dtype=dtype, in_place=in_place))


@pytest.mark.parametrize("dtype", FLOATING, ids=lambda d: d.label)
def test_adasum_scales_before_and_after(group: WorkerGroup, dtype: DType) -> None:
    for counts in ([7], [CHUNK, 9]):
        same(
            group.run(
                "conformance.adasum_cases:formula", counts=counts, dtype=dtype, prescale=0.5, postscale=3.0
            )
        )


@pytest.mark.parametrize("count", [1, CHUNK])
def test_adasum_adds_what_is_orthogonal_and_averages_what_is_equal(group: WorkerGroup, count: int) -> None:
    same(group.run("conformance.adasum_cases:properties", count=count))
