"""The plane: from collectives to operations of a :class:`~hvdlab.collectives.planes.gpu.ipc_group.IpcGroup`."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from typing import ClassVar

from hvdlab.collectives.planes.base import (
    Buffer,
    Completion,
    Links,
    PhaseTimes,
    PlaneBroken,
    PlaneContext,
    open_memfd,
    publish_memfd,
)
from hvdlab.collectives.planes.gpu.device import Device
from hvdlab.collectives.planes.gpu.gpu_plane import GpuPlane, cuda_buffer, links_between
from hvdlab.collectives.planes.gpu.ipc_group import IpcGroup
from hvdlab.collectives.planes.gpu.ipc_memory import TENSORS, GpuAnnouncementsLayout
from hvdlab.collectives.planes.gpu.jobs import (
    MOST_ADDRESSES,
    AllgatherJobs,
    AllreduceJobs,
    AlltoallJobs,
    BroadcastJobs,
    GpuOperation,
    ReducescatterJobs,
)
from hvdlab.collectives.types import DType, Reduction


class CudaPlane(GpuPlane[IpcGroup]):
    """Data plane for ranks of one host that share a GPU, or whose GPUs reach each other's memory.

    The members join at the first operation, which shows the GPU of this one's tensors. Reductions add in the order of the
    members' positions, f16 and bf16 in float32, rounded once. ``phases.transfer`` is the time of the kernel, by the GPU's clock.

    Options: ``workers=all`` has each member work on a share, also where several are on one GPU.
    """

    name: ClassVar[str] = "cuda/ipc"
    most_members: ClassVar[int] = MOST_ADDRESSES // 2

    def __init__(self, context: PlaneContext) -> None:
        super().__init__(context)
        #: The UUIDs of the members' GPUs, by position.
        self._identities: list[str] = []

    # -- joining ----------------------------------------------------------------------------------------------------

    def _join(self, device: Device, deadline: float) -> IpcGroup:
        workers = self._workers(device, deadline)
        return IpcGroup(device, self._memory(deadline), self.context.index, self.context.size, workers)

    def _workers(self, device: Device, deadline: float) -> list[int]:
        """Return the positions of the workers. Raises ``PlaneBroken`` if this member's GPU does not reach the memory of all members."""
        me, store = self.context, self.context.store
        assert store is not None, "a group of the engine has a store"
        store.set(f"gpu/{me.index}", device.identity.encode())
        identities = self._identities = [
            store.get(f"gpu/{i}", max(0.0, deadline - time.monotonic())).decode() for i in range(me.size)
        ]
        beyond = [r for r, there in zip(me.ranks, identities, strict=True) if not device.reaches(there)]
        if beyond:
            raise PlaneBroken(
                f"the GPU of rank {me.ranks[me.index]} does not reach the memory of those of ranks {beyond}"
            )
        if me.options.get("workers") == "all":
            return list(range(me.size))
        # One worker for each GPU, the first of its members: a GPU runs the processes that share it by turns.
        return sorted({identities.index(identity) for identity in identities})

    def _links(self, others: Sequence[int]) -> Links:
        me = self.context.index
        identities = [identity for index, identity in enumerate(self._identities) if index != me]
        return links_between(self._identities[me], identities, others)

    def _memory(self, deadline: float) -> mmap.mmap:
        me = self.context
        assert me.store is not None
        size = GpuAnnouncementsLayout(me.size).size
        if me.index == 0:
            descriptor = publish_memfd(me.store, f"hvdlab-cuda-{me.process_set}-{me.generation}", size)
        else:
            descriptor = open_memfd(me.store, max(0.0, deadline - time.monotonic()))
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

    # -- operations ---------------------------------------------------------------------------------------------------

    def start_allreduce(
        self,
        ins: Sequence[Buffer],
        outs: Sequence[Buffer],
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> Completion | None:
        started = time.monotonic_ns()
        pairs = [(cuda_buffer(i), cuda_buffer(o)) for i, o in zip(ins, outs, strict=True) if i.nbytes]
        last: Completion | None = None
        for start in range(0, len(pairs), TENSORS):
            some = pairs[start : start + TENSORS]
            last = self._run(
                GpuOperation(
                    [i for i, _ in some],
                    [o for _, o in some],
                    AllreduceJobs(tuple(i.nbytes // dtype.itemsize for i, _ in some)),
                    # The kernels have no type for truth values, and reduce them as the bytes that they are.
                    dtype=DType.U8 if dtype is DType.BOOL else dtype,
                    reduction=reduction,
                ),
                phases,
                started,
            )
        # Operations end in the order in which they were begun, so the end of the last one is that of all.
        return last

    def start_allgather(
        self, send: Buffer, counts: Sequence[int], out: Buffer, phases: PhaseTimes
    ) -> Completion | None:
        jobs = AllgatherJobs(tuple(count * out.dtype.itemsize for count in counts))
        return self._run(GpuOperation([cuda_buffer(send)], [cuda_buffer(out)], jobs), phases)

    def start_broadcast(
        self, source: Buffer | None, out: Buffer, root: int, phases: PhaseTimes
    ) -> Completion | None:
        if not out.nbytes:
            return None
        jobs = BroadcastJobs(out.nbytes, root)
        return self._run(GpuOperation([cuda_buffer(source or out)], [cuda_buffer(out)], jobs), phases)

    def start_reducescatter(
        self,
        send: Buffer,
        counts: Sequence[int],
        out: Buffer,
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> Completion | None:
        return self._run(
            GpuOperation(
                [cuda_buffer(send)],
                [cuda_buffer(out)],
                ReducescatterJobs(tuple(counts), dtype.itemsize),
                dtype=DType.U8 if dtype is DType.BOOL else dtype,
                reduction=reduction,
            ),
            phases,
        )

    def start_alltoall(
        self,
        send: Buffer,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: Buffer,
        phases: PhaseTimes,
    ) -> Completion | None:
        jobs = AlltoallJobs(out.dtype.itemsize)
        return self._run(
            GpuOperation([cuda_buffer(send)], [cuda_buffer(out)], jobs, numbers=list(send_counts)), phases
        )

    def start_barrier(self, phases: PhaseTimes) -> Completion | None:
        return self._run(GpuOperation([], [], AllreduceJobs(())), phases)

    def _run(self, operation: GpuOperation, phases: PhaseTimes, started: int = 0) -> Completion:
        group = self._joined((*operation.ins, *operation.outs))
        return group.run(operation, phases, started or time.monotonic_ns())
