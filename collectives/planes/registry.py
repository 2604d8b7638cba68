"""Names to plane classes, imported when they are first needed; and planes of parts of a group."""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from collections.abc import Sequence
from dataclasses import replace

from hvdlab.collectives.errors import UnsupportedError
from hvdlab.collectives.planes.base import (
    HostArray,
    KeyValue,
    PhaseTimes,
    Plane,
    PlaneAborted,
    PlaneBroken,
    PlaneContext,
    ScopedStore,
    open_memfd,
    publish_memfd,
)
from hvdlab.collectives.planes.gpu import gpu_plane
from hvdlab.collectives.planes.host import HostPlane
from hvdlab.collectives.planes.shm.layout import layout_from
from hvdlab.collectives.rendezvous import backends
from hvdlab.collectives.time_limits import Deadline

_CLASSES: dict[str, tuple[str, str, str]] = {
    # name: module, class, package that must be installed; a plane for a device class is called "device/plane"
    "local": ("hvdlab.collectives.planes.host", "LocalPlane", ""),
    "shm": ("hvdlab.collectives.planes.shm", "ShmPlane", ""),
    "gloo": ("hvdlab.collectives.planes.gloo", "GlooPlane", "torch"),
    "mpi": ("hvdlab.collectives.planes.mpi", "MpiPlane", "mpi4py"),
    "hierarchical": ("hvdlab.collectives.planes.hierarchical", "HierarchicalPlane", ""),
    "cuda/ipc": ("hvdlab.collectives.planes.gpu.ipc_plane", "CudaPlane", ""),
    "cuda/nccl": ("hvdlab.collectives.planes.gpu.nccl_plane", "NcclPlane", ""),
}
_REMEDY = {"torch": "pip install 'hvdlab[torch]'", "mpi4py": "pip install 'hvdlab[mpi]'"}

MPI_LAUNCHER_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_ID", "MPI_LOCALRANKID")


def names() -> tuple[str, ...]:
    """Return all planes for tensors of the host, whether usable here or not."""
    return tuple(name for name in _CLASSES if "/" not in name)


def under_mpi() -> bool:
    """Return whether an MPI launcher started this process."""
    return any(name in os.environ for name in MPI_LAUNCHER_VARIABLES)


def missing(name: str) -> str | None:
    """Return why this process can't offer a plane, found out without importing anything heavy; ``None`` if it may be usable."""
    if name not in _CLASSES:
        return f"there is no data plane `{name}`; choose one of {', '.join(names())}"
    module, _, package = _CLASSES[name]
    if package and importlib.util.find_spec(package) is None:
        return f"the plane `{name}` needs {package}: {_REMEDY[package]}"
    if name == "mpi" and not under_mpi():
        return "the plane `mpi` needs ranks that an MPI launcher (mpiexec, srun --mpi) started"
    if name.startswith("cuda/"):
        reason = gpu_plane.why_off()
        return f"the plane `{name}` can't be used: {reason}" if reason else None
    if importlib.util.find_spec(module) is None:
        return f"the plane `{name}` is not part of this installation"
    return None


def plane_class(name: str) -> type[Plane]:
    """Import the class of a plane.

    Raises:
        UnsupportedError: The plane is unknown or can't be used in this process; the text gives the reason and the remedy.
    """
    reason = missing(name)
    if reason is not None:
        raise UnsupportedError(reason[0].upper() + reason[1:] + ".")
    module, attribute, _ = _CLASSES[name]
    cls: type[Plane] = getattr(importlib.import_module(module), attribute)
    # Asked as well: ``missing`` imports nothing, and so can't know whether a library loads.
    reason = cls.unavailable()
    if reason is not None:
        raise UnsupportedError(reason)
    return cls


def build(name: str, context: PlaneContext) -> Plane:
    """Return a plane of a process set; of CUDA tensors it is one that is checked before it is used. Raises like :func:`plane_class`."""
    if name.startswith(f"{gpu_plane.CUDA}/"):
        module = importlib.import_module("hvdlab.collectives.planes.gpu.checked_plane")
        checked: Plane = module.CheckedPlane(context, name)
        return checked
    return plane_class(name)(context)


def host_plane_class(name: str) -> type[HostPlane]:
    """Import the class of a plane of the host's memory. Raises like :func:`plane_class`, and ``TypeError``."""
    cls = plane_class(name)
    if not issubclass(cls, HostPlane):
        raise TypeError(f"the plane `{name}` is for tensors on {cls.device}")
    return cls


def why_unavailable(name: str) -> str | None:
    """Return why a plane can't be used in this process, in one sentence; ``None`` if it can. Imports the plane."""
    try:
        plane_class(name)
    except UnsupportedError as error:
        return str(error)
    return None


def offered(wish: str = "auto") -> tuple[str, ...]:
    """Return the planes that this process offers to the coordinator. For that only ``shm`` and planes of devices are imported.

    Not ``local``, which every rank has, nor ``hierarchical``, which is available wherever its parts are. For CUDA tensors
    only the plane that ``HVDLAB_CUDA_PLANE`` names, if it is set.
    Not ``mpi`` if mpi4py has another MPI than the launcher. Under a launcher that is not MPI's own, such as Slurm's, that can't
    be known, and ``mpi`` is offered only if it is the ``wish``.
    """
    found = []
    for name in _CLASSES:
        if name in ("local", "hierarchical") or missing(name) is not None:
            continue
        if (name == "mpi" and not _suits(wish)) or not gpu_plane.is_wanted(name):
            continue
        if (name == "shm" or "/" in name) and why_unavailable(name) is not None:
            continue
        found.append(name)
    return tuple(found)


def _suits(wish: str) -> bool:
    """Return whether MPI can be expected to work."""
    return backends.mpi_works(os.environ) if backends.started_by_mpi(os.environ) else wish == "mpi"


# -- planes of parts of a group ----------------------------------------------------------------------------------------

# Planes of parts of a group are built, aborted and closed together. :class:`SubgroupPlanes` are, for instance, the planes that a
# hierarchical plane is made of. :class:`PeerPlanes` serve two members that exchange messages, in which the others have no part. Every
# operation of the group's plane concerns all members, so the two have a plane of their own, of the same kind; they build it at their
# first message. Within a host they make its shared memory themselves.


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
        cls = host_plane_class(name)
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
