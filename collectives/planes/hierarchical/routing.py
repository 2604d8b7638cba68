"""How the pieces of an alltoall travel.

A piece for a member of another host goes, within the host, to the member that carries for that receiver; from there to the other
host, together with all that the carrier has for that host; and there, where not all members carry, on to its receiver.
So a carrier sends one message to each host, however many members that has.

A member knows only what it sends and receives, so the sizes of the pieces travel first, by the same route.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from hvdlab.collectives.planes.base import PhaseTimes
from hvdlab.collectives.planes.buffers import HostArray
from hvdlab.collectives.planes.hierarchical.topology import Topology
from hvdlab.collectives.planes.host import HostPlane

_SIZE = np.dtype(np.int64)


@dataclass(frozen=True, slots=True)
class Routing:
    """One member's part in the alltoalls of a group. ``outer`` is ``None`` if the member does not carry."""

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
        """An alltoall of bytes: ``sizes[j]`` to member ``j``, ``expected[i]`` from member ``i``."""
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

    # -- which member sends what to which -------------------------------------------------------------------------

    def _served(self, column: int) -> list[int]:
        """Members of other hosts whose pieces travel in a column, by host."""
        top = self.topology
        return [m for h in range(len(top.hosts)) if h != top.host for m in top.served(column, h)]

    def _remote_sources(self) -> list[int]:
        """Members of other hosts, by host."""
        top = self.topology
        return [m for h, members in enumerate(top.hosts) if h != top.host for m in members]

    # -- steps ----------------------------------------------------------------------------------------------------

    def _exchange_here(self, sent: list[HostArray], received: list[HostArray], phases: PhaseTimes) -> None:
        here = self.topology.here
        self._inner_alltoall([sent[m] for m in here], [received[m] for m in here], phases)

    def _announce(self, sizes: Sequence[int], phases: PhaseTimes) -> list[list[int]]:
        """Sizes of the pieces that each member of this host sends through this carrier, by receiver as in ``_served``."""
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
        """The pieces of each member of this host that this carrier is to carry, by receiver as in ``_served``."""
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
        """The pieces that arrive at this carrier: by host, sender of that host, and receiver of this host."""
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
        """Hand over what arrived for other members of this host; returns this member's pieces by sender."""
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
    """An alltoall of separate buffers of bytes, one for each member."""
    out = np.empty(sum(len(r) for r in received), np.uint8)
    plane.alltoall(_join(sent), [len(s) for s in sent], [len(r) for r in received], out, phases)
    for target, piece in zip(received, _cut(out, [len(r) for r in received]), strict=True):
        target[...] = piece


def _join(pieces: Sequence[HostArray]) -> HostArray:
    return np.concatenate(pieces) if pieces else _nothing()


def _cut(buffer: HostArray, sizes: Iterable[int]) -> list[HostArray]:
    """Views of consecutive parts."""
    sizes = list(sizes)
    ends = list(accumulate(sizes))
    return [buffer[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _flat(table: HostArray) -> HostArray:
    return table.reshape(-1).view(np.uint8)


def _nothing() -> HostArray:
    return np.empty(0, np.uint8)
