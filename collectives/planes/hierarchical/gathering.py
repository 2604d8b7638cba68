"""Where the pieces of an allgather end up.

Each host's *block* is its members' parts, one after another. A block is cut into a piece for each column. Columns gather
their pieces of all hosts, then each host gathers its columns: that leaves the pieces by column, then by host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from hvdlab.collectives.planes.buffers import HostArray
from hvdlab.collectives.planes.hierarchical.topology import Topology
from hvdlab.collectives.planes.shm.layout import slice_bounds

GRAIN = 64
"""Pieces are cut at multiples of this many bytes."""


@dataclass(frozen=True, slots=True)
class Gathering:
    """The plan of one allgather, in bytes.

    Attributes:
        sizes: Size of each member's part, by position.
        bounds: For each host, where its block is cut: one more than there are columns.
    """

    topology: Topology
    sizes: tuple[int, ...]
    bounds: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, topology: Topology, sizes: Sequence[int]) -> Gathering:
        bounds = []
        for members in topology.hosts:
            parts = [sizes[m] for m in members]
            if topology.even:
                bounds.append((0, *accumulate(parts)))
            else:
                bounds.append(tuple(slice_bounds(sum(parts), topology.columns, GRAIN)))
        return cls(topology, tuple(sizes), tuple(bounds))

    def piece(self, column: int, host: int) -> tuple[int, int]:
        """Begin and end, within the host's block, of the piece that travels in a column."""
        return self.bounds[host][column], self.bounds[host][column + 1]

    def piece_sizes(self, column: int) -> list[int]:
        """Size of each host's piece in a column."""
        pieces = (self.piece(column, host) for host in range(len(self.topology.hosts)))
        return [end - begin for begin, end in pieces]

    def column_sizes(self) -> list[int]:
        """Bytes that each member of this host holds after the columns have gathered; 0 for a member in no column."""
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
        """Begin and end within a host's block, and start in the output, in the order of the gathered pieces."""
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
