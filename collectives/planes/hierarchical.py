"""The hierarchical plane: shared memory within each host, another plane between the hosts.

Data travels between hosts once it has been reduced (or gathered) within them, each carrier's share in its own column. f16 and bf16 are
widened once at the beginning and rounded once at the end, so partial sums are float32 in both planes. Scales are applied once:
``prescale`` by the first reduction of a value, ``postscale`` by the last.

::

                 host a   host b   host c
    column 0       0        3        6       each column is a group of the outer plane,
    column 1       1        4        7       each host a group of the inner one
                   2                         (no column: not every host has a third member)

There are as many columns as the smallest host has members; column ``c`` holds the ``c``-th member of each host. The
members in columns *carry*: only they talk to other hosts, each for a share of the data. Where all hosts have equally many
members, all members carry; where one host has a single member, only the first member of each host does.

**Allgather.** Each host's *block* is its members' parts, one after another. A block is cut into a piece for each column. Columns gather
their pieces of all hosts, then each host gathers its columns: that leaves the pieces by column, then by host.

**Alltoall.** A piece for a member of another host goes, within the host, to the member that carries for that receiver; from there to the other
host, together with all that the carrier has for that host; and there, where not all members carry, on to its receiver.
So a carrier sends one message to each host, however many members that has.

A member knows only its own messages, so the sizes of the pieces travel first, by the same route.

In :mod:`hvdlab.collectives.planes`: ``subgroups``, the planes that it is made of; ``segment``, memory that the members of one host make
for themselves.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from queue import SimpleQueue
from time import monotonic_ns
from typing import ClassVar, Self

import numpy as np

from hvdlab.collectives.planes import registry
from hvdlab.collectives.planes.base import (
    HostArray,
    PhaseTimes,
    PlaneAborted,
    PlaneBroken,
    PlaneContext,
    storage_type,
)
from hvdlab.collectives.planes.host import HostPlane, Scratch, narrow, widen
from hvdlab.collectives.planes.registry import SubgroupPlanes
from hvdlab.collectives.planes.shm.layout import slice_bounds
from hvdlab.collectives.time_limits import Deadline
from hvdlab.collectives.types import DType, Reduction

GATHER_GRAIN = 64
"""Pieces of an allgather are cut at multiples of this many bytes."""
SMALL_BYTES = 16 * 1024
"""Up to this size every carrier sends the whole tensor: a step less within the host, for more bytes between hosts."""
# Over a simulated cable of 10 Gbit/s 64 MiB took 75 ms in blocks of 4 MiB, 100 in blocks of 1 MiB, and 87 as a whole.
BLOCK_BYTES = 4 * 1024 * 1024
"""Larger tensors are reduced in blocks of about this size: the time that a block's messages wait for each other is small beside their transfer."""
_AHEAD = 2
"""Blocks that are given to the outer plane before the first one of them is awaited, so that the network always has one to work on."""
_GRAIN = 16
"""Slices are cut at multiples of this many elements."""
_WIDE = {DType.F16: DType.F32, DType.BF16: DType.F32}
_SIZE = np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class Topology:
    """Hosts and columns of a group, as seen from one of its members.

    Attributes:
        hosts: Positions of each host's members, in order; hosts are ordered by their first member.
        host: This member's host, as an index into ``hosts``.
        local: This member's index within its host.
        columns: Number of columns.
    """

    hosts: tuple[tuple[int, ...], ...]
    host: int
    local: int
    columns: int

    @classmethod
    def of(cls, hosts: Sequence[str], index: int) -> Topology:
        """Return the topology of the group whose members have these host keys, as seen from member ``index``."""
        by_host: dict[str, list[int]] = {}
        for position, key in enumerate(hosts):
            by_host.setdefault(key, []).append(position)
        groups = tuple(tuple(members) for members in by_host.values())
        # The dict is in order of the hosts' first positions. So all members number hosts alike, however the names compare.
        host = list(by_host).index(hosts[index])
        return cls(groups, host, groups[host].index(index), min(len(members) for members in groups))

    @property
    def here(self) -> tuple[int, ...]:
        """Return positions of this host's members."""
        return self.hosts[self.host]

    @property
    def even(self) -> bool:
        """Return whether all hosts have equally many members, so that all members carry."""
        return all(len(members) == self.columns for members in self.hosts)

    @property
    def carries(self) -> bool:
        """Return whether this member is in a column."""
        return self.local < self.columns

    def column(self, number: int) -> tuple[int, ...]:
        """Return the positions of a column's members, by host."""
        return tuple(members[number] for members in self.hosts)

    def served(self, column: int, host: int) -> tuple[int, ...]:
        """Return the positions of the members of ``host`` whose data travel in ``column``."""
        return self.hosts[host][column :: self.columns]

    def find(self, position: int) -> tuple[int, int]:
        """Return host and index within the host of the member at ``position``."""
        for host, members in enumerate(self.hosts):
            if position in members:
                return host, members.index(position)
        raise ValueError(f"there is no member {position}")


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Plan of one allgather, in bytes.

    Attributes:
        sizes: Size of each member's part, by position.
        bounds: For each host, where its block is cut: one more than there are columns.
    """

    topology: Topology
    sizes: tuple[int, ...]
    bounds: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, topology: Topology, sizes: Sequence[int]) -> GatherPlan:
        bounds = []
        for members in topology.hosts:
            parts = [sizes[m] for m in members]
            # Where all carry, a piece is a member's own part: no gather within the host has to come first (see allgather()).
            if topology.even:
                bounds.append((0, *accumulate(parts)))
            else:
                bounds.append(tuple(slice_bounds(sum(parts), topology.columns, GATHER_GRAIN)))
        return cls(topology, tuple(sizes), tuple(bounds))

    def piece(self, column: int, host: int) -> tuple[int, int]:
        """Return begin and end, within the host's block, of the piece that travels in a column."""
        return self.bounds[host][column], self.bounds[host][column + 1]

    def piece_sizes(self, column: int) -> list[int]:
        """Return the size of each host's piece in a column."""
        pieces = (self.piece(column, host) for host in range(len(self.topology.hosts)))
        return [end - begin for begin, end in pieces]

    def column_sizes(self) -> list[int]:
        """Return the bytes that each member of this host holds after the columns have gathered; 0 for a member in no column."""
        sizes = [sum(self.piece_sizes(c)) for c in range(self.topology.columns)]
        return sizes + [0] * (len(self.topology.here) - len(sizes))

    def place(self, gathered: HostArray, out: HostArray) -> None:
        """Copy the pieces, by column and host, to where the members' parts belong."""
        at = 0
        for begin, end, start in self.moves():
            length = end - begin
            out[start : start + length] = gathered[at : at + length]
            at += length

    def moves(self) -> Iterator[tuple[int, int, int]]:
        """Yield begin and end within a host's block, and start in the output, in the order of the gathered pieces."""
        starts = [0, *accumulate(self.sizes)]
        for column in range(self.topology.columns):
            for host, members in enumerate(self.topology.hosts):
                begin, end = self.piece(column, host)
                first = 0
                for member in members:
                    low, high = max(begin, first), min(end, first + self.sizes[member])
                    if low < high:
                        yield low, high, starts[member] + low - first
                    first += self.sizes[member]


