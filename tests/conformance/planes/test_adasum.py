"""Adasum on every plane, for any number of members: it is built of the planes' other operations."""

from __future__ import annotations

from conformance.planes.harness import WorkerGroup
from conformance.planes.matrix import Matrix
from conformance.planes.planes_under_test import CHUNK
from conformance.planes.test_planes import same
from hvdlab.collectives.types import DType, ReduceOp, Reduction
from support import effort

FLOATING = [DType.F32, DType.F64, DType.F16, DType.BF16]
COUNTS = [[1], [2], [1001], [3 * CHUNK + 1], [5, 3, 0, 2000]]


def _everyday(dtype: DType, counts: list[int]) -> bool:
    """Lengths are one thing and types another: every type sees the longest ones, the rest is for the soak."""
    return dtype is DType.F32 or counts in COUNTS[-2:]


def test_adasum_is_the_published_formula(group: WorkerGroup, matrix: Matrix) -> None:
    def case(kind: tuple[DType, list[int]]) -> None:
        dtype, counts = kind
        for in_place in (False, True):
            same(
                group.run(
                    "conformance.planes.adasum_cases:formula", counts=counts, dtype=dtype, in_place=in_place
                )
            )

    soak = effort.examples(1) > 1
    matrix.run(case, kind=[(d, c) for d in FLOATING for c in COUNTS if soak or _everyday(d, c)])


def test_adasum_scales_before_and_after(group: WorkerGroup, matrix: Matrix) -> None:
    def case(dtype: DType) -> None:
        for counts in ([7], [CHUNK, 9]):
            same(
                group.run(
                    "conformance.planes.adasum_cases:formula",
                    counts=counts,
                    dtype=dtype,
                    reduction=Reduction(ReduceOp.ADASUM, 0.5, 3.0),
                )
            )

    matrix.run(case, dtype=FLOATING)


def test_adasum_adds_what_is_orthogonal_and_averages_what_is_equal(
    group: WorkerGroup, matrix: Matrix
) -> None:
    def case(count: int) -> None:
        same(group.run("conformance.planes.adasum_cases:properties", count=count))

    matrix.run(case, count=[1, CHUNK])
