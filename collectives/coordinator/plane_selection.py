"""Plane selection: which data plane a process set gets in a generation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hvdlab.collectives.planes.shm.layout import SLOTS, segment_size, slot_bytes
from hvdlab.collectives.protocol.messages import Member

SHM_LIMIT = 1024
"""Ranks of one host that can share a segment: each chunk is divided among them."""
CUDA_IPC, CUDA_IPC_LIMIT = "cuda/ipc", 64
"""The plane for GPUs of one host, and the number of ranks for which it has room: its kernels have that many addresses."""
CUDA_NCCL, CUDA_NCCL_LIMIT = "cuda/nccl", 127
"""The plane for ranks that have a GPU each, and the number of ranks for which it has room."""
CUDA_AUTO = "cuda/auto"
"""Either of these: the ranks choose it at their first collective of CUDA tensors, once they know which GPUs these are on."""


@dataclass(frozen=True, slots=True)
class PlaneChoice:
    """Choice of a plane, with its options.

    Attributes:
        plane: Name of the plane.
        options: Settings that all members use.
        memory: Bytes of the shared memory that the coordinator hands out with it, or 0.
        notes: Lines for the operator about wishes that could not be met.
        device_planes: Planes for tensors that are not on the host, by device class.
    """

    plane: str
    options: dict[str, str]
    memory: int = 0
    notes: tuple[str, ...] = ()
    device_planes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Wish of the user for collectives of ranks on several hosts to work within each host first; ``None`` leaves that to hvdlab."""

    allreduce: bool | None = None
    allgather: bool | None = None

    @property
    def refused(self) -> bool:
        """Return whether the user refuses hierarchical operations of any kind."""
        return self.allreduce is False and self.allgather is not True

    @property
    def flat(self) -> str:
        """Return the operations that must not be hierarchical for the user, separated by commas."""
        kinds = {"allreduce": self.allreduce, "allgather": self.allgather}
        return ",".join(kind for kind, wanted in kinds.items() if wanted is False)


AUTOMATIC = Hierarchy()
"""No wish: hvdlab chooses."""


def choose_plane(members: Sequence[Member], hierarchy: Hierarchy = AUTOMATIC) -> PlaneChoice:
    """Choose the planes of a process set with these members, by position.

    A plane that users ask for comes first. Otherwise, on one host: MPI if all members offer it, as those of an MPI launcher do; otherwise
    ``local`` for one member, and shared memory for several (Gloo where that is not possible). Between hosts MPI or Gloo, with shared
    memory within those hosts that have several members. Beside it there is a plane for each device class for which all members offer
    one.
    """
    return replace(_choose_host_plane(members, hierarchy), device_planes=_device_planes(members))


def _device_planes(members: Sequence[Member]) -> dict[str, str]:
    """Return the plane for each device class: the first of the first member's that all others offer, too, and that can connect them.

    Where both planes for CUDA tensors can, it is :data:`CUDA_AUTO`.
    """
    found: dict[str, list[str]] = {}
    for plane in members[0].planes if members else ():
        device, separator, _ = plane.partition("/")
        if separator and _all_offer(plane, members) and _suits(plane, members):
            found.setdefault(device, []).append(plane)
    return {
        device: CUDA_AUTO if {CUDA_IPC, CUDA_NCCL} <= {*planes} else planes[0]
        for device, planes in found.items()
    }


def _suits(plane: str, members: Sequence[Member]) -> bool:
    """Return whether a plane for devices can connect these members."""
    if plane == CUDA_IPC:
        return len(members) <= CUDA_IPC_LIMIT and len({member.host for member in members}) == 1
    return plane != CUDA_NCCL or len(members) <= CUDA_NCCL_LIMIT


def _choose_host_plane(members: Sequence[Member], hierarchy: Hierarchy) -> PlaneChoice:
    # The order is the rule: a user's wish, then the hosts, then the launcher, then the number of members.
    notes: list[str] = []
    wish = _wish(members, notes)
    if wish:
        return _choice(wish, members, notes, hierarchy)
    between = _between(members)
    hosts = _by_host(members)
    if len(hosts) > 1:
        plane = "hierarchical" if _nests(hosts, hierarchy, notes) else between
        return _choice(plane, members, notes, hierarchy)
    # Also on one host: only ranks that an MPI launcher has started offer it, so it is their user's choice.
    if between == "mpi":
        return _choice("mpi", members, notes, hierarchy)
    if len(members) == 1:
        return _choice("local", members, notes, hierarchy)
    if len(members) <= SHM_LIMIT and _all_offer("shm", members):
        return _choice("shm", members, notes, hierarchy)
    return _choice("gloo", members, notes, hierarchy)


