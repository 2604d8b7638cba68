"""Adasum on every plane, for any number of members: it is built of the planes' other operations."""

from __future__ import annotations

import pytest

from conformance.harness import WorkerGroup
from conformance.planes_under_test import CHUNK
from conformance.test_planes import same
from hvdlab.collectives.dtypes import DType

FLOATING = [DType.F32, DType.F64, DType.F16, DType.BF16]


@pytest.mark.parametrize(
    "counts", [[1], [2], [1001], [3 * CHUNK + 1], [5, 3, 0, 2000]], ids=lambda c: "+".join(map(str, c))
)
@pytest.mark.parametrize("dtype", FLOATING, ids=lambda d: d.label)
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
