"""Planes of the host: their operations work on arrays, on the thread that calls them, and return when they are done.

:class:`Staging` packs fused tensors into one buffer for planes that need their data in one piece. ``shm`` packs while it copies;
``gloo`` and ``mpi`` hand a contiguous buffer to a library. The buffer is of a *compute type* in which that library reduces without losing
precision: float32 for f16 and bf16, uint8 for bool.

:class:`LocalPlane` is the plane of a process set of one member.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hvdlab.collectives.planes.base import (
    HOST,
    Buffer,
    HostArray,
    PhaseTimes,
    Plane,
    PlaneAborted,
    PlaneContext,
    host_view,
    storage_type,
)
from hvdlab.collectives.reduce import HALF_BLOCK, Fold, conversion_of, make_fold
from hvdlab.collectives.types import DType, ReduceOp, Reduction


class HostPlane(Plane):
    """Data plane of the host's memory.

    Its operations take arrays: one-dimensional, C-contiguous, in storage type. They block until the
    operation has ended, and raise the error that it ends with.
    """

    device: ClassVar[str] = HOST

    @abstractmethod
    def allreduce(
        self,
        ins: Sequence[HostArray],
        outs: Sequence[HostArray],
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> None:
        """Reduce element by element over all members; see :meth:`Plane.start_allreduce`."""

    @abstractmethod
    def allgather(self, send: HostArray, counts: Sequence[int], out: HostArray, phases: PhaseTimes) -> None:
        """Concatenate the members' ``send`` (``counts[i]`` elements each) in member order into ``out``."""

    @abstractmethod
    def broadcast(self, buffer: HostArray, root: int, phases: PhaseTimes) -> None:
        """Copy the buffer of member ``root`` (a position) to all: it is read on that member and written on the others."""

    @abstractmethod
    def reducescatter(
        self,
        send: HostArray,
        counts: Sequence[int],
        out: HostArray,
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> None:
        """Reduce ``send`` (``sum(counts)`` elements) and leave slice ``i`` (``counts[i]`` elements) in ``out`` of member ``i``."""

    @abstractmethod
    def alltoall(
        self,
        send: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: HostArray,
        phases: PhaseTimes,
    ) -> None:
        """Send the ``j``-th piece of ``send`` to member ``j``; ``out`` gets the pieces in member order."""

    @abstractmethod
    def barrier(self, phases: PhaseTimes) -> None:
        """Return once all members have called it."""

    # -- buffers --------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: DType) -> HostArray:
        return np.empty(shape, storage_type(dtype))

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> HostArray:
        # The system hands out zeroed memory as it is touched: until the operation's turn comes, the zeros cost nothing.
        return np.zeros(shape, storage_type(dtype))

    def start_allreduce(
        self,
        ins: Sequence[Buffer],
        outs: Sequence[Buffer],
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> None:
        views = [host_view(source) for source in ins]
        self.allreduce(views, [host_view(out) for out in outs], dtype, reduction, phases)

    def start_allgather(self, send: Buffer, counts: Sequence[int], out: Buffer, phases: PhaseTimes) -> None:
        self.allgather(host_view(send), counts, host_view(out), phases)

    def start_broadcast(self, source: Buffer | None, out: Buffer, root: int, phases: PhaseTimes) -> None:
        target = host_view(out)
        if source is not None and root == self.context.index:
            np.copyto(target, host_view(source))
        self.broadcast(target, root, phases)

    def start_reducescatter(
        self,
        send: Buffer,
        counts: Sequence[int],
        out: Buffer,
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> None:
        self.reducescatter(host_view(send), counts, host_view(out), dtype, reduction, phases)

    def start_alltoall(
        self,
        send: Buffer,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: Buffer,
        phases: PhaseTimes,
    ) -> None:
        self.alltoall(host_view(send), send_counts, recv_counts, host_view(out), phases)

    def start_barrier(self, phases: PhaseTimes) -> None:
        self.barrier(phases)


_COMPUTE: dict[DType, np.dtype[Any]] = {
    DType.F16: np.dtype(np.float32),
    DType.BF16: np.dtype(np.float32),
    DType.BOOL: np.dtype(np.uint8),
}


def widen(source: HostArray, target: HostArray, dtype: DType) -> None:
    """Copy storage elements into an equally long buffer of the compute type."""
    if not _is_wide_half(target, dtype):
        np.copyto(target, source, casting="unsafe")
        return
    convert = conversion_of(dtype).widen
    for start in range(0, len(source), HALF_BLOCK):
        convert(source[start : start + HALF_BLOCK], target[start : start + HALF_BLOCK])


def narrow(source: HostArray, target: HostArray, dtype: DType) -> None:
    """Copy compute elements back to storage, rounding once; may overwrite ``source``."""
    with np.errstate(over="ignore", invalid="ignore"):
        if not _is_wide_half(source, dtype):
            np.copyto(target, source, casting="unsafe")
            return
        convert = conversion_of(dtype).narrow
        for start in range(0, len(source), HALF_BLOCK):
            convert(source[start : start + HALF_BLOCK], target[start : start + HALF_BLOCK])


def _is_wide_half(buffer: HostArray, dtype: DType) -> bool:
    return dtype in (DType.F16, DType.BF16) and buffer.dtype == np.float32


def scale(buffer: HostArray, factor: float) -> None:
    """Multiply in place; integers in float64, truncated toward zero."""
    if factor == 1.0:
        return
    if buffer.dtype.kind == "f":
        # The factor in the type of the elements: a float64 would make numpy 2 compute float32 tensors in float64.
        np.multiply(buffer, buffer.dtype.type(factor), out=buffer)
    else:
        np.copyto(buffer, np.trunc(buffer.astype(np.float64) * factor), casting="unsafe")


class Scratch:
    """Memory that one thread uses again and again; it stays as large as the largest request so far."""

    def __init__(self) -> None:
        self._memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def take(self, count: int, kind: np.dtype[Any]) -> HostArray:
        """Return ``count`` uninitialised elements, valid until the next call."""
        nbytes = count * kind.itemsize
        if self._memory.size < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes].view(kind)

    def leave(self) -> None:
        """Give this memory up for good: a library still reads or writes it."""
        self._memory = np.empty(0, np.uint8)


class Staging(Scratch):
    """Memory for reusable contiguous buffers between fused tensors and a library call.

    One per plane, used by the executor thread only. Memory kept is bounded by the largest fused call so far, which
    the fusion threshold bounds.

    Args:
        compute: Compute types that differ from the storage type for this plane, beside f16, bf16 and bool.
        direct: Whether the library may be given a user's output to write to.
    """

    def __init__(self, compute: Mapping[DType, np.dtype[Any]] | None = None, *, direct: bool = True) -> None:
        super().__init__()
        self._direct = direct
        self._compute = {**_COMPUTE, **(compute or {})}

    def compute_type(self, dtype: DType) -> np.dtype[Any]:
        return self._compute.get(dtype, storage_type(dtype))

    def pack(
        self, ins: Sequence[HostArray], outs: Sequence[HostArray], dtype: DType, prescale: float
    ) -> HostArray:
        """Return the inputs, scaled, one after another in a buffer that the library may overwrite.

        A lone tensor that needs no conversion is copied to its own output and that is returned (if ``direct``), so
        that the result needs no copy back.
        """
        compute = self.compute_type(dtype)
        if self._direct and len(ins) == 1 and compute == storage_type(dtype):
            packed = outs[0]
            if not _same_memory(ins[0], packed):
                np.copyto(packed, ins[0])
        else:
            packed = self.take(sum(b.size for b in ins), compute)
            offset = 0
            for buffer in ins:
                self._widen(buffer, packed[offset : offset + buffer.size], dtype, prescale)
                offset += buffer.size
            return packed
        scale(packed, prescale)
        return packed

    def unpack(self, packed: HostArray, outs: Sequence[HostArray], dtype: DType, postscale: float) -> None:
        """Scale the reduced buffer and hand its pieces to the outputs."""
        if _wraps(packed.dtype, dtype):
            # Narrowed before it is scaled: a sum beyond the type wraps first, as on planes that reduce in the type itself.
            packed = packed.astype(storage_type(dtype))
        scale(packed, postscale)
        if len(outs) == 1 and packed is outs[0]:
            return
        offset = 0
        for buffer in outs:
            narrow(packed[offset : offset + buffer.size], buffer, dtype)
            offset += buffer.size

    def widened(self, source: HostArray, dtype: DType, prescale: float) -> HostArray:
        """Return a scaled copy in the compute type."""
        target = np.empty(source.size, self.compute_type(dtype))
        self._widen(source, target, dtype, prescale)
        return target

    @staticmethod
    def _widen(source: HostArray, target: HostArray, dtype: DType, prescale: float) -> None:
        if prescale != 1.0 and _wraps(target.dtype, dtype):
            # scale() works in place, and the input is the user's.
            source = source.copy()
            scale(source, prescale)
            prescale = 1.0
        widen(source, target, dtype)
        scale(target, prescale)


def leave_to_library(*objects: object) -> None:
    """Keep these objects alive for as long as the process lives: a library that can't cancel an operation may still use them."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _wraps(compute: np.dtype[Any], dtype: DType) -> bool:
    """Return whether ``compute`` is a wider integer than the storage type. That must not show in results, so values are scaled in their own
    type.
    """
    return compute.kind == "i" and compute != storage_type(dtype)


def _same_memory(a: HostArray, b: HostArray) -> bool:
    return bool(a.__array_interface__["data"][0] == b.__array_interface__["data"][0])


class LocalPlane(HostPlane):
    """Data plane without peers: every operation is a (scaled) copy, and none waits."""

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
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> None:
        # With one member every operator gives the (scaled) input.
        _, prescale, postscale = reduction
        fold = self._folds.get(dtype) or self._folds.setdefault(dtype, make_fold(dtype, ReduceOp.MAX))

        def run() -> None:
            for source, out in zip(ins, outs, strict=True):
                if prescale == 1.0 and postscale == 1.0:
                    _copy(source, out)
                else:
                    fold([source], out, prescale, postscale)

        self._timed(run, phases)

    def allgather(self, send: HostArray, counts: Sequence[int], out: HostArray, phases: PhaseTimes) -> None:
        self._timed(lambda: _copy(send, out), phases)

    def broadcast(self, buffer: HostArray, root: int, phases: PhaseTimes) -> None:
        self._check()

    def reducescatter(
        self,
        send: HostArray,
        counts: Sequence[int],
        out: HostArray,
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> None:
        self.allreduce([send], [out], dtype, reduction, phases)

    def alltoall(
        self,
        send: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: HostArray,
        phases: PhaseTimes,
    ) -> None:
        self._timed(lambda: _copy(send, out), phases)

    def barrier(self, phases: PhaseTimes) -> None:
        self._check()

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self._aborted = True

    def _check(self) -> None:
        if self._aborted:
            raise PlaneAborted

    def _timed(self, step: Callable[[], None], phases: PhaseTimes) -> None:
        self._check()
        start = monotonic_ns()
        step()
        phases.transfer += monotonic_ns() - start


def _copy(source: HostArray, out: HostArray) -> None:
    if source is not out:
        out[...] = source
