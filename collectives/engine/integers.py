"""Integer averages and scaled reductions on any data plane of the host: see :mod:`hvdlab.collectives.reduce.integers`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlab.collectives.dtypes import DType, ReduceOp
from hvdlab.collectives.planes.base import PhaseTimes
from hvdlab.collectives.planes.buffers import HostArray
from hvdlab.collectives.planes.host import HostPlane
from hvdlab.collectives.reduce.integers import WideReduction


def allreduce_wide(
    plane: HostPlane,
    ins: Sequence[HostArray],
    outs: Sequence[HostArray],
    dtype: DType,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    phases: PhaseTimes,
) -> None:
    """Arguments and guarantees are those of a plane's allreduce; ``op`` may also be AVERAGE."""
    wide = WideReduction(dtype, op, plane.context.size, prescale, postscale)
    encoded = [wide.encode(source) for source in ins]
    plane.allreduce(encoded, encoded, DType.I64, wide.op, 1.0, 1.0, phases)
    for reduced, out in zip(encoded, outs, strict=True):
        wide.decode(reduced, out)


def reducescatter_wide(
    plane: HostPlane,
    send: HostArray,
    counts: Sequence[int],
    out: HostArray,
    dtype: DType,
    op: ReduceOp,
    prescale: float,
    postscale: float,
    phases: PhaseTimes,
) -> None:
    """Arguments and guarantees are those of a plane's reducescatter; ``op`` may also be AVERAGE."""
    wide = WideReduction(dtype, op, plane.context.size, prescale, postscale)
    reduced = np.empty(len(out) * wide.width, np.int64)
    widened = [count * wide.width for count in counts]
    plane.reducescatter(wide.encode(send), widened, reduced, DType.I64, wide.op, 1.0, 1.0, phases)
    wide.decode(reduced, out)
