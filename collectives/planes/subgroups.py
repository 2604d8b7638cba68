"""Planes of parts of a group: built, aborted and closed together.

:class:`SubgroupPlanes` are, for instance, the planes that a hierarchical plane is made of. :class:`PeerPlanes` serve two members that
exchange messages, in which the others have no part. Every operation of the group's plane concerns all members, so the two have a plane of
their own, of the same kind; they build it at their first message. Within a host they make its shared memory themselves.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace

from hvdlab.collectives.planes import registry
from hvdlab.collectives.planes.base import (
    KeyValue,
    PhaseTimes,
    PlaneAborted,
    PlaneBroken,
    PlaneContext,
    ScopedStore,
    open_memfd,
    publish_memfd,
)
from hvdlab.collectives.planes.buffers import HostArray
from hvdlab.collectives.planes.host import HostPlane
from hvdlab.collectives.planes.shm.layout import layout_from
from hvdlab.collectives.time_limits import Deadline

INNER, OUTER = "shm", "gloo"
"""The planes within and between hosts, unless the options name others."""


class SubgroupPlanes:
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
            # The plane owns a duplicate. This descriptor stays open until all members have come: they open it by its number.
            return self._connect(cls(replace(context, memory_fd=os.dup(descriptor))), deadline)
        finally:
            os.close(descriptor)

    def outer(self, members: Sequence[int], index: int, scope: str, deadline: Deadline) -> HostPlane:
        """Connect a plane between hosts; this member is ``members[index]``."""
        return self.connect(self.outer_name, members, index, scope, deadline)

    def _segment(self, context: PlaneContext, deadline: Deadline) -> int:
        assert context.store is not None
        if context.index:
            return open_memfd(context.store, seconds_left(deadline))
        size = layout_from(context.options, context.size).size
        return publish_memfd(context.store, f"hvdlab-{context.process_set}-{context.generation}", size)

    def part(self, members: Sequence[int], index: int, scope: str) -> PlaneContext:
        """Return the context of a plane of some of the members; this member is ``members[index]``."""
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
        # An abort either found this plane in the list, or had set the flag before the list was changed.
        if aborted:
            raise PlaneAborted
        # Without the guard, which abort() needs: this waits for other members.
        plane.connect(seconds_left(deadline))
        return plane

    @property
    def gave_up(self) -> bool:
        """Return whether an aborted operation of a library did not end, and was left to the library with all that it holds."""
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
    """Return the seconds until the deadline; 0 if it has passed or there is none."""
    return deadline.remaining() or 0.0


class PeerPlanes:
    """Planes that one member has with others of its group, one by one. :meth:`abort` may be called by any thread, the rest by the executor's.

    Both members of a pair have the same messages in the same order, and no two members wait for each other: the coordinator
    orders the messages of all pairs. An operation raises the errors of :class:`~hvdlab.collectives.planes.base.Plane`.

    Args:
        name: Name of the group's plane.
        context: Context of that plane. Its memory is not used here.
        timeout: Seconds that the other member may need to come for the first message.
    """

    def __init__(self, name: str, context: PlaneContext, timeout: float) -> None:
        self.context = context
        self._name, self._timeout = name, timeout
        self._subgroups = SubgroupPlanes(context)
        #: By the other member's position.
        self._planes: dict[int, HostPlane] = {}

    def send(self, buffer: HostArray, target: int, phases: PhaseTimes) -> None:
        """Send a buffer to the member at this position. It has been read when this returns."""
        # The root's position in the pair, which is in ascending order: the sender is the second one if the other comes before it.
        self._plane(target).broadcast(buffer, int(target < self.context.index), phases)

    def receive(self, buffer: HostArray, source: int, phases: PhaseTimes) -> None:
        """Fill a buffer with the message of the member at this position, which has as many bytes."""
        self._plane(source).broadcast(buffer, int(source > self.context.index), phases)

    def _plane(self, other: int) -> HostPlane:
        if self._subgroups.aborted:
            raise PlaneAborted
        plane = self._planes.get(other)
        if plane is None:
            own = self.context.index
            pair = (min(own, other), max(own, other))
            scope = f"pair{pair[0]}-{pair[1]}/"
            try:
                plane = self._subgroups.connect(
                    self._kind(other), pair, pair.index(own), scope, Deadline(self._timeout)
                )
            except TimeoutError as error:
                rank = self.context.ranks[other]
                raise PlaneBroken(f"rank {rank} did not come for its first message: {error}") from error
            # Only once it is connected. One that failed stays with the subgroups, which abort and close it.
            self._planes[other] = plane
        return plane

    def _kind(self, other: int) -> str:
        """Return the name of the plane of the two: the group's, or in place of ``hierarchical`` the one that it uses within a host or between hosts."""
        if self._name != "hierarchical":
            return self._name
        hosts = self.context.hosts
        return (
            self._subgroups.inner_name
            if hosts[other] == hosts[self.context.index]
            else self._subgroups.outer_name
        )

    @property
    def gave_up(self) -> bool:
        """Return whether an aborted operation of a library did not end, and was left to the library with all that it holds."""
        return self._subgroups.gave_up

    def abort(self) -> None:
        """End the message that is on its way, and all later ones, with ``PlaneAborted``. Never blocks; idempotent."""
        self._subgroups.abort()

    def close(self) -> None:
        """Free everything. Idempotent; never waits for other members."""
        self._subgroups.close()
        self._planes.clear()
