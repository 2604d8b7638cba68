"""The plane of a process set of one member: every operation is a (scaled) copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import ClassVar

import numpy as np

from hvdlab.collectives.dtypes import DType, ReduceOp
from hvdlab.collectives.planes.base import Phases, PlaneAborted, PlaneContext
from hvdlab.collectives.planes.buffers import HostArray
from hvdlab.collectives.planes.host import HostPlane
from hvdlab.collectives.reduce.fold import Fold, make_fold


class LocalPlane(HostPlane):
    """A data plane without peers; it never waits."""

    name: ClassVar[str] = "local"

    def __init__(self, context: PlaneContext) -> None:
        if context.size != 1:
            raise ValueError(f"the local plane is for one member, not {context.size}")
        super().__init__(context)
        self._aborted = False
        self._folds: dict[DType, Fold] = {}

    @classmethod
    def unavailable(cls) -> str | None:
        return None

    def connect(self, timeout: float) -> None:
        self._check()

    @np.errstate(all="ignore")
    def allreduce(
        self,
        ins: Sequence[HostArray],
        outs: Sequence[HostArray],
        dtype: DType,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        phases: Phases,
    ) -> None:
        # With one member every operator gives the (scaled) input.
        fold = self._folds.get(dtype) or self._folds.setdefault(dtype, make_fold(dtype, ReduceOp.MAX))

        def run() -> None:
            for source, out in zip(ins, outs, strict=True):
                if prescale == 1.0 and postscale == 1.0:
                    _copy(source, out)
                else:
                    fold([source], out, prescale, postscale)

        self._timed(run, phases)

    def allgather(self, send: HostArray, counts: Sequence[int], out: HostArray, phases: Phases) -> None:
        self._timed(lambda: _copy(send, out), phases)

    def broadcast(self, buffer: HostArray, root: int, phases: Phases) -> None:
        self._check()

    def reducescatter(
        self,
        send: HostArray,
        counts: Sequence[int],
        out: HostArray,
        dtype: DType,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        phases: Phases,
    ) -> None:
        self.allreduce([send], [out], dtype, op, prescale, postscale, phases)

    def alltoall(
        self,
        send: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: HostArray,
        phases: Phases,
    ) -> None:
        self._timed(lambda: _copy(send, out), phases)

    def barrier(self, phases: Phases) -> None:
        self._check()

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self._aborted = True

    def _check(self) -> None:
        if self._aborted:
            raise PlaneAborted

    def _timed(self, step: Callable[[], None], phases: Phases) -> None:
        self._check()
        start = monotonic_ns()
        step()
        phases.transfer += monotonic_ns() - start


def _copy(source: HostArray, out: HostArray) -> None:
    if source is not out:
        out[...] = source