@dataclass(frozen=True, slots=True)
class Routing:
    """Route of a group's alltoalls, for one member. ``outer`` is ``None`` if the member does not carry."""

    topology: Topology
    inner: HostPlane
    outer: HostPlane | None

    def exchange(
        self,
        send: HostArray,
        sizes: Sequence[int],
        expected: Sequence[int],
        out: HostArray,
        phases: PhaseTimes,
    ) -> None:
        """Exchange bytes between all members: ``sizes[j]`` to member ``j``, ``expected[i]`` from member ``i``."""
        top = self.topology
        sent = _cut(send, sizes)
        received = _cut(out, expected)
        # All members of a host take part in each of its steps, with empty parcels if they have none: operations of a plane are collective.
        self._exchange_here(sent, received, phases)
        announced = self._announce(sizes, phases)
        carried = self._to_carriers(sent, announced, phases)
        if self.outer is None:
            arrived: list[HostArray] = []
        else:
            arrived = self._between_hosts(self.outer, carried, announced, phases)
        if not top.even:
            arrived = self._to_receivers(arrived, expected, phases)
        for source, piece in zip(self._remote_sources(), arrived, strict=True):
            received[source][...] = piece

    # -- which member sends which pieces to which -------------------------------------------------------------------------

    def _served(self, column: int) -> list[int]:
        """Return members of other hosts whose pieces travel in a column, by host."""
        top = self.topology
        return [m for h in range(len(top.hosts)) if h != top.host for m in top.served(column, h)]

    def _remote_sources(self) -> list[int]:
        """Return members of other hosts, by host."""
        top = self.topology
        return [m for h, members in enumerate(top.hosts) if h != top.host for m in members]

    # -- steps ----------------------------------------------------------------------------------------------------

    def _exchange_here(self, sent: list[HostArray], received: list[HostArray], phases: PhaseTimes) -> None:
        here = self.topology.here
        self._inner_alltoall([sent[m] for m in here], [received[m] for m in here], phases)

    def _announce(self, sizes: Sequence[int], phases: PhaseTimes) -> list[list[int]]:
        """Return the sizes of the pieces that each member of this host sends through this carrier, by receiver as in ``_served``."""
        top = self.topology
        tables = [np.array([sizes[m] for m in self._served(c)], _SIZE) for c in range(top.columns)]
        nothing = np.empty(0, _SIZE)
        sent = [tables[c] if c < top.columns else nothing for c in range(len(top.here))]
        width = len(self._served(top.local)) if top.carries else 0
        received = np.empty((len(top.here), width), _SIZE)
        self._inner_alltoall([s.view(np.uint8) for s in sent], list(received.view(np.uint8)), phases)
        return [[int(size) for size in row] for row in received]

    def _to_carriers(
        self, sent: list[HostArray], announced: list[list[int]], phases: PhaseTimes
    ) -> list[list[HostArray]]:
        """Return the pieces of each member of this host that this carrier is to carry, by receiver as in ``_served``."""
        top = self.topology
        parcels = [
            _join([sent[m] for m in self._served(c)]) if c < top.columns else _nothing()
            for c in range(len(top.here))
        ]
        arrived = [np.empty(sum(row), np.uint8) for row in announced]
        self._inner_alltoall(parcels, arrived, phases)
        return [_cut(parcel, row) for parcel, row in zip(arrived, announced, strict=True)]

    def _between_hosts(
        self, outer: HostPlane, carried: list[list[HostArray]], announced: list[list[int]], phases: PhaseTimes
    ) -> list[HostArray]:
        """Return the pieces that arrive at this carrier: by host, sender of that host, and receiver of this host."""
        top = self.topology
        parcels, tables, incoming = [], [], []
        first = 0
        for host in range(len(top.hosts)):
            if host == top.host:
                parcels.append(_nothing())
                tables.append(np.empty(0, _SIZE))
                incoming.append(np.empty((0, 0), _SIZE))
                continue
            count = len(top.served(top.local, host))
            columns = range(first, first + count)
            first += count
            parcels.append(_join([row[c] for row in carried for c in columns]))
            tables.append(np.array([row[c] for row in announced for c in columns], _SIZE))
            mine = len(top.served(top.local, top.host))
            incoming.append(np.empty((len(top.hosts[host]), mine), _SIZE))
        # The sizes first: a carrier knows only its own host's.
        _alltoall(outer, [t.view(np.uint8) for t in tables], [_flat(i) for i in incoming], phases)
        arrived = [np.empty(int(i.sum()), np.uint8) for i in incoming]
        _alltoall(outer, parcels, arrived, phases)
        pieces = []
        for parcel, table in zip(arrived, incoming, strict=True):
            pieces += _cut(parcel, [int(size) for size in table.reshape(-1)])
        return pieces

    def _to_receivers(
        self, arrived: list[HostArray], expected: Sequence[int], phases: PhaseTimes
    ) -> list[HostArray]:
        """Hand over the pieces that arrived for other members of this host. Return this member's pieces by sender."""
        top, sources = self.topology, self._remote_sources()
        served = top.served(top.local, top.host) if top.carries else ()
        parcels = [_nothing() for _ in top.here]
        for number, receiver in enumerate(served):
            # Pieces come by sender, and of each sender by receiver: one in so many is for this receiver.
            parcels[top.here.index(receiver)] = _join(arrived[number :: len(served)])
        sizes = [expected[m] for m in sources]
        incoming = [_nothing() for _ in top.here]
        # All pieces from other hosts come to this member by the one carrier that serves it, as in :meth:`Topology.served`.
        incoming[top.local % top.columns] = np.empty(sum(sizes), np.uint8)
        self._inner_alltoall(parcels, incoming, phases)
        return _cut(incoming[top.local % top.columns], sizes)

    def _inner_alltoall(
        self, sent: Sequence[HostArray], received: Sequence[HostArray], phases: PhaseTimes
    ) -> None:
        _alltoall(self.inner, sent, received, phases)


