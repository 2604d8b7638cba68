"""Planes of parts of a group, such as those that a hierarchical plane is made of: built, aborted and closed together."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace

from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.planes import registry, segment
from hvdlab.collectives.planes.base import KeyValue, PlaneAborted, PlaneBroken, PlaneContext
from hvdlab.collectives.planes.host import HostPlane
from hvdlab.collectives.planes.scoped import ScopedStore
from hvdlab.collectives.planes.shm.layout import layout_from

INNER, OUTER = "shm", "gloo"
"""The planes within and between hosts, unless the options say otherwise."""


class Parts:
    """Planes of parts of a group. :meth:`abort` may be called by any thread, the rest by the executor's."""

    def __init__(self, context: PlaneContext) -> None:
        self._context = context
        self._guard = threading.Lock()
        self._planes: list[HostPlane] = []
        self.inner_name = context.options.get("inner", INNER)
        self.outer_name = context.options.get("outer", OUTER)
        self.aborted = False

    @property
    def store(self) -> KeyValue:
        if self._context.store is None:
            raise PlaneBroken("planes of parts of a group need a rendezvous store")
        return self._context.store

    def inner(self, members: Sequence[int], index: int, scope: str, deadline: Deadline) -> HostPlane:
        """Connect the plane of one host; this member is ``members[index]``."""
        name = "local" if len(members) == 1 else self.inner_name
        return self.connect(name, members, index, scope, deadline)

    def connect(
        self, name: str, members: Sequence[int], index: int, scope: str, deadline: Deadline
    ) -> HostPlane:
        """Connect a plane of this name; this member is ``members[index]``. The members make shared memory themselves."""
        context = self.part(members, index, scope)
        cls = registry.host_plane_class(name)
        if name != "shm":
            return self._connect(cls(context), deadline)
        descriptor = self._segment(context, deadline)
        try:
            # The plane takes over a duplicate. This descriptor stays open until all members have come: they open it by its number.
            return self._connect(cls(replace(context, memory_fd=os.dup(descriptor))), deadline)
        finally:
            os.close(descriptor)

    def outer(self, members: Sequence[int], index: int, scope: str, deadline: Deadline) -> HostPlane:
        """Connect a plane between hosts; this member is ``members[index]``."""
        return self.connect(self.outer_name, members, index, scope, deadline)

    def _segment(self, context: PlaneContext, deadline: Deadline) -> int:
        assert context.store is not None
        if context.index:
            return segment.accept(context.store, seconds_left(deadline))
        size = layout_from(context.options, context.size).size
        return segment.offer(context.store, f"hvdlab-{context.process_set}-{context.epoch}", size)

    def part(self, members: Sequence[int], index: int, scope: str) -> PlaneContext:
        """What a plane of some of the members is built from; this member is ``members[index]``."""
        me = self._context
        return replace(
            me,
            index=index,
            size=len(members),
            ranks=tuple(me.ranks[m] for m in members),
            hosts=tuple(me.hosts[m] for m in members),
            store=ScopedStore(self.store, scope),
            memory_fd=-1,
        )

    def _connect(self, plane: HostPlane, deadline: Deadline) -> HostPlane:
        with self._guard:
            self._planes.append(plane)
            aborted = self.aborted
        if aborted:
            raise PlaneAborted
        plane.connect(seconds_left(deadline))
        return plane

    @property
    def gave_up(self) -> bool:
        """Whether an aborted operation of a library did not end, and was left to the library with all that it holds."""
        return any(getattr(plane, "gave_up", False) for plane in self._planes)

    def abort(self) -> None:
        """Abort all planes, also those that would be built later."""
        with self._guard:
            self.aborted = True
            planes = list(self._planes)
        for plane in planes:
            plane.abort()

    def close(self) -> None:
        with self._guard:
            self.aborted = True
            planes = list(self._planes)
        for plane in planes:
            plane.close()


def seconds_left(deadline: Deadline) -> float:
    return deadline.remaining() or 0.0
