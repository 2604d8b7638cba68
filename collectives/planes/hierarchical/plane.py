"""The hierarchical plane: every operation is composed of operations within hosts and operations between hosts.

Data travels between hosts once it has been reduced (or gathered) within them, each carrier's share in its own column; see
:mod:`routing`. f16 and bf16 are widened once at the beginning and rounded once at the end, so partial sums are float32 in
both planes. Scales are applied once: ``prescale`` by the first reduction of a value, ``postscale`` by the last.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from time import monotonic_ns
from typing import ClassVar, Self

import numpy as np

from hvdlab.collectives.arrays import storage_type
from hvdlab.collectives.planes import registry
from hvdlab.collectives.planes.base import PhaseTimes, PlaneAborted, PlaneBroken, PlaneContext
from hvdlab.collectives.planes.buffers import HostArray
from hvdlab.collectives.planes.hierarchical.routing import GatherPlan, Routing, Topology
from hvdlab.collectives.planes.host import HostPlane, Scratch, narrow, widen
from hvdlab.collectives.planes.shm.layout import slice_bounds
from hvdlab.collectives.planes.subgroups import SubgroupPlanes
from hvdlab.collectives.time_limits import Deadline
from hvdlab.collectives.types import DType, ReduceOp

SMALL_BYTES = 16 * 1024
"""Up to this size every carrier sends the whole tensor: a step less within the host, for more bytes between hosts."""
BLOCK_BYTES = 4 * 1024 * 1024
"""Larger tensors are reduced in blocks of about this size: the time that a block's messages wait for each other is small beside their transfer."""
_AHEAD = 2
"""Blocks that are given to the outer plane before the first one of them is awaited, so that the network always has one to work on."""
_GRAIN = 16
"""Slices are cut at multiples of this many elements."""
_WIDE = {DType.F16: DType.F32, DType.BF16: DType.F32}