def _alltoall(
    plane: HostPlane, sent: Sequence[HostArray], received: Sequence[HostArray], phases: PhaseTimes
) -> None:
    """Exchange separate buffers of bytes, one for each member, by the plane's alltoall."""
    out = np.empty(sum(len(r) for r in received), np.uint8)
    plane.alltoall(_join(sent), [len(s) for s in sent], [len(r) for r in received], out, phases)
    for target, piece in zip(received, _cut(out, [len(r) for r in received]), strict=True):
        target[...] = piece


def _join(pieces: Sequence[HostArray]) -> HostArray:
    return np.concatenate(pieces) if pieces else _nothing()


def _cut(buffer: HostArray, sizes: Iterable[int]) -> list[HostArray]:
    """Return views of consecutive parts."""
    sizes = list(sizes)
    ends = list(accumulate(sizes))
    return [buffer[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _flat(table: HostArray) -> HostArray:
    return table.reshape(-1).view(np.uint8)


def _nothing() -> HostArray:
    return np.empty(0, np.uint8)


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
        # One for each array that an operation uses at the same time: what ``take`` returns is lost at its next call.
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
        # Not by importing it: members of one host never use it, and for others connect() tells why it can't be used.
        outer = registry.missing("gloo")
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
        # Each host has a single member, so the one column is the whole group.
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
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> None:
        self._check()
        direct = self._alone or (self._flat if "allreduce" in self._flat_kinds else None)
        if direct is not None:
            direct.allreduce(ins, outs, dtype, reduction, phases)
            return
        total = sum(len(b) for b in ins)
        if not total:
            return
        wide = _WIDE.get(dtype, dtype)
        packed = self._pack(ins, total, dtype, wide, phases)
        # Only with Gloo, whose ring adds in the order of positions: columns that reduce equal inputs get equal bits. MPI may choose another
        # order for each column. And only where all members are in a column, since there is no gather afterwards.
        if self._topology.even and self._subgroups.outer_name == "gloo" and packed.nbytes <= SMALL_BYTES:
            whole = self._reduce_whole(packed, wide, reduction, phases)
            _hand_out(whole, outs, dtype, phases)
            return
        result = outs[0] if len(outs) == 1 else self._whole.take(total, storage_type(dtype))
        self._reduce_slices(packed, result, dtype, reduction, phases)
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
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> HostArray:
        """Reduce the whole in each column for itself: from equal inputs, in the same order of hosts, so to equal bits."""
        assert self._outer is not None
        result = self._slice.take(len(packed), packed.dtype)
        self._inner.allreduce([packed], [result], wide, reduction._replace(postscale=1.0), phases)
        self._outer.allreduce([result], [result], wide, reduction._replace(prescale=1.0), phases)
        return result

    def _reduce_slices(
        self,
        packed: HostArray,
        result: HostArray,
        dtype: DType,
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> None:
        """Reduce a slice per carrier within the host, each slice in its column, then gather the slices: block by block.

        While the network works on a block, the next one is reduced within the host and the one before is gathered.
        """
        wide, top = _WIDE.get(dtype, dtype), self._topology
        within, across = reduction._replace(postscale=1.0), reduction._replace(prescale=1.0)
        blocks = [_Block.of(top, low, high) for low, high in pairwise(self._cuts(packed))]
        # Memory for the slices of all blocks at once: the outer plane still works on one slice when the next one is reduced, and what
        # ``take`` returns is lost at its next call.
        slices = self._slice.take(sum(block.counts[top.local] for block in blocks), packed.dtype)
        begun: deque[tuple[_Block, HostArray, Future[None] | None]] = deque()
        at = 0
        try:
            for block in blocks:
                mine = slices[at : (at := at + block.counts[top.local])]
                source = packed[block.low : block.high]
                self._inner.reducescatter(source, block.counts, mine, wide, within, phases)
                begun.append((block, mine, self._begin_outer(mine, wide, across, phases, len(blocks))))
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
        self, mine: HostArray, wide: DType, reduction: Reduction, phases: PhaseTimes, blocks: int
    ) -> Future[None] | None:
        """Reduce a slice in its column: now if it is the only one, otherwise on the outer plane's thread."""
        if self._outer is None:
            return None
        reduce = partial(self._outer.allreduce, [mine], [mine], wide, reduction)
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
        reduction: Reduction,
        phases: PhaseTimes,
    ) -> None:
        self._check()
        if self._alone is not None:
            self._alone.reducescatter(send, counts, out, dtype, reduction, phases)
            return
        top, wide = self._topology, _WIDE.get(dtype, dtype)
        hosts = range(len(top.hosts))
        served = [[top.served(c, h) for h in hosts] for c in range(top.columns)]
        start = monotonic_ns()
        packed = self._packed.take(len(send), storage_type(wide))
        # By columns, and within a column by hosts: so the inner plane leaves each carrier, in one piece, all that its column is to reduce.
        _permute(send, counts, [m for column in served for here in column for m in here], packed, dtype)
        phases.pack += monotonic_ns() - start
        shares = [[sum(counts[m] for m in here) for here in column] for column in served]
        columns = [sum(share) for share in shares] + [0] * (len(top.here) - top.columns)
        part = self._slice.take(columns[top.local], packed.dtype)
        self._inner.reducescatter(packed, columns, part, wide, reduction._replace(postscale=1.0), phases)
        # Where this member is in no column, _to_owners() brings its slice from the carrier that serves it.
        mine = part[:0]
        if self._outer is not None:
            share = shares[top.local]
            mine = self._whole.take(share[top.host], packed.dtype)
            self._outer.reducescatter(part, share, mine, wide, reduction._replace(prescale=1.0), phases)
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
        # The root is in no column. Its host gets the buffer first, with the carrier, and so needs the last step no more.
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
        # One member of each host is enough: the barriers within the host before and after it stand for the others.
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
        # In this order: only the abort ends an operation in which the outer thread is, and no plane may be closed while that thread uses it.
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
            thread = threading.Thread(target=self._run, name="hvdlab-outer", daemon=True)
            thread.start()
            # After the start, which fails at the limit on threads: close() can't join a thread that never began.
            self._thread = thread
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
