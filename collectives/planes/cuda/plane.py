"""The plane: from collectives to operations of a :class:`~hvdlab.collectives.planes.cuda.group.Group`."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import ClassVar

from hvdlab.collectives.dtypes import DType, ReduceOp
from hvdlab.collectives.planes import segment
from hvdlab.collectives.planes.base import Phases, Plane, PlaneAborted, PlaneBroken, PlaneContext
from hvdlab.collectives.planes.buffers import Buffer
from hvdlab.collectives.planes.completion import Completion
from hvdlab.collectives.planes.cuda import gpus
from hvdlab.collectives.planes.cuda.board import TENSORS, BoardLayout
from hvdlab.collectives.planes.cuda.device import Device, DeviceFailed
from hvdlab.collectives.planes.cuda.gpus import CUDA, CudaBuffer
from hvdlab.collectives.planes.cuda.group import Group
from hvdlab.collectives.planes.cuda.jobs import MOST_ADDRESSES
from hvdlab.collectives.planes.cuda.operation import (
    AllgatherJobs,
    AllreduceJobs,
    AlltoallJobs,
    BroadcastJobs,
    Operation,
    ReducescatterJobs,
)


class CudaPlane(Plane):
    """A data plane for ranks of one host that share a GPU, or whose GPUs reach each other's memory.

    The members join at the first operation, which says on which GPU this one's tensors are. Reductions add in the order of the
    members' positions, f16 and bf16 in float32, rounded once. ``phases.transfer`` is the time of the kernel, by the GPU's clock.

    Options: ``workers=all`` has each member work on a share, also where several are on one GPU.
    """

    name: ClassVar[str] = "cuda/ipc"
    device: ClassVar[str] = CUDA

    def __init__(self, context: PlaneContext) -> None:
        super().__init__(context)
        self._guard = threading.Lock()
        self._aborted = False
        self._group: Group | None = None
        #: The GPU that this member's tensors are on, once that is known.
        self._gpu: Device | None = None
        self._ordinal = 0
        self._timeout = 30.0

    @classmethod
    def unavailable(cls) -> str | None:
        reason = gpus.why_off() or gpus.gpus().why_unusable()
        return f"The plane `{cls.name}` can't be used: {reason}" if reason else None

    def connect(self, timeout: float) -> None:
        self._timeout = timeout
        if 2 * self.context.size > MOST_ADDRESSES:
            raise PlaneBroken(f"a kernel of `{self.name}` takes no addresses of {self.context.size} ranks")
        if self._aborted:
            raise PlaneAborted

    # -- joining ----------------------------------------------------------------------------------------------------

    def _joined(self, buffers: Sequence[CudaBuffer]) -> Group:
        if self._group is not None:
            return self._group
        deadline = time.monotonic() + self._timeout
        try:
            device = self._device(next((b.ordinal for b in buffers), None))
            workers = self._workers(device, deadline)
            shared = self._memory(deadline)
            group = Group(device, shared, self.context.index, self.context.size, workers)
        except (DeviceFailed, TimeoutError) as error:
            raise PlaneBroken(f"the plane `cuda/ipc`: {error}") from error
        with self._guard:
            self._group = group
            if self._aborted:
                group.stop()
        group.connect(deadline)
        return group

    def _device(self, ordinal: int | None) -> Device:
        """This member's GPU: the one that its first tensor is on; without a tensor, the first GPU that its process uses already."""
        if self._gpu is None:
            self._ordinal = gpus.gpus().used_ordinal() if ordinal is None else ordinal
            self._gpu = gpus.gpus().open(self._ordinal)
        return self._gpu

    def _workers(self, device: Device, deadline: float) -> list[int]:
        """The positions of the workers. Raises ``PlaneBroken`` if this member's GPU does not reach the memory of all members."""
        me, store = self.context, self.context.store
        assert store is not None, "a group of the engine has a store"
        store.set(f"gpu/{me.index}", device.identity.encode())
        identities = [
            store.get(f"gpu/{i}", max(0.0, deadline - time.monotonic())).decode() for i in range(me.size)
        ]
        beyond = [r for r, there in zip(me.ranks, identities, strict=True) if not device.reaches(there)]
        if beyond:
            raise PlaneBroken(
                f"the GPU of rank {me.ranks[me.index]} does not reach the memory of those of ranks {beyond}; "
                "set HVDLAB_CUDA=0 to copy through the host"
            )
        if me.options.get("workers") == "all":
            return list(range(me.size))
        return sorted({identities.index(identity) for identity in identities})

    def _memory(self, deadline: float) -> mmap.mmap:
        me = self.context
        assert me.store is not None
        size = BoardLayout(me.size).size
        if me.index == 0:
            descriptor = segment.offer(me.store, f"hvdlab-cuda-{me.process_set}-{me.epoch}", size)
        else:
            descriptor = segment.accept(me.store, max(0.0, deadline - time.monotonic()))
        try:
            shared = mmap.mmap(descriptor, size)
            # The first member's descriptor stays open until all members have opened the memory by the descriptor's number.
            me.store.set(f"open/{me.index}", b"")
            if me.index == 0:
                for index in range(me.size):
                    me.store.get(f"open/{index}", max(0.0, deadline - time.monotonic()))
        finally:
            os.close(descriptor)
        return shared

    # -- memory -----------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: DType) -> CudaBuffer:
        try:
            device = self._device(None)
            buffer = CudaBuffer(0, shape, dtype, self._ordinal)
            with device:
                owner = _Memory(device, max(1, buffer.nbytes))
        except DeviceFailed as error:
            raise PlaneBroken(f"the GPU of this rank: {error}") from error
        buffer.pointer, buffer.owner = owner.pointer, owner
        return buffer

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> CudaBuffer:
        buffer = self.empty(shape, dtype)
        group = self._joined([buffer])
        group.clear(buffer)
        return buffer

    # -- operations ---------------------------------------------------------------------------------------------------

    def start_allreduce(
        self,
        ins: Sequence[Buffer],
        outs: Sequence[Buffer],
        dtype: DType,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        phases: Phases,
    ) -> Completion | None:
        started = time.monotonic_ns()
        pairs = [(_own(i), _own(o)) for i, o in zip(ins, outs, strict=True) if i.nbytes]
        last: Completion | None = None
        for start in range(0, len(pairs), TENSORS):
            some = pairs[start : start + TENSORS]
            last = self._run(
                Operation(
                    [i for i, _ in some],
                    [o for _, o in some],
                    AllreduceJobs(tuple(i.nbytes // dtype.itemsize for i, _ in some)),
                    dtype=DType.U8 if dtype is DType.BOOL else dtype,
                    op=op,
                    prescale=prescale,
                    postscale=postscale,
                ),
                phases,
                started,
            )
        return last

    def start_allgather(
        self, send: Buffer, counts: Sequence[int], out: Buffer, phases: Phases
    ) -> Completion | None:
        jobs = AllgatherJobs(tuple(count * out.dtype.itemsize for count in counts))
        return self._run(Operation([_own(send)], [_own(out)], jobs), phases)

    def start_broadcast(
        self, source: Buffer | None, out: Buffer, root: int, phases: Phases
    ) -> Completion | None:
        if not out.nbytes:
            return None
        jobs = BroadcastJobs(out.nbytes, root)
        return self._run(Operation([_own(source or out)], [_own(out)], jobs), phases)

    def start_reducescatter(
        self,
        send: Buffer,
        counts: Sequence[int],
        out: Buffer,
        dtype: DType,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        phases: Phases,
    ) -> Completion | None:
        return self._run(
            Operation(
                [_own(send)],
                [_own(out)],
                ReducescatterJobs(tuple(counts), dtype.itemsize),
                dtype=DType.U8 if dtype is DType.BOOL else dtype,
                op=op,
                prescale=prescale,
                postscale=postscale,
            ),
            phases,
        )

    def start_alltoall(
        self,
        send: Buffer,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: Buffer,
        phases: Phases,
    ) -> Completion | None:
        jobs = AlltoallJobs(out.dtype.itemsize)
        return self._run(Operation([_own(send)], [_own(out)], jobs, numbers=list(send_counts)), phases)

    def start_barrier(self, phases: Phases) -> Completion | None:
        return self._run(Operation([], [], AllreduceJobs(())), phases)

    def _run(self, operation: Operation, phases: Phases, started: int = 0) -> Completion:
        if self._aborted:
            raise PlaneAborted
        buffers = (*operation.ins, *operation.outs)
        group = self._joined(buffers)
        elsewhere = next((b.ordinal for b in buffers if b.ordinal != self._ordinal), None)
        if elsewhere is not None:
            raise PlaneBroken(
                f"this rank's tensors were on GPU {self._ordinal} so far, and one is on GPU {elsewhere}: "
                "a process set works on one GPU of each rank"
            )
        return group.run(operation, phases, started or time.monotonic_ns())

    # -- ends ---------------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        with self._guard:
            self._aborted = True
            if self._group is not None:
                self._group.stop()

    def close(self) -> None:
        with self._guard:
            self._aborted = True
            group = self._group
        if group is not None:
            group.close()


class _Memory:
    """Memory of the GPU that is freed when this object goes."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.pointer = device.allocate(nbytes)
        weakref.finalize(
            self, _free, device, self.pointer
        ).atexit = False  # the driver frees all by itself then


def _free(device: Device, pointer: int) -> None:
    with contextlib.suppress(DeviceFailed), device:  # after a failure all memory of the process is gone
        device.free(pointer)


def _own(buffer: Buffer) -> CudaBuffer:
    assert isinstance(buffer, CudaBuffer), f"a buffer on {buffer.device} is not a GPU's"
    return buffer
