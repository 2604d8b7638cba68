"""The plane: every operation is composed of operations of `cuda/ipc` within hosts and of a plane of the host's memory between them.

As in the plane `hierarchical`, whose :mod:`~hvdlab.collectives.planes.hierarchical.topology` it shares, data goes between hosts once it has been reduced (or
gathered) within them, each carrier's share in its own column. A carrier copies its share to the host and back.

An operation has been executed when the call that starts it returns: the plane between hosts works on the calling thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise
from queue import SimpleQueue
from time import monotonic_ns
from typing import ClassVar

import numpy as np

from hvdlab.collectives.arrays import storage_type
from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.dtypes import DType, ReduceOp
from hvdlab.collectives.planes import registry
from hvdlab.collectives.planes.base import Phases, Plane, PlaneAborted, PlaneBroken, PlaneContext
from hvdlab.collectives.planes.buffers import Buffer, HostArray
from hvdlab.collectives.planes.completion import Completion
from hvdlab.collectives.planes.cuda import gpus
from hvdlab.collectives.planes.cuda.device import DeviceFailed
from hvdlab.collectives.planes.cuda.gpu_plane import allocated, cuda_buffer
from hvdlab.collectives.planes.cuda.gpus import CUDA, CudaBuffer
from hvdlab.collectives.planes.cuda.jobs import LINE
from hvdlab.collectives.planes.cuda.operation import WIDE
from hvdlab.collectives.planes.cuda.plane import CudaPlane
from hvdlab.collectives.planes.cuda_hosts.stage import Bytes, Stage
from hvdlab.collectives.planes.hierarchical.gathering import Gathering
from hvdlab.collectives.planes.hierarchical.topology import Topology
from hvdlab.collectives.planes.host import HostPlane
from hvdlab.collectives.planes.links import NETWORK, Links
from hvdlab.collectives.planes.parts import Parts, seconds_left
from hvdlab.collectives.planes.shm.chunks import slice_bounds
from hvdlab.collectives.planes.staging import narrow

_GRAIN = 16
"""Slices are cut at multiples of this many elements, so that they begin at lines."""


class CudaHierarchicalPlane(Plane):
    """A data plane for CUDA tensors of ranks on several hosts, without a network between GPUs.

    Options: ``outer`` (name of the plane between hosts; default ``gloo``) and those of that plane and of `cuda/ipc`. An alltoall goes over one plane of the
    host's memory that has all members.
    """

    name: ClassVar[str] = "cuda/hierarchical"
    device: ClassVar[str] = CUDA

    def __init__(self, context: PlaneContext) -> None:
        super().__init__(context)
        self._topology = top = Topology.of(context.hosts, context.index)
        self._parts = Parts(context)
        here = self._parts.part(top.here, top.local, f"host{top.host}/")
        self._inner = CudaPlane(replace(here, on_links=self._linked))
        self._outer: HostPlane | None = None
        self._flat: HostPlane | None = None
        self._timeout = 30.0
        self._stage: Stage | None = None
        #: The GPU that the stage and the memory are for.
        self._ordinal = 0
        #: Memory of the GPU between the steps of an operation, by what it is for.
        self._scratch: dict[str, CudaBuffer] = {}

    @classmethod
    def unavailable(cls) -> str | None:
        reason = gpus.why_off(cls.name) or gpus.gpus().why_unusable()
        return f"The plane `{cls.name}` can't be used: {reason}" if reason else None

    def connect(self, timeout: float) -> None:
        self._timeout = timeout
        top, parts, deadline = self._topology, self._parts, Deadline(timeout)
        try:
            self._inner.connect(seconds_left(deadline))
            if len(top.hosts) == 1:
                return
            # Loaded also on members that don't carry: MPI only begins when all processes load it.
            registry.plane_class(parts.outer_name)
            if top.carries:
                self._outer = parts.outer(top.column(top.local), top.host, f"column{top.local}/", deadline)
        except TimeoutError as error:
            raise PlaneBroken(f"the plane `{self.name}`: {error}") from error
        if len(top.here) == 1:
            self._linked({})

    def _linked(self, links: Links) -> None:
        """The members of this host have met; those of other hosts are reached by the network."""
        ranks, here = self.context.ranks, set(self._topology.here)
        away = tuple(rank for position, rank in enumerate(ranks) if position not in here)
        self.context.on_links({**links, NETWORK: away} if away else links)

    @property
    def _is_one_host(self) -> bool:
        return len(self._topology.hosts) == 1

    # -- reductions ---------------------------------------------------------------------------------------------------

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
        self._check()
        if self._is_one_host:
            return self._inner.start_allreduce(ins, outs, dtype, op, prescale, postscale, phases)
        pairs = [(cuda_buffer(i), cuda_buffer(o)) for i, o in zip(ins, outs, strict=True) if i.nbytes]
        if not pairs:
            return None
        sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
        with self._working(targets[0]) as stage:
            counts = [source.nbytes // dtype.itemsize for source in sources]
            begins, total = _packed(counts, dtype)
            wide = WIDE.get(dtype, dtype)
            packed = self._memory("packed", total, wide)
            sums = [_part(packed, begin, count) for begin, count in zip(begins, counts, strict=True)]
            self._end(self._inner.start_sums(sources, sums, dtype, op, prescale, phases))
            result = targets[0] if len(pairs) == 1 else self._memory("result", total, dtype)
            self._exchange(stage, packed, total, result, dtype, op, postscale, phases)
            if result is not targets[0]:
                stage.after(targets)
                for target, begin in zip(targets, begins, strict=True):
                    stage.copy(target.pointer, result.pointer + begin * dtype.itemsize, target.nbytes)
                stage.wait()
        return None

    def _exchange(
        self,
        stage: Stage,
        packed: CudaBuffer,
        total: int,
        result: CudaBuffer,
        dtype: DType,
        op: ReduceOp,
        postscale: float,
        phases: Phases,
    ) -> None:
        """Reduce a slice per carrier between the hosts, then gather the slices within each."""
        top, wide = self._topology, packed.dtype
        bounds = slice_bounds(total, top.columns, _GRAIN)
        counts = [end - begin for begin, end in pairwise(bounds)]
        counts += [0] * (len(top.here) - len(counts))
        count = counts[top.local]
        mine = _part(self._memory("slice", count, dtype), 0, count)
        if self._outer is not None:
            piece = self._fetched(
                stage, [(packed.pointer + bounds[top.local] * wide.itemsize, count * wide.itemsize)], phases
            )
            array = piece.view(storage_type(wide))
            self._outer.allreduce([array], [array], wide, op, 1.0, postscale, phases)
            self._brought(stage, _narrowed(array, wide, dtype), mine, phases)
        self._end(self._inner.start_allgather(mine, counts, result, phases))

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
        self._check()
        if self._is_one_host:
            return self._inner.start_reducescatter(send, counts, out, dtype, op, prescale, postscale, phases)
        source, target, top = cuda_buffer(send), cuda_buffer(out), self._topology
        if not sum(counts):
            return None
        with self._working(target) as stage:
            wide = WIDE.get(dtype, dtype)
            sums = self._memory("packed", sum(counts), wide)
            self._end(
                self._inner.start_sums([source], [_part(sums, 0, sum(counts))], dtype, op, prescale, phases)
            )
            mine = np.empty(0, storage_type(dtype))
            if self._outer is not None:
                mine = self._reduced_column(stage, sums, counts, dtype, op, postscale, phases)
            if top.even:
                stage.after([target])
                self._brought(stage, mine, target, phases)
            else:
                self._to_owners(stage, mine, counts, target, phases)
        return None

    def _reduced_column(
        self,
        stage: Stage,
        sums: CudaBuffer,
        counts: Sequence[int],
        dtype: DType,
        op: ReduceOp,
        postscale: float,
        phases: Phases,
    ) -> HostArray:
        """The slices of those members of this host that this carrier serves, one behind the other, reduced between the hosts."""
        assert self._outer is not None
        top, wide = self._topology, sums.dtype
        served = [top.served(top.local, host) for host in range(len(top.hosts))]
        starts = [0, *accumulate(counts)]
        size = wide.itemsize
        pieces = [(sums.pointer + starts[m] * size, counts[m] * size) for here in served for m in here]
        part = self._fetched(stage, pieces, phases).view(storage_type(wide))
        share = [sum(counts[m] for m in here) for here in served]
        mine = np.empty(share[top.host], storage_type(wide))
        self._outer.reducescatter(part, share, mine, wide, op, 1.0, postscale, phases)
        return _narrowed(mine, wide, dtype)

    def _to_owners(
        self, stage: Stage, mine: HostArray, counts: Sequence[int], target: CudaBuffer, phases: Phases
    ) -> None:
        """Within the host, hand the slices that a carrier has to the members that they are for."""
        top = self._topology
        held = _part(self._memory("slice", len(mine), target.dtype), 0, len(mine))
        self._brought(stage, mine, held, phases)
        served = top.served(top.local, top.host) if top.carries else ()
        sent = [counts[m] if m in served else 0 for m in top.here]
        received = [0] * len(top.here)
        received[top.local % top.columns] = counts[self.context.index]
        self._end(self._inner.start_alltoall(held, sent, received, target, phases))

    # -- moving -------------------------------------------------------------------------------------------------------

    def start_allgather(
        self, send: Buffer, counts: Sequence[int], out: Buffer, phases: Phases
    ) -> Completion | None:
        self._check()
        if self._is_one_host:
            return self._inner.start_allgather(send, counts, out, phases)
        if not sum(counts):
            return None
        source, target, top = cuda_buffer(send), cuda_buffer(out), self._topology
        plan = Gathering.of(top, [count * target.dtype.itemsize for count in counts])
        with self._working(target) as stage:
            piece = (source.pointer, source.nbytes)
            if not top.even:
                sizes = [plan.sizes[m] for m in top.here]
                block = _part(self._memory("packed", sum(sizes), DType.U8), 0, sum(sizes))
                self._end(self._inner.start_allgather(_as_bytes(source), sizes, block, phases))
                begin, end = plan.piece(top.local, top.host) if top.carries else (0, 0)
                piece = (block.pointer + begin, end - begin)
            else:
                stage.after([source])
            sizes = plan.column_sizes()
            column = _part(self._memory("slice", sizes[top.local], DType.U8), 0, sizes[top.local])
            if self._outer is not None:
                gathered = np.empty(sizes[top.local], np.uint8)
                mine = self._fetched(stage, [piece], phases)
                self._outer.allgather(mine, plan.piece_sizes(top.local), gathered, phases)
                self._brought(stage, gathered, column, phases)
            whole = _part(self._memory("result", sum(sizes), DType.U8), 0, sum(sizes))
            self._end(self._inner.start_allgather(column, sizes, whole, phases))
            self._place(stage, plan, whole, target)
        return None

    def _place(self, stage: Stage, plan: Gathering, whole: CudaBuffer, target: CudaBuffer) -> None:
        stage.after([target])
        at = whole.pointer
        for begin, end, start in plan.moves():
            stage.copy(target.pointer + start, at, end - begin)
            at += end - begin
        stage.wait()

    def start_broadcast(
        self, source: Buffer | None, out: Buffer, root: int, phases: Phases
    ) -> Completion | None:
        self._check()
        if self._is_one_host:
            return self._inner.start_broadcast(source, out, root, phases)
        target, top = cuda_buffer(out), self._topology
        if not target.nbytes:
            return None
        host, local = top.find(root)
        carrier, at_home = local % top.columns, top.host == host
        given = cuda_buffer(source) if source is not None and self.context.index == root else None
        with self._working(target) as stage:
            if at_home:
                self._end(self._inner.start_broadcast(given, target, local, phases))
            if top.local == carrier:
                assert self._outer is not None
                stage.after([target])
                array = stage.room(target.nbytes)
                if at_home:
                    array = self._fetched(stage, [(target.pointer, target.nbytes)], phases)
                self._outer.broadcast(array, host, phases)
                if not at_home:
                    self._brought(stage, array, target, phases)
            if not at_home:
                self._end(self._inner.start_broadcast(None, target, carrier, phases))
        return None

    def start_alltoall(
        self,
        send: Buffer,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: Buffer,
        phases: Phases,
    ) -> Completion | None:
        self._check()
        if self._is_one_host:
            return self._inner.start_alltoall(send, send_counts, recv_counts, out, phases)
        source, target = cuda_buffer(send), cuda_buffer(out)
        with self._working(target) as stage:
            stage.after([source, target])
            kind = storage_type(target.dtype)
            given = self._fetched(stage, [(source.pointer, source.nbytes)], phases).view(kind)
            received = np.empty(sum(recv_counts), kind)
            self._flat_plane().alltoall(given, send_counts, recv_counts, received, phases)
            self._brought(stage, received, target, phases)
        return None

    def _flat_plane(self) -> HostPlane:
        """A plane between all members, which connect at their first alltoall."""
        if self._flat is None:
            me = self.context
            try:
                self._flat = self._parts.outer(range(me.size), me.index, "flat/", Deadline(self._timeout))
            except TimeoutError as error:
                raise PlaneBroken(f"the plane `{self.name}`: {error}") from error
        return self._flat

    def start_barrier(self, phases: Phases) -> Completion | None:
        self._check()
        if self._is_one_host:
            return self._inner.start_barrier(phases)
        self._end(self._inner.start_barrier(phases))
        if self._outer is not None and self._topology.local == 0:
            self._outer.barrier(phases)
        self._end(self._inner.start_barrier(phases))
        return None

    # -- memory -------------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: DType) -> CudaBuffer:
        return self._inner.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> CudaBuffer:
        return self._inner.zeros(shape, dtype)

    @contextmanager
    def _working(self, tensor: CudaBuffer) -> Iterator[Stage]:
        """Within it an operation works on the GPU of a tensor. Raises ``PlaneBroken`` if the GPU refuses anything."""
        try:
            if self._stage is None:
                self._ordinal = tensor.ordinal
                self._stage = Stage(gpus.gpus().open(tensor.ordinal))
            yield self._stage
        except DeviceFailed as error:
            raise PlaneBroken(f"the GPU of this rank: {error}") from error

    def _memory(self, purpose: str, count: int, dtype: DType) -> CudaBuffer:
        """Memory of the GPU of at least ``count`` elements, free until the end of the operation."""
        nbytes = max(1, count * dtype.itemsize)
        found = self._scratch.get(purpose)
        if found is None or found.nbytes < nbytes:
            # All members have ended the operations that used the last one.
            self._scratch.pop(purpose, None)
            size = 1 << (nbytes - 1).bit_length()
            device = gpus.gpus().open(self._ordinal)
            found = self._scratch[purpose] = allocated(device, self._ordinal, (size,), DType.U8)
        return CudaBuffer(found.pointer, (count,), dtype, self._ordinal, owner=found)

    def _fetched(self, stage: Stage, pieces: Sequence[tuple[int, int]], phases: Phases) -> Bytes:
        """Pieces of the GPU's memory (address, bytes), one behind the other in the host's."""
        start = monotonic_ns()
        array = stage.room(sum(nbytes for _, nbytes in pieces))
        at = 0
        for pointer, nbytes in pieces:
            stage.fetch(at, pointer, nbytes)
            at += nbytes
        stage.wait()
        phases.pack += monotonic_ns() - start
        return array

    def _brought(self, stage: Stage, array: HostArray, target: CudaBuffer, phases: Phases) -> None:
        """Copy an array to a buffer of the GPU."""
        start = monotonic_ns()
        room = stage.room(array.nbytes)
        if array.ctypes.data != room.ctypes.data:
            np.copyto(room, array.view(np.uint8))
        stage.bring(target.pointer, 0, array.nbytes)
        stage.wait()
        phases.unpack += monotonic_ns() - start

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _end(self, completion: Completion | None) -> None:
        """Wait for a step on the GPUs of this host. Raises what it ended with."""
        if completion is None:
            return
        ends: SimpleQueue[Exception | None] = SimpleQueue()
        completion.on_end(ends.put)
        error = ends.get()
        if error is not None:
            raise error

    def _check(self) -> None:
        if self._parts.aborted:
            raise PlaneAborted

    @property
    def gave_up(self) -> bool:
        """Whether an aborted operation of a library did not end, and was left to the library with all that it holds."""
        return self._parts.gave_up

    def abort(self) -> None:
        self._parts.abort()
        self._inner.abort()

    def close(self) -> None:
        self._parts.close()
        self._inner.close()
        if self._stage is not None:
            self._stage.close()
            self._stage = None
        self._scratch.clear()


def _packed(counts: Sequence[int], dtype: DType) -> tuple[list[int], int]:
    """Where tensors begin that lie one behind the other at lines, in elements, and how many elements there are in all."""
    if len(counts) == 1:
        return [0], counts[0]
    grain = LINE // dtype.itemsize
    *begins, total = accumulate((-(-count // grain) * grain for count in counts), initial=0)
    return begins, total


def _part(buffer: CudaBuffer, begin: int, count: int) -> CudaBuffer:
    """Some elements of a buffer."""
    pointer = buffer.pointer + begin * buffer.dtype.itemsize
    return CudaBuffer(pointer, (count,), buffer.dtype, buffer.ordinal, buffer.after, buffer.owner)


def _as_bytes(buffer: CudaBuffer) -> CudaBuffer:
    return CudaBuffer(buffer.pointer, (buffer.nbytes,), DType.U8, buffer.ordinal, buffer.after, buffer.owner)


def _narrowed(array: HostArray, wide: DType, dtype: DType) -> HostArray:
    """The elements in the type that they are stored in, rounded once."""
    if wide is dtype:
        return array
    rounded = np.empty(len(array), storage_type(dtype))
    narrow(array, rounded, dtype)
    return rounded