class HierarchicalPlane(HostPlane):
    """Data plane for several hosts with several members each.

    Reductions of large tensors are cut into blocks, so that the network works on one while memory works on the others.

    Options: ``inner`` and ``outer`` are names of planes, by default ``shm`` and ``gloo``. ``flat`` names operations, separated by
    commas, of ``allreduce`` and ``allgather``, that go through one outer plane of all members instead. ``block_bytes`` is the size of the
    blocks; 0 cuts nothing, as an outer plane ``mpi`` does. The options of the planes are valid, too.

    The members of a host make their shared memory themselves. Where all members are on one host the inner plane does everything,
    and where no host has more than one, the outer plane does.
    """

    name: ClassVar[str] = "hierarchical"

    def __init__(self, context: PlaneContext) -> None:
        super().__init__(context)
        self._topology = Topology.of(context.hosts, context.index)
        self._subgroups = SubgroupPlanes(context)
        self._flat_kinds = tuple(filter(None, context.options.get("flat", "").split(",")))
        #: Plane of this host's members.
        self._inner: HostPlane
        #: Plane of this member's column; None on a member that carries nothing.
        self._outer: HostPlane | None = None
        #: The one of these that can do everything by itself, if one can.
        self._alone: HostPlane | None = None
        #: Outer plane of all members, for the operations that go through it.
        self._flat: HostPlane | None = None
        self._packed, self._slice, self._whole = Scratch(), Scratch(), Scratch()
        # One thread of a process calls MPI at a time.
        overlaps = self._subgroups.outer_name == "gloo"
        self._block_bytes = int(context.options.get("block_bytes", BLOCK_BYTES)) if overlaps else 0
        self._outer_thread = OuterThread()

    @classmethod
    def unavailable(cls) -> str | None:
        inner = registry.why_unavailable("shm")
        if inner is not None:
            return inner
        outer = registry.why_unavailable("gloo")
        return None if outer is None or registry.why_unavailable("mpi") is None else outer

    def connect(self, timeout: float) -> None:
        try:
            self._connect(Deadline(timeout))
        except TimeoutError as error:
            raise PlaneBroken(f"hierarchical plane: {error}") from error

    def _connect(self, deadline: Deadline) -> None:
        top, me, subgroups = self._topology, self.context, self._subgroups
        self._inner = subgroups.inner(top.here, top.local, f"host{top.host}/", deadline)
        if len(top.hosts) == 1:
            self._alone = self._inner
            return
        # Loaded also on members that don't carry: MPI only begins when all processes load it.
        registry.plane_class(subgroups.outer_name)
        if top.carries:
            self._outer = subgroups.outer(top.column(top.local), top.host, f"column{top.local}/", deadline)
        if top.even and len(top.here) == 1:
            self._alone = self._outer
        elif self._flat_kinds:
            self._flat = subgroups.outer(range(me.size), me.index, "flat/", deadline)

    def tune(self, slice_bytes: int) -> None:
        self._inner.tune(slice_bytes)

    # -- reductions -----------------------------------------------------------------------------------------------

    def allreduce(
        self,
        ins: Sequence[HostArray],
        outs: Sequence[HostArray],
        dtype: DType,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        phases: PhaseTimes,
    ) -> None:
        self._check()
        direct = self._alone or (self._flat if "allreduce" in self._flat_kinds else None)
        if direct is not None:
            direct.allreduce(ins, outs, dtype, op, prescale, postscale, phases)
            return
        total = sum(len(b) for b in ins)
        if not total:
            return
        wide = _WIDE.get(dtype, dtype)
        packed = self._pack(ins, total, dtype, wide, phases)
        if self._topology.even and self._subgroups.outer_name == "gloo" and packed.nbytes <= SMALL_BYTES:
            whole = self._reduce_whole(packed, wide, op, prescale, postscale, phases)
            _hand_out(whole, outs, dtype, phases)
            return
        result = outs[0] if len(outs) == 1 else self._whole.take(total, storage_type(dtype))
        self._reduce_slices(packed, result, dtype, op, prescale, postscale, phases)
        if result is not outs[0]:
            _hand_out(result, outs, dtype, phases)

    def _pack(
        self, ins: Sequence[HostArray], total: int, dtype: DType, wide: DType, phases: PhaseTimes
    ) -> HostArray:
        """Return the inputs one after another, in the wide type; a single input that has that type is returned itself."""
        if len(ins) == 1 and wide is dtype:
            return ins[0]
        start = monotonic_ns()
        packed = self._packed.take(total, storage_type(wide))
        at = 0
        for buffer in ins:
            widen(buffer, packed[at : at + len(buffer)], dtype)
            at += len(buffer)
        phases.pack += monotonic_ns() - start
        return packed

    def _reduce_whole(
        self,
        packed: HostArray,
        wide: DType,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        phases: PhaseTimes,
    ) -> HostArray:
        """Reduce the whole in each column for itself: from equal inputs, in the same order of hosts, so to equal bits."""
        assert self._outer is not None
        result = self._slice.take(len(packed), packed.dtype)
        self._inner.allreduce([packed], [result], wide, op, prescale, 1.0, phases)
        self._outer.allreduce([result], [result], wide, op, 1.0, postscale, phases)
        return result

    def _reduce_slices(
        self,
        packed: HostArray,
        result: HostArray,
        dtype: DType,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        phases: PhaseTimes,
    ) -> None:
        """Reduce a slice per carrier within the host, each slice in its column, then gather the slices: block by block.

        While the network works on a block, the next one is reduced within the host and the one before is gathered.
        """
        wide, top = _WIDE.get(dtype, dtype), self._topology
        blocks = [_Block.of(top, low, high) for low, high in pairwise(self._cuts(packed))]
        slices = self._slice.take(sum(block.counts[top.local] for block in blocks), packed.dtype)
        begun: deque[tuple[_Block, HostArray, Future[None] | None]] = deque()
        at = 0
        try:
            for block in blocks:
                mine = slices[at : (at := at + block.counts[top.local])]
                source = packed[block.low : block.high]
                self._inner.reducescatter(source, block.counts, mine, wide, op, prescale, 1.0, phases)
                begun.append((block, mine, self._begin_outer(mine, wide, op, postscale, phases, len(blocks))))
                if len(begun) == _AHEAD:
                    self._gather_slices(*begun.popleft(), result, dtype, phases)
            while begun:
                self._gather_slices(*begun.popleft(), result, dtype, phases)
        except BaseException:
            # Operations of the outer plane that were begun end with the abort; their memory is not used before.
            self.abort()
            wait([future for _, _, future in begun if future is not None])
            raise

    def _cuts(self, packed: HostArray) -> list[int]:
        """Return where to cut a tensor into blocks; all members cut alike."""
        count = max(1, packed.nbytes // self._block_bytes) if self._block_bytes else 1
        return slice_bounds(len(packed), count, _GRAIN)

    def _begin_outer(
        self, mine: HostArray, wide: DType, op: ReduceOp, postscale: float, phases: PhaseTimes, blocks: int
    ) -> Future[None] | None:
        """Reduce a slice in its column: now if it is the only one, otherwise on the outer plane's thread."""
        if self._outer is None:
            return None
        reduce = partial(self._outer.allreduce, [mine], [mine], wide, op, 1.0, postscale)
        if blocks == 1:
            reduce(phases)
            return None
        # With times of its own: the executor's thread adds to the operation's in the meantime.
        return self._outer_thread.submit(partial(reduce, PhaseTimes()))

    def _gather_slices(
        self,
        block: _Block,
        mine: HostArray,
        reduced: Future[None] | None,
        result: HostArray,
        dtype: DType,
        phases: PhaseTimes,
    ) -> None:
        """Gather the slices of a block within the host, once this member's one is reduced."""
        if reduced is not None:
            start = monotonic_ns()
            reduced.result()
            phases.transfer += monotonic_ns() - start
        if _WIDE.get(dtype, dtype) is not dtype:
            start = monotonic_ns()
            rounded = np.empty(len(mine), storage_type(dtype))
            narrow(mine, rounded, dtype)
            mine = rounded
            phases.unpack += monotonic_ns() - start
        self._inner.allgather(mine, block.counts, result[block.low : block.high], phases)

    def reducescatter(
        self,
        send: HostArray,
        counts: Sequence[int],
        out: HostArray,
        dtype: DType,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        phases: PhaseTimes,
    ) -> None:
        self._check()
        if self._alone is not None:
            self._alone.reducescatter(send, counts, out, dtype, op, prescale, postscale, phases)
            return
        top, wide = self._topology, _WIDE.get(dtype, dtype)
        hosts = range(len(top.hosts))
        served = [[top.served(c, h) for h in hosts] for c in range(top.columns)]
        start = monotonic_ns()
        packed = self._packed.take(len(send), storage_type(wide))
        _permute(send, counts, [m for column in served for here in column for m in here], packed, dtype)
        phases.pack += monotonic_ns() - start
        shares = [[sum(counts[m] for m in here) for here in column] for column in served]
        columns = [sum(share) for share in shares] + [0] * (len(top.here) - top.columns)
        part = self._slice.take(columns[top.local], packed.dtype)
        self._inner.reducescatter(packed, columns, part, wide, op, prescale, 1.0, phases)
        mine = part[:0]
        if self._outer is not None:
            share = shares[top.local]
            mine = self._whole.take(share[top.host], packed.dtype)
            self._outer.reducescatter(part, share, mine, wide, op, 1.0, postscale, phases)
        if not top.even:
            mine = self._to_owners(mine, counts, phases)
        start = monotonic_ns()
        narrow(mine, out, dtype)
        phases.unpack += monotonic_ns() - start

    def _to_owners(self, mine: HostArray, counts: Sequence[int], phases: PhaseTimes) -> HostArray:
        """Hand the slices that a carrier reduced to the members of this host that they are for."""
        top = self._topology
        served = top.served(top.local, top.host) if top.carries else ()
        sent = [counts[m] if m in served else 0 for m in top.here]
        received = [0] * len(top.here)
        received[top.local % top.columns] = counts[self.context.index]
        owned = np.empty(counts[self.context.index], mine.dtype)
        self._inner.alltoall(mine, sent, received, owned, phases)
        return owned

    # -- moving ---------------------------------------------------------------------------------------------------

    def allgather(self, send: HostArray, counts: Sequence[int], out: HostArray, phases: PhaseTimes) -> None:
        self._check()
        direct = self._alone or (self._flat if "allgather" in self._flat_kinds else None)
        if direct is not None:
            direct.allgather(send, counts, out, phases)
            return
        if not sum(counts):
            return
        top, item = self._topology, out.itemsize
        plan = GatherPlan.of(top, [c * item for c in counts])
        piece = send.view(np.uint8)
        if not top.even:
            sizes = [plan.sizes[m] for m in top.here]
            block = self._packed.take(sum(sizes), np.dtype(np.uint8))
            self._inner.allgather(piece, sizes, block, phases)
            piece = block[slice(*plan.piece(top.local, top.host))] if top.carries else block[:0]
        column_sizes = plan.column_sizes()
        column = self._slice.take(column_sizes[top.local], np.dtype(np.uint8))
        if self._outer is not None:
            self._outer.allgather(piece, plan.piece_sizes(top.local), column, phases)
        gathered = self._whole.take(sum(column_sizes), np.dtype(np.uint8))
        self._inner.allgather(column, column_sizes, gathered, phases)
        start = monotonic_ns()
        plan.place(gathered, out.view(np.uint8))
        phases.unpack += monotonic_ns() - start

    def broadcast(self, buffer: HostArray, root: int, phases: PhaseTimes) -> None:
        self._check()
        if self._alone is not None:
            self._alone.broadcast(buffer, root, phases)
            return
        if not len(buffer):
            return
        top = self._topology
        host, local = top.find(root)
        carrier = local % top.columns
        at_home = top.host == host
        if at_home and carrier != local:
            self._inner.broadcast(buffer, local, phases)
        if top.local == carrier:
            assert self._outer is not None
            self._outer.broadcast(buffer, host, phases)
        if not at_home or carrier == local:
            self._inner.broadcast(buffer, carrier, phases)

    def alltoall(
        self,
        send: HostArray,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        out: HostArray,
        phases: PhaseTimes,
    ) -> None:
        self._check()
        if self._alone is not None:
            self._alone.alltoall(send, send_counts, recv_counts, out, phases)
            return
        item = out.itemsize
        Routing(self._topology, self._inner, self._outer).exchange(
            send.view(np.uint8),
            [c * item for c in send_counts],
            [c * item for c in recv_counts],
            out.view(np.uint8),
            phases,
        )

    def barrier(self, phases: PhaseTimes) -> None:
        self._check()
        if self._alone is not None:
            self._alone.barrier(phases)
            return
        self._inner.barrier(phases)
        if self._outer is not None and self._topology.local == 0:
            self._outer.barrier(phases)
        self._inner.barrier(phases)

    # -- ends -----------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._subgroups.aborted:
            raise PlaneAborted

    @property
    def gave_up(self) -> bool:
        """Return whether an aborted operation of a library did not end, and was left to the library with all that it holds."""
        return self._subgroups.gave_up

    def abort(self) -> None:
        self._subgroups.abort()

    def close(self) -> None:
        self.abort()
        self._outer_thread.close()
        self._subgroups.close()


@dataclass(frozen=True, slots=True)
class _Block:
    """Block of a tensor: elements ``low`` to ``high`` (not included) of a tensor, and how many of them each member of the host reduces."""

    low: int
    high: int
    counts: list[int]

    @classmethod
    def of(cls, top: Topology, low: int, high: int) -> Self:
        """Return the block with a slice for each column."""
        bounds = slice_bounds(high - low, top.columns, _GRAIN)
        counts = [stop - start for start, stop in pairwise(bounds)]
        return cls(low, high, counts + [0] * (len(top.here) - len(counts)))


def _hand_out(result: HostArray, outs: Sequence[HostArray], dtype: DType, phases: PhaseTimes) -> None:
    """Copy the pieces of a result to the outputs, rounding where they are of a narrower type."""
    start = monotonic_ns()
    at = 0
    for out in outs:
        narrow(result[at : at + len(out)], out, dtype)
        at += len(out)
    phases.unpack += monotonic_ns() - start


def _permute(
    send: HostArray, counts: Sequence[int], order: Sequence[int], packed: HostArray, dtype: DType
) -> None:
    """Copy the members' slices of ``send`` in another order, widened."""
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    at = 0
    for member in order:
        widen(send[starts[member] : starts[member + 1]], packed[at : at + counts[member]], dtype)
        at += counts[member]


_Operation = tuple[Callable[[], None], "Future[None]"]


class OuterThread:
    """Thread of the outer plane: calls operations one after another. Its methods belong to the executor's thread.

    The network works on one block while the executor's thread works on others within the host. The thread begins with the first
    operation. It is a daemon, since a library that can't end an operation must not keep the process from ending.
    """

    def __init__(self) -> None:
        self._operations: SimpleQueue[_Operation | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, operation: Callable[[], None]) -> Future[None]:
        """Queue an operation behind those before it. The future gets its end, or the error that it raised."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hvdlab-outer", daemon=True)
            self._thread.start()
        future: Future[None] = Future()
        self._operations.put((operation, future))
        return future

    def _run(self) -> None:
        while (item := self._operations.get()) is not None:
            operation, future = item
            try:
                operation()
            # Any exception belongs to the executor, which waits for the future.
            except BaseException as error:  # noqa: BLE001
                future.set_exception(error)
            else:
                future.set_result(None)
            del item, operation, future  # their buffers are not kept until the next one

    def close(self) -> None:
        """Wait for the end of the operations, which the caller has aborted, and of the thread. Idempotent."""
        if self._thread is not None:
            self._operations.put(None)
            self._thread.join()
            self._thread = None
