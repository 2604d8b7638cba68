"""How two members of a group exchange messages, in which the others have no part.

Every operation of the group's plane concerns all members, so two members that exchange messages have a plane of their own, of the
same kind; they build it at their first message. Within a host the two make the segment of its shared memory themselves.
"""

from __future__ import annotations

from hvdlab.collectives.deadline import Deadline
from hvdlab.collectives.planes.base import Phases, PlaneAborted, PlaneBroken, PlaneContext
from hvdlab.collectives.planes.buffers import HostArray
from hvdlab.collectives.planes.host import HostPlane
from hvdlab.collectives.planes.parts import Parts


class Pairs:
    """The planes that one member has with others of its group. :meth:`abort` may be called by any thread, the rest by the executor's.

    Both members of a pair have the same messages in the same order, and no two members wait for each other: the coordinator
    orders the messages of all pairs. What an operation raises is what :class:`~hvdlab.collectives.planes.base.Plane` says.

    Args:
        name: Name of the group's plane.
        context: What that plane is built from. Its memory is not used here.
        timeout: Seconds that the other member may take to come for the first message.
    """

    def __init__(self, name: str, context: PlaneContext, timeout: float) -> None:
        self.context = context
        self._name, self._timeout = name, timeout
        self._parts = Parts(context)
        #: By the other member's position.
        self._planes: dict[int, HostPlane] = {}

    def send(self, buffer: HostArray, target: int, phases: Phases) -> None:
        """Send a buffer to the member at this position. It has been read when this returns."""
        self._plane(target).broadcast(buffer, int(target < self.context.index), phases)

    def receive(self, buffer: HostArray, source: int, phases: Phases) -> None:
        """Fill a buffer with the message of the member at this position, which has as many bytes."""
        self._plane(source).broadcast(buffer, int(source > self.context.index), phases)

    def _plane(self, other: int) -> HostPlane:
        if self._parts.aborted:
            raise PlaneAborted
        plane = self._planes.get(other)
        if plane is None:
            own = self.context.index
            pair = (min(own, other), max(own, other))
            scope = f"pair{pair[0]}-{pair[1]}/"
            try:
                plane = self._parts.connect(
                    self._kind(other), pair, pair.index(own), scope, Deadline(self._timeout)
                )
            except TimeoutError as error:
                rank = self.context.ranks[other]
                raise PlaneBroken(f"rank {rank} did not come for its first message: {error}") from error
            self._planes[other] = plane
        return plane

    def _kind(self, other: int) -> str:
        """The plane of the two: the group's, or in place of ``hierarchical`` the one that it uses within a host or between hosts."""
        if self._name != "hierarchical":
            return self._name
        hosts = self.context.hosts
        return self._parts.inner_name if hosts[other] == hosts[self.context.index] else self._parts.outer_name

    @property
    def gave_up(self) -> bool:
        """Whether an aborted operation of a library did not end, and was left to the library with all that it holds."""
        return self._parts.gave_up

    def abort(self) -> None:
        """End the message that is on its way, and all later ones, with ``PlaneAborted``. Never blocks; idempotent."""
        self._parts.abort()

    def close(self) -> None:
        """Free everything. Idempotent; never waits for other members."""
        self._parts.close()
        self._planes.clear()
