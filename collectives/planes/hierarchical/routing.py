"""Hosts, columns, and the routes of allgathers and alltoalls.

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
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from hvdlab.collectives.planes.base import PhaseTimes
from hvdlab.collectives.planes.buffers import HostArray
from hvdlab.collectives.planes.host import HostPlane
from hvdlab.collectives.planes.shm.layout import slice_bounds

GRAIN = 64
"""Pieces of an allgather are cut at multiples of this many bytes."""
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
            if topology.even:
                bounds.append((0, *accumulate(parts)))
            else:
                bounds.append(tuple(slice_bounds(sum(parts), topology.columns, GRAIN)))
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
            parcels[top.here.index(receiver)] = _join(arrived[number :: len(served)])
        sizes = [expected[m] for m in sources]
        incoming = [_nothing() for _ in top.here]
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
