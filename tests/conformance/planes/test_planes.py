"""Every operation, element type and awkward size on every plane, against numpy; every member gets the same bits."""

from __future__ import annotations

from conformance.planes.cases import even_split
from conformance.planes.conftest import skip_unless_available
from conformance.planes.harness import WorkerGroup
from conformance.planes.matrix import Matrix
from conformance.planes.planes_under_test import CHUNK
from hvdlab.collectives.types import PLAIN, DType, ReduceOp, Reduction

REDUCIBLE = [d for d in DType if d is not DType.BOOL]
INTEGERS = [d for d in REDUCIBLE if not d.is_floating]
OPS = [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT]
COUNTS = sorted({
    0, 1, 2, 3, 7, 64, 1001,
    *(CHUNK // 4 + d for d in (-1, 0, 1)),      # one chunk of float32
    *(CHUNK // 2 + d for d in (-1, 0, 1)),      # two of them; one of 16-bit types
    3 * CHUNK // 4 + 5, 5 * CHUNK, 13 * CHUNK + 1,  # several chunks; more than all slots
})  # fmt: skip
FUSED = ([5, 3], [0, 4, 0], [1] * 40, [CHUNK // 4 - 1, 2, CHUNK], [CHUNK * 3, 1, 1, CHUNK // 8, 0, 17])
SCALES = [(0.5, 1.0), (1.0, 1 / 3), (1.7, 0.25)]
IN_PLACE = (False, True)


def same(checksums: list[int]) -> None:
    assert len(set(checksums)) == 1, f"members differ: {checksums}"


def test_allreduce_sums_any_size(group: WorkerGroup, matrix: Matrix) -> None:
    def case(dtype: DType, count: int) -> None:
        for in_place in IN_PLACE:
            same(
                group.run(
                    "conformance.planes.cases:allreduce",
                    counts=[count],
                    dtype=dtype,
                    in_place=in_place,
                    seed=count,
                )
            )

    matrix.run(case, dtype=[DType.F32, DType.F64, DType.I32, DType.BF16], count=COUNTS)


def test_allreduce_reduces_every_type(group: WorkerGroup, matrix: Matrix) -> None:
    def case(dtype: DType, op: ReduceOp) -> None:
        for count in (1, 1001, CHUNK, 3 * CHUNK + 1):
            for in_place in IN_PLACE:
                same(
                    group.run(
                        "conformance.planes.cases:allreduce",
                        counts=[count],
                        dtype=dtype,
                        reduction=PLAIN[op],
                        in_place=in_place,
                    )
                )

    matrix.run(case, dtype=REDUCIBLE, op=OPS)


def test_allreduce_of_bool_is_and_or(group: WorkerGroup, matrix: Matrix) -> None:
    def case(op: ReduceOp) -> None:
        for count in (1, 1001, 3 * CHUNK + 1):
            same(
                group.run(
                    "conformance.planes.cases:allreduce",
                    counts=[count],
                    dtype=DType.BOOL,
                    reduction=PLAIN[op],
                )
            )

    matrix.run(case, op=[ReduceOp.MIN, ReduceOp.MAX])


def test_allreduce_scales_before_and_after(group: WorkerGroup, matrix: Matrix) -> None:
    def case(dtype: DType, op: ReduceOp, scales: tuple[float, float]) -> None:
        for counts in ([3], [CHUNK + 5], [40, CHUNK // 2]):
            for in_place in IN_PLACE:
                same(group.run(
                    "conformance.planes.cases:allreduce", counts=counts, dtype=dtype,
                    reduction=Reduction(op, *scales), in_place=in_place,
                ))  # fmt: skip

    matrix.run(case, dtype=REDUCIBLE, op=[ReduceOp.SUM, ReduceOp.MIN], scales=SCALES)


def test_allreduce_averages(group: WorkerGroup, matrix: Matrix) -> None:
    def case(dtype: DType, scales: tuple[float, float]) -> None:
        for counts in ([3], [CHUNK + 5], [40, CHUNK // 2]):
            for in_place in IN_PLACE:
                same(group.run(
                    "conformance.planes.cases:allreduce", counts=counts, dtype=dtype,
                    reduction=Reduction(ReduceOp.AVERAGE, *scales), in_place=in_place,
                ))  # fmt: skip

    matrix.run(case, dtype=REDUCIBLE, scales=[(1.0, 1.0), (0.5, 2.0)])


def test_averages_of_integers_do_not_overflow(group: WorkerGroup, matrix: Matrix) -> None:
    def case(dtype: DType) -> None:
        for count in (6, 3 * CHUNK + 1):
            same(group.run("conformance.planes.cases:extremes", dtype=dtype, count=count))

    matrix.run(case, dtype=INTEGERS)


def test_allreduce_takes_fused_lists(group: WorkerGroup, matrix: Matrix) -> None:
    def case(dtype: DType, counts: list[int]) -> None:
        for in_place in IN_PLACE:
            same(
                group.run("conformance.planes.cases:allreduce", counts=counts, dtype=dtype, in_place=in_place)
            )

    matrix.run(case, dtype=[DType.F32, DType.U8, DType.F16, DType.I64], counts=FUSED)


def test_halves_accumulate_wide_and_keep_special_values(group: WorkerGroup, matrix: Matrix) -> None:
    def case(dtype: DType) -> None:
        same(group.run("conformance.planes.cases:halves", dtype=dtype))

    matrix.run(case, dtype=[DType.F16, DType.BF16])


def test_allgather_concatenates(group: WorkerGroup, matrix: Matrix) -> None:
    n = group.size

    def case(dtype: DType) -> None:
        for counts in (
            [7] * n,
            list(range(n)),
            [0] * n,
            [2 * CHUNK + i for i in range(n)],
            [0] * (n - 1) + [5 * CHUNK],
        ):
            same(group.run("conformance.planes.cases:allgather", counts=counts, dtype=dtype))

    matrix.run(case, dtype=list(DType))


def test_broadcast_from_every_root(group: WorkerGroup, matrix: Matrix) -> None:
    def case(count: int) -> None:
        for root in range(group.size):
            same(group.run("conformance.planes.cases:broadcast", count=count, dtype=DType.F32, root=root))

    matrix.run(case, count=COUNTS)


def test_broadcast_moves_every_type(group: WorkerGroup, matrix: Matrix) -> None:
    def case(dtype: DType) -> None:
        for count in (1, 3 * CHUNK + 1):
            same(
                group.run("conformance.planes.cases:broadcast", count=count, dtype=dtype, root=group.size - 1)
            )

    matrix.run(case, dtype=list(DType))


def test_reducescatter_leaves_each_its_slice(group: WorkerGroup, matrix: Matrix) -> None:
    n = group.size
    even = [[4] * n, [0] * n, even_split(1, n), even_split(2 * CHUNK * n + 1, n)]
    ragged = [list(range(n)), [CHUNK + i for i in range(n)], [3 * CHUNK] + [1] * (n - 1)]

    def case(dtype: DType, op: ReduceOp) -> None:
        for counts in even if "ragged" in group.plane.lacks else even + ragged:
            group.run(
                "conformance.planes.cases:reducescatter", counts=counts, dtype=dtype, reduction=PLAIN[op]
            )

    matrix.run(case, dtype=REDUCIBLE, op=OPS)


def test_reducescatter_scales(group: WorkerGroup, matrix: Matrix) -> None:
    counts = even_split(CHUNK * group.size // 2 + 1, group.size)

    def case(dtype: DType, scales: tuple[float, float]) -> None:
        group.run(
            "conformance.planes.cases:reducescatter",
            counts=counts,
            dtype=dtype,
            reduction=Reduction(ReduceOp.SUM, *scales),
        )

    matrix.run(case, dtype=[DType.F32, DType.I32, DType.BF16], scales=SCALES)


def test_alltoall_transposes(group: WorkerGroup, matrix: Matrix) -> None:
    n = group.size

    def case(dtype: DType) -> None:
        for table in (
            [[3] * n] * n,
            [[(i * 7 + j * 3) % 5 for j in range(n)] for i in range(n)],
            [[0] * n] * n,
            [[CHUNK * (i == 0) + j for j in range(n)] for i in range(n)],
            [[5 * CHUNK * (i == n - 1 and j == 0) for j in range(n)] for i in range(n)],
        ):
            group.run("conformance.planes.cases:alltoall", table=table, dtype=dtype)

    matrix.run(case, dtype=list(DType))


def test_messages_of_each_member_to_each_other(group: WorkerGroup, matrix: Matrix) -> None:
    skip_unless_available(group.plane, "messages")

    def case(dtype: DType, count: int) -> None:
        group.run("conformance.planes.cases:messages", count=count, dtype=dtype, seed=count)
        same(
            group.run("conformance.planes.cases:mixture", seed=count, rounds=3)
        )  # they disturb no other tests

    matrix.run(case, dtype=[DType.F32, DType.BF16, DType.BOOL], count=[0, 1, 1001, 13 * CHUNK + 1])


def test_barrier_returns(group: WorkerGroup) -> None:
    for _ in range(3):
        group.run("conformance.planes.cases:barrier")


def test_operations_follow_each_other_without_a_pause(group: WorkerGroup, matrix: Matrix) -> None:
    def case(seed: int) -> None:
        same(group.run("conformance.planes.cases:mixture", seed=seed, rounds=60))

    matrix.run(case, seed=range(4))


def test_a_generation_follows_a_generation(group: WorkerGroup) -> None:
    for _ in range(3):
        group.configure()
        same(group.run("conformance.planes.cases:allreduce", counts=[100], dtype=DType.F32))
