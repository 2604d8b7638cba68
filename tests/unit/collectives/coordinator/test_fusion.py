from __future__ import annotations

import pytest

from hvdlab.collectives.coordinator.fusion import fuse
from hvdlab.collectives.coordinator.signatures import InternedSignature, NegotiationRound
from hvdlab.collectives.types import DType, OpKind, ReduceOp
from support.simulation.coordinator import signature


def rounds(*infos: InternedSignature) -> list[NegotiationRound]:
    return [NegotiationRound(info, 0, 0.0) for info in infos]


def names(batches: list[list[NegotiationRound]]) -> list[str]:
    return ["+".join(current.info.name for current in batch) for batch in batches]


def tensor(
    name: str, count: int = 4, dtype: DType = DType.F32, op: ReduceOp = ReduceOp.SUM
) -> InternedSignature:
    return InternedSignature(signature(name, shape=(count,), dtype=dtype, op=op))


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (0, ["a", "b", "c", "d"]),
        (15, ["a", "b", "c", "d"]),
        (32, ["a+b", "c+d"]),
        (48, ["a+b+c", "d"]),
        (64, ["a+b+c+d"]),
    ],
)
def test_batches_are_filled_to_the_threshold(threshold: int, expected: list[str]) -> None:
    assert names(fuse(rounds(*map(tensor, "abcd")), threshold)) == expected


def test_a_tensor_above_the_threshold_goes_alone() -> None:
    assert names(fuse(rounds(tensor("a"), tensor("big", 100), tensor("b")), 40)) == ["a", "big", "b"]


def test_only_one_kind_goes_together_and_others_do_not_part_it() -> None:
    barrier = InternedSignature(signature("barrier", OpKind.BARRIER, shape=()))
    ready = rounds(
        tensor("a"), tensor("h", dtype=DType.F16), barrier, tensor("b"), tensor("m", op=ReduceOp.MAX),
        tensor("h2", dtype=DType.F16), tensor("c"),
    )  # fmt: skip
    assert names(fuse(ready, 1 << 20)) == ["a+b+c", "h+h2", "barrier", "m"]


def test_only_allreduces_are_fused() -> None:
    gathers = [InternedSignature(signature(name, OpKind.ALLGATHER)) for name in "ab"]
    assert names(fuse(rounds(*gathers), 1 << 20)) == ["a", "b"]