def without_memory(choice: PlaneChoice) -> PlaneChoice:
    """Return the choice for members that have to make shared memory themselves, since the coordinator can't hand it out."""
    note = "; ".join((*choice.notes, "shared memory can't be given to all members; they make it themselves"))
    return PlaneChoice(
        "hierarchical", {"slots": str(SLOTS), "note": note}, device_planes=choice.device_planes
    )


def _nests(hosts: Mapping[str, Sequence[Member]], hierarchy: Hierarchy, notes: list[str]) -> bool:
    """Return whether to use shared memory within the hosts; add a note with the reason if users asked for it in vain."""
    asked = hierarchy.allreduce or hierarchy.allgather
    reason = _why_flat(hosts)
    if reason and asked:
        notes.append(f"hierarchical collectives were asked for, but {reason}")
    return not reason and not hierarchy.refused


def _why_flat(hosts: Mapping[str, Sequence[Member]]) -> str:
    """Return why shared memory within hosts is of no use or not possible, or an empty text."""
    shared = [here for here in hosts.values() if len(here) > 1]
    if not shared:
        return "no host has more than one rank"
    return _why_not_shared(shared)


def _why_not_shared(hosts: Iterable[Sequence[Member]]) -> str:
    """Return why the members of these hosts, of several members each, can't share memory, or an empty text."""
    for here in hosts:
        if len(here) > SHM_LIMIT:
            return f"a segment has room for {SHM_LIMIT} ranks, not {len(here)}"
        lacking = [member.rank for member in here if "shm" not in member.planes]
        if lacking:
            return f"ranks {lacking} have no plane shm"
    return ""


def _by_host(members: Sequence[Member]) -> dict[str, list[Member]]:
    hosts: dict[str, list[Member]] = {}
    for member in members:
        hosts.setdefault(member.host, []).append(member)
    return hosts


def _all_offer(plane: str, members: Sequence[Member]) -> bool:
    return all(plane in member.planes for member in members)


def _between(members: Sequence[Member]) -> str:
    """Return the plane between hosts."""
    return "mpi" if _all_offer("mpi", members) else "gloo"


def _wish(members: Sequence[Member], notes: list[str]) -> str:
    # Backwards, so that of the ranks with one wish the first one is kept.
    wishes = {member.plane: member.rank for member in reversed(members) if member.plane not in ("", "auto")}
    if not wishes:
        return ""
    plane, rank = min(wishes.items(), key=lambda item: item[1])
    if len(wishes) > 1:
        listed = ", ".join(f"rank {r} {p}" for p, r in sorted(wishes.items(), key=lambda item: item[1]))
        notes.append(f"the ranks ask for different planes ({listed}); taking {plane} of rank {rank}")
    if "/" in plane:
        notes.append(f"plane {plane} is not for tensors of the host; choosing another for those")
        return ""
    if plane == "local" and len(members) > 1:
        notes.append(f"plane local has room for one rank, not {len(members)}; choosing another")
        return ""
    if plane == "shm" and len(members) > SHM_LIMIT:
        notes.append(f"plane shm has room for {SHM_LIMIT} ranks, not {len(members)}; choosing another")
        return ""
    if plane == "shm" and len({member.host for member in members}) > 1:
        notes.append("plane shm was asked for, but the ranks are on several hosts; choosing another")
        return ""
    if plane == "hierarchical":
        reason = _why_not_shared(here for here in _by_host(members).values() if len(here) > 1)
        if reason:
            notes.append(f"plane hierarchical was asked for, but {reason}; choosing another")
            return ""
        return plane
    lacking = [member.rank for member in members if member.planes and plane not in member.planes]
    # Every rank has `local`, so none lists it among the planes that it offers.
    if lacking and plane != "local":
        notes.append(f"plane {plane} was asked for, but ranks {lacking} can't use it; choosing another")
        return ""
    return plane


def _choice(plane: str, members: Sequence[Member], notes: list[str], hierarchy: Hierarchy) -> PlaneChoice:
    options = {"note": "; ".join(notes)} if notes else {}
    if plane == "hierarchical":
        options |= {"slots": str(SLOTS), "inner": "shm", "outer": _between(members), "flat": hierarchy.flat}
    if plane != "shm":
        return PlaneChoice(plane, options, 0, tuple(notes))
    size = len(members)
    chunk = slot_bytes(size)
    return PlaneChoice(
        plane,
        options | {"chunk_bytes": str(chunk), "slots": str(SLOTS)},
        segment_size(size, chunk, SLOTS),
        tuple(notes),
    )
