"""Which servers have the values of a store: one has a whole key, or all have parts of a large one; servers of other hosts have copies."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hvdlab.collectives.kvstore.keys import Key
from hvdlab.collectives.kvstore.servers.link import ServerLink, Ticket
from hvdlab.collectives.logs import LOG

PlaceOfPart = tuple[int, int, int, tuple[int, ...], Key]
"""A part as another worker gets to know it: number of the server, begin, end, shape, and the key under which the server has it."""


@dataclass(slots=True)
class Part:
    """The part of a key that one server has: elements of the flat value, or rows of a row-sparse one.

    Attributes:
        server: Number of the server.
        link: The connection to the server.
        start, stop: First element, or row, of the part, and the one behind its last.
        shape: Shape of this part.
        name: The key under which the server has it: a copy has its own, since a server may have another part of the same key.
        copies: The same part on servers of other hosts: they get the same pushes, and take over when the server is lost.
        pushed: Pushes whose answer this worker has not looked at.
        seen: Version of the value that this worker pulled last, plus its pushes since.
        version: The latest version that the server is known to have had.
        expected: For a copy that has taken over, the version that it has if it lacks nothing; else -1.
    """

    server: int
    link: ServerLink
    start: int
    stop: int
    shape: tuple[int, ...]
    name: Key
    copies: list[Part] = field(default_factory=list)
    pushed: deque[Ticket] = field(default_factory=deque)
    seen: int = 0
    version: int = 0
    expected: int = -1

    def kept(self) -> list[Part]:
        """This part and its copies, without those whose servers are lost; this part alone if all are."""
        return [one for one in (self, *self.copies) if not one.link.lost] or [self]


class Parts:
    """Which server has which part of a store.

    Args:
        links: The connections to all servers, in the same order on all workers.
        bound: Number of elements from which on a key is divided among all servers.
        replicas: On how many further hosts there should be copies.

    Attributes:
        by_key: The parts of each key.
        replicas: On how many further hosts copies are; at most as many as there are.
    """

    def __init__(self, links: Sequence[ServerLink], bound: int, replicas: int) -> None:
        self._links, self._bound = links, bound
        self._hosts = list(dict.fromkeys(link.place.host for link in links))
        self.by_key: dict[Key, list[Part]] = {}
        self.replicas = min(replicas, len(self._hosts) - 1)

    def add(self, key: Key, shape: tuple[int, ...], *, by_rows: bool) -> None:
        """Place a key: in whole rows, or as the elements of the flat value."""
        parts = self.by_key[key] = self._as_mxnet(key, shape, by_rows=by_rows)
        for number, part in enumerate(parts):
            at = self._hosts.index(part.link.place.host)
            for step in range(1, self.replicas + 1):
                server = self._server_on(self._hosts[(at + step) % len(self._hosts)], part.link.place.index)
                name = f"copy of part {number} of {key!r}"
                copy = replace(
                    part, server=server, link=self._links[server], name=name, copies=[], pushed=deque()
                )
                part.copies.append(copy)

    def _as_mxnet(self, key: Key, shape: tuple[int, ...], *, by_rows: bool) -> list[Part]:
        """The parts as MXNet places a key: the whole on one server, or equal parts on all servers if it is large."""
        n, size = len(self._links), int(np.prod(shape, dtype=np.int64))
        whole = shape[0] if by_rows else size
        if size < self._bound or n == 1 or not shape:
            server = (key * 9973 if isinstance(key, int) else zlib.crc32(key.encode())) % n
            return [Part(server, self._links[server], 0, whole, shape, key)]
        ends = [int(np.floor(whole / n * i + 0.5)) for i in range(n + 1)]
        rest = shape[1:] if by_rows else ()
        return [
            Part(server, link, start, stop, (stop - start, *rest), key)
            for server, (link, start, stop) in enumerate(zip(self._links, ends, ends[1:], strict=False))
        ]

    def _server_on(self, host: str, index: int) -> int:
        there = [number for number, link in enumerate(self._links) if link.place.host == host]
        return there[index % len(there)]

    def kept(self, keys: Iterable[Key]) -> list[Part]:
        """All parts of keys with their copies; see :meth:`Part.kept`."""
        return [one for key in keys for part in self.by_key.get(key, ()) for one in part.kept()]

    def links(self) -> list[ServerLink]:
        """All links; if there are copies, which take over, without those to lost servers."""
        return [link for link in self._links if not (self.replicas and link.lost)]

    def fail_over(self) -> bool:
        """Let copies take over from parts whose servers are lost. Returns whether any did."""
        moved: dict[str, list[Key]] = {}
        for key, parts in self.by_key.items():
            for place, part in enumerate(parts):
                found = [copy for copy in part.copies if not copy.link.lost]
                if part.link.lost and found:
                    found[0].copies, found[0].expected = found[1:], part.version
                    parts[place] = found[0]
                    moved.setdefault(found[0].link.place.host.partition("#")[0], []).append(key)
        for host, keys in moved.items():
            LOG.warning("copies on %s take over the values of %s", host, ", ".join(map(repr, keys)))
        return bool(moved)

    def places(self) -> dict[Key, list[list[PlaceOfPart]]]:
        """The places of all parts and their copies, for :meth:`put` on another worker."""
        return {
            key: [
                [(one.server, one.start, one.stop, one.shape, one.name) for one in (part, *part.copies)]
                for part in parts
            ]
            for key, parts in self.by_key.items()
        }

    def put(self, places: dict[Key, list[list[PlaceOfPart]]]) -> None:
        """Take over the places of keys from another worker's :meth:`places`."""
        for key, parts in places.items():
            found = self.by_key[key] = []
            for kept in parts:
                first, *copies = [
                    Part(number, self._links[number], start, stop, tuple(shape), name)
                    for number, start, stop, shape, name in kept
                ]
                first.copies = copies
                found.append(first)
