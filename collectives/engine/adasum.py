"""Adasum over a plane, by what every plane can do: alltoall, small sums, allgather.

Member ``i`` gets slice ``i`` of all members' tensors, together as many elements as one member's tensors have, and combines the
slices along the tree; only the dot products, three numbers for each pair and tensor, are summed over the members at each level.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic_ns

import numpy as np

from hvdlab.collectives.dtypes import DType, ReduceOp
from hvdlab.collectives.planes.base import PhaseTimes
from hvdlab.collectives.planes.buffers import HostArray
from hvdlab.collectives.planes.host import HostPlane
from hvdlab.collectives.reduce.adasum import Segment, combine, levels, narrowed, products, widened


def allreduce_adasum(
    plane: HostPlane,
    ins: Sequence[HostArray],
    outs: Sequence[HostArray],
    dtype: DType,
    prescale: float,
    postscale: float,
    phases: PhaseTimes,
) -> None:
    """Reduce fused tensors by Adasum, each tensor on its own; arguments and guarantees are those of a plane's allreduce.

    Takes as much memory again as the tensors (float16 and bfloat16: as float32), once more if they are several.
    """
    size, index = plane.context.size, plane.context.index
    if size == 1:
        plane.allreduce(ins, outs, dtype, ReduceOp.SUM, prescale, postscale, phases)
        return
    packed = ins[0] if len(ins) == 1 else _timed_concatenation(ins, phases)
    counts = [len(packed) * (i + 1) // size - len(packed) * i // size for i in range(size)]
    mine = counts[index]
    slices = np.empty(size * mine, packed.dtype)
    plane.alltoall(packed, counts, [mine] * size, slices, phases)
    reduced = _reduce_slices(
        plane, slices.reshape(size, mine), _segments(ins, sum(counts[:index]), mine), len(ins), dtype,
        prescale, postscale, phases,
    )  # fmt: skip
    target = outs[0] if len(outs) == 1 else packed
    plane.allgather(reduced, counts, target, phases)
    if len(outs) > 1:
        start = monotonic_ns()
        offset = 0
        for out in outs:
            np.copyto(out, packed[offset : offset + len(out)])
            offset += len(out)
        phases.unpack += monotonic_ns() - start


def _reduce_slices(
    plane: HostPlane,
    slices: HostArray,
    segments: Sequence[Segment],
    tensors: int,
    dtype: DType,
    prescale: float,
    postscale: float,
    phases: PhaseTimes,
) -> HostArray:
    """This member's slice of the result, from the slices of all members (one in each row)."""
    with np.errstate(all="ignore"):
        start = monotonic_ns()
        vectors = widened(slices, dtype, prescale)
        for pairs in levels(len(slices)):
            totals = products(vectors, pairs, segments, tensors)
            flat = totals.reshape(-1)
            phases.transfer += monotonic_ns() - start
            plane.allreduce([flat], [flat], DType.F64, ReduceOp.SUM, 1.0, 1.0, phases)
            start = monotonic_ns()
            combine(vectors, pairs, segments, totals)
        reduced = narrowed(vectors[0], dtype, postscale)
        phases.transfer += monotonic_ns() - start
    return reduced


def _segments(tensors: Sequence[HostArray], begin: int, length: int) -> list[Segment]:
    """Where the tensors lie in the slice of ``length`` elements that begins at ``begin`` of them packed."""
    segments = []
    offset = -begin
    for number, tensor in enumerate(tensors):
        start, stop = max(offset, 0), min(offset + len(tensor), length)
        if start < stop:
            segments.append((number, start, stop))
        offset += len(tensor)
    return segments


def _timed_concatenation(buffers: Sequence[HostArray], phases: PhaseTimes) -> HostArray:
    start = monotonic_ns()
    packed = np.concatenate(buffers)
    phases.pack += monotonic_ns() - start
    return packed
