"""Adasum, against the published formula written down in float64. The cases run inside workers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from conformance.planes import inputs
from conformance.planes.actor import CollectiveActor
from hvdlab.collectives.types import PLAIN, DType, ReduceOp, Reduction

Wide = npt.NDArray[np.float64]


def of_two(a: Wide, b: Wide) -> Wide:
    """Maleki et al. 2020: (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b."""
    if not a.any() or not b.any():
        return a + b
    common = float(a @ b)
    return (1 - common / (2 * float(a @ a))) * a + (1 - common / (2 * float(b @ b))) * b


def expected(vectors: Sequence[Wide]) -> Wide:
    """Return the halves' results combined; members beyond a power of two are combined with the first ones before."""
    power = 1
    while 2 * power <= len(vectors):
        power *= 2
    heads = list(vectors[:power])
    for number, extra in enumerate(vectors[power:]):
        heads[number] = of_two(heads[number], extra)
    return halved(heads)


def halved(vectors: Sequence[Wide]) -> Wide:
    if len(vectors) == 1:
        return vectors[0]
    half = len(vectors) // 2
    return of_two(halved(vectors[:half]), halved(vectors[half:]))


def formula(
    actor: CollectiveActor,
    counts: Sequence[int],
    dtype: DType,
    reduction: Reduction = PLAIN[ReduceOp.ADASUM],
    in_place: bool = False,
) -> int:
    """Fused tensors, each with dot products of its own."""
    parts = [[inputs.values(i, m, count, dtype) for m in range(actor.size)] for i, count in enumerate(counts)]
    for part in parts[1:2]:
        part[0][...] = 0  # leaves the other members' as it is
    mine = [p[actor.index].copy() for p in parts]
    outs = actor.allreduce(mine, dtype, reduction, in_place)
    for i, (part, out) in enumerate(zip(parts, outs, strict=True)):
        wide = [inputs.to_float64(p, dtype) * reduction.prescale for p in part]
        inputs.assert_reduced(out, expected(wide) * reduction.postscale, dtype, f"tensor {i} of {counts}")
        assert in_place == (out is mine[i])
        assert in_place or np.array_equal(mine[i], part[actor.index])
    return inputs.digest(outs)


def properties(actor: CollectiveActor, count: int) -> int:
    """Check that orthogonal tensors are added up, equal ones averaged, parallel ones in a group kept apart from each
    other."""
    n, i = actor.size, actor.index
    lonely = np.zeros(count * n, np.float32)
    lonely[count * i : count * (i + 1)] = 1 + i
    equal = np.linspace(-1, 1, count * n, dtype=np.float32)
    zeros = np.zeros(count, np.float32)
    summed, mean, nothing = actor.allreduce([lonely, equal, zeros], DType.F32, PLAIN[ReduceOp.ADASUM], False)
    assert np.array_equal(summed, np.repeat(np.arange(1, n + 1, dtype=np.float32), count))
    np.testing.assert_allclose(mean, equal, rtol=1e-6)
    assert not nothing.any()
    return inputs.digest([summed, mean, nothing])
